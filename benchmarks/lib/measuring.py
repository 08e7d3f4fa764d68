"""What all benchmarks share: `main` with its options, the facts about machine and versions, timing, percentiles."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sds.host.machine import machine_name, usable_cores
from sds.kernel.errors import SdsError, UsageError, cause_of
from sds.models.catalog.catalog import this_machine
from sds.models.protocol import BackendError

Report = dict[str, Any]
Say = Callable[[str], None]
HELP = "sds bench QUESTION -h"
WHERE = ("--save", "--folder", "--overlays", "--results", "--page")


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, with a hint in a second one, and exits with 2."""

    def error(self, message: str, hint: str = HELP) -> NoReturn:
        self.exit(2, f"error: {message}\n" + (f"mend:  {hint}\n" if hint else ""))


def main(
    doc: str | None,
    options: Callable[[Parser], None],
    run: Callable[[argparse.Namespace, Say], Report],
    show: Callable[[Report], None],
) -> None:
    """Run one question: parse `options`, measure with `run`, print with `show`; the last line is the JSON document.

    `doc` is printed before the first line that `run` says. With `--save` the document is also FOLDER/QUESTION.json.
    """
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the JSON document")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the document there, too: QUESTION.json")
    options(parser)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        asked, others = parser.parse_known_args()
        if others:
            known = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in vars(asked)))
            parser.error(f"this question does not take `{' '.join(others)}`: it takes {known}")
        _measure(doc, asked, run, show)
        sys.stdout.flush()
    except (SdsError, BackendError) as error:
        mistaken = isinstance(error, UsageError | BackendError)
        parser.error(str(error), error.hint or (HELP if mistaken else ""))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sds":
            raise
        parser.error(f"this question needs `{error.name}`", "run make peers in the source folder")
    except KeyboardInterrupt:
        parser.exit(130, "error: interrupted: nothing was kept\n")
    except BrokenPipeError:  # the output's reader is gone
        _discard_output()
        parser.exit(0)
    except OSError as error:
        _discard_output()
        parser.exit(1, f"error: the operating system refused: {cause_of(error)}\n")


def _measure(
    doc: str | None,
    asked: argparse.Namespace,
    run: Callable[[argparse.Namespace, Say], Report],
    show: Callable[[Report], None],
) -> None:
    if asked.save:
        make_folder(asked.save)
    unsaid = [] if asked.json or not doc else [doc]

    def say(line: str) -> None:
        """Print a line, and the docstring before the first one: a mistake found before that is one line alone."""
        while unsaid:
            print(unsaid.pop())
        print(line)

    report = run(asked, _silent if asked.json else say)
    report["command"] = shlex.join(["sds", "bench", report["benchmark"], *_how(sys.argv[1:])])
    if asked.save:
        write_whole(asked.save / f"{report['benchmark']}.json", json.dumps(report, indent=1) + "\n")
    if not asked.json:
        while unsaid:
            print(unsaid.pop())
        show(report)
    print(json.dumps(report))


def _discard_output() -> None:
    """Discard buffered output that could not be written: Python would try again at exit, and complain."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def whole_number(most: int, least: int = 1) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`, for `add_argument(type=...)`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"`{text}` is not a number from {least} to {most}")
        return int(text)

    return read


def existing(text: str) -> Path:
    """Return the path of a file or folder that exists, for `add_argument(type=...)`."""
    if not text or not Path(text).exists():
        raise argparse.ArgumentTypeError(f"`{text}` cannot be read: no such file or directory")
    return Path(text)


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of a list of `known` names with commas between them; it returns them in the order of `known`."""

    def read(text: str) -> list[str]:
        wanted = {name.strip() for name in text.split(",")}
        if unknown := wanted - set(known):
            raise argparse.ArgumentTypeError(f"there is no `{min(unknown)}`, only: {', '.join(known)}")
        return [name for name in known if name in wanted]

    return read


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"`{folder}` cannot be written: {cause_of(error)}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a reader finds the whole text, or what was there before. Raises UsageError."""
    partial: Path | None = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False, encoding="utf-8") as file:
            partial = Path(file.name)
            file.write(text)
        partial.chmod(0o644)
        partial.replace(path)
    except OSError as error:
        if partial:
            partial.unlink(missing_ok=True)
        raise UsageError(f"`{path}` cannot be written: {cause_of(error)}") from error


def _how(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that say what was measured, without those that name places (WHERE) and `--json`."""
    left, kept = iter(arguments), []
    for argument in left:
        name, given, _ = argument.partition("=")
        if name in WHERE and not given:
            next(left, None)
        elif name not in {*WHERE, "--json"}:
            kept.append(argument)
    return kept


def _silent(_text: str) -> None:
    """Print nothing, for `--json`."""


def machine() -> dict[str, object]:
    """Return the date, the processor with its features, the cores this process may use, and the commit of our code."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine_name(),
        "features": this_machine().features,
        "cores": usable_cores(),
        "code": _code(),
    }


def _code() -> str | None:
    """Return the commit of our code, with `-dirty` where Python files differ from it; None outside a git checkout."""
    commit = _git("rev-parse", "--short", "HEAD")
    return commit and commit + "-dirty" * bool(_git("status", "--porcelain", "--", "*.py"))


def _git(*asked: str) -> str | None:
    git, here = shutil.which("git"), Path(__file__).resolve().parents[2]
    if git is None or not (here / ".git").exists():  # installed, perhaps within another's repository
        return None
    answer = subprocess.run([git, "-C", here, *asked], capture_output=True, text=True, check=False)  # noqa: S603
    return answer.stdout.strip() or None


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of Python and of these distributions; `not installed` for one that is missing."""
    installed = {"python": platform.python_version()}
    for name in distributions:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def timed_us(call: Callable[[], object]) -> float:
    """Return the time of one call in microseconds."""
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1000


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return n, p50, p95, p99 and max, in the unit of the values."""
    p50, p95, p99 = (float(p) for p in np.percentile(values, [50, 95, 99]))
    figures = {"p50": p50, "p95": p95, "p99": p99, "max": max(values)}
    return {"n": len(values), **{name: round(value, 2) for name, value in figures.items()}}
