"""A peer in a process of its own: `python -m sds.benchmarks.peer.drivers.serving DRIVER MODEL THREADS [OPTION ...]`.

One JSON line in, one decision, one JSON line out; it idles on standard input. DRIVER: a module with `open_peer`.

It imports nothing of ours, so that a peer may have other versions of our libraries beside it.
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
LoadedModel = tuple[str, tuple[str, ...], Callable[[Request], dict[str, Any]]]  # notes, distributions, what answers


@dataclass(frozen=True, slots=True)
class Said:
    """What a peer wrote; `compile_ms`: the part of the time that the grammar took before the first token."""

    text: str
    compile_ms: float | None = None
    facts: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """One loaded engine. `decide`: {tokens, tokens_static, tokens_kept, text, regex, gbnf, tokens_max} to what it wrote.

    `dists`: the distributions whose versions it names. `notes`: in which mode it runs.
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
    """Say what was opened, or why nothing was, then answer requests until standard input ends."""
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
    """Return what `call` returns, and how long it took in milliseconds."""
    began = perf_counter()
    found = call()
    return found, _ms_since(began)


def _ms_since(began: float) -> float:
    return (perf_counter() - began) * 1000


def _private_output() -> TextIO:
    """Keep the pipe for answers; whatever a library prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _write(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARS_MAX]


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # a peer's libraries call each other by old names
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
