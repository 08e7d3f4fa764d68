"""Whichever step of opening a gate fails: nothing stays open, also while the error, and what it holds, is kept."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType

import pytest

from sds import Gate, gate, opening, submission
from sds.host import keys, log, paths
from sds.kernel.registry import registry
from sds.kernel.storage import ledger, sqlite
from tests.gates.own import GATE, written
from tests.proposers import Greedy

ENDS = {"close", "on_close"}  # what closes, and what arranges for it
FILES = {module.__file__ for module in (gate, opening, submission, keys, log, paths, registry, ledger, sqlite)}


def opened(folder: Path) -> Gate:
    return Gate.load(folder / "toll_gate", folder=folder / "home", engine=Greedy("WAIVE"))


def held(folder: Path) -> tuple[Counter[str], set[threading.Thread]]:
    """Return which files of a folder the process has open, and its threads."""
    found = Counter[str]()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of this very look
            found[str(each.readlink())] += 1
    return Counter({name: n for name, n in found.items() if str(folder) in name}), set(threading.enumerate())


def steps(folder: Path) -> list[CodeType]:
    """Return the functions of opening, in the order of their first calls."""
    found = dict[CodeType, None]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename in FILES and frame.f_code.co_name not in ENDS:
            found[frame.f_code] = None

    sys.setprofile(note)
    try:
        made = opened(folder)
    finally:
        sys.setprofile(None)
    made.close()
    return list(found)


def fails(folder: Path, step: CodeType) -> MemoryError | None:
    """Open while the first call of `step` fails; return the error. None: opening has made up for it."""

    def fail(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is step:
            sys.setprofile(None)
            raise MemoryError(step.co_name)

    sys.setprofile(fail)
    try:
        made = opened(folder)
    except MemoryError as error:
        return error
    finally:
        sys.setprofile(None)
    made.close()
    return None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list what a process has open")
def test_whichever_step_of_opening_fails_nothing_stays_open(tmp_path: Path) -> None:
    written(tmp_path / "toll_gate", GATE)
    opened(tmp_path).close()
    listed, (files, threads) = steps(tmp_path), held(tmp_path)
    assert {"__init__", "open_record", "_unlock", "register", "_prepare"} <= {step.co_name for step in listed}
    left, failed = list[str](), list[MemoryError]()
    for step in listed:
        if (error := fails(tmp_path, step)) is not None:
            failed.append(error)
        files_now, threads_now = held(tmp_path)
        if files_now != files or threads_now - threads:
            left.append(step.co_qualname)
            files, threads = files_now, threads_now
    assert [] == left
    assert len(failed) > len(listed) // 2
    opened(tmp_path).close()
