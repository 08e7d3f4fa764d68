"""Serve a peer in its own process: `python -m sds.benchmarks.peer.drivers.serving DRIVER MODEL THREADS [OPTION ...]`.

It reads one JSON line from standard input, decides, and writes one JSON line. DRIVER: a module with `open_peer`.

It imports nothing of ours, so that a peer may run with other versions of our libraries.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

ERROR_CHARS_MAX = 300

Request = dict[str, Any]
Decide = Callable[[Request], "Said"]
LoadedModel = tuple[str, tuple[str, ...], Callable[[Request], dict[str, Any]]]  # notes, distributions, answer function


@dataclass(frozen=True, slots=True)
class Said:
    """What a peer wrote. `compile_ms`: the time to compile the grammar; None: not known. `facts`: more for the answer."""

    text: str
    compile_ms: float | None = None
    facts: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """One loaded engine. `decide` takes {tokens, tokens_static, tokens_kept, text, regex, gbnf, tokens_max}.

    `dists`: the distributions whose versions are reported. `notes`: the mode it runs in.
    """

    decide: Decide
    dists: tuple[str, ...]
    notes: str = ""


def serve(driver: str, model: Path, threads: int, options: list[str]) -> None:
    """Open a driver's peer and answer requests until standard input ends."""

    def opened() -> LoadedModel:
        peer: Peer = import_module(driver).open_peer(model, threads, options)
        return peer.notes, peer.dists, partial(_answer, peer)

    converse(opened)


def converse(opening: Callable[[], LoadedModel]) -> None:
    """Write what was opened, or why it could not be, then answer requests until standard input ends."""
    out = _private_output()
    try:
        notes, dists, answer = opening()
    except ImportError as error:
        _write(out, {"missing": _line(error)})
        return
    except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is counted
        _write(out, {"error": _line(error)})
        return
    _write(out, {"notes": notes, "versions": {name: version(name) for name in dists}})
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is said
            found = {"error": _line(error)}
        _write(out, found)


def _answer(peer: Peer, request: Request) -> dict[str, Any]:
    began = perf_counter()
    try:
        said = peer.decide(request)
    except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is counted
        return {"error": _line(error), "ms": _ms_since(began)}
    return {"text": said.text, "ms": _ms_since(began), "compile_ms": said.compile_ms, **(said.facts or {})}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return a call's result, and its time in milliseconds."""
    began = perf_counter()
    found = call()
    return found, _ms_since(began)


def _ms_since(began: float) -> float:
    return (perf_counter() - began) * 1000


def _private_output() -> TextIO:
    """Return standard output for answers alone; what libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _write(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARS_MAX]


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of peers' libraries, about deprecated names
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
