"""Ctrl-C: while it loads it ends with one line; between decisions it says what was done, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sds import cli
from sds.cli import app
from tests.cli.conftest import ROOT, Shell

WAIT_S = 120


def start(home: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "SDS_HOME": str(home), "SDS_THREADS": "1"}
    command = [sys.executable, "-c", "from sds.cli import main; main()", "run", "refund", "--limit", "200"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )


def decided(home: Path) -> int:
    path = home / "refund" / "decisions.db"
    if not path.exists():
        return 0
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        try:
            return int(db.execute("SELECT count(*) FROM ledger WHERE kind = 'DECIDED'").fetchone()[0])
        except sqlite3.OperationalError:  # not made yet
            return 0


def test_between_decisions_it_says_what_was_done_and_the_record_is_whole(tmp_path: Path) -> None:
    running, ends = start(tmp_path), time.monotonic() + WAIT_S
    while decided(tmp_path) < 2 and time.monotonic() < ends and running.poll() is None:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=WAIT_S)
    assert 130 == running.returncode, said
    assert [True] == [line.startswith("stopped after") for line in said.splitlines()]
    assert "Traceback" not in said
    shell = Shell(tmp_path)
    assert {"success", "leased"} <= json.loads(shell.ok("recover", "--json")).keys()
    assert "0 faults" in shell.ok("ledger", "verify")


# Sends the signal when the module of the first argument is about to be imported, in the command of the others
AT_IMPORT = """
import os, signal, sys
named, *sys.argv[1:] = sys.argv[1:]

class Interrupts:
    def find_spec(self, name, *_):
        if name == named:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from sds.cli import main
main()
"""
# A library that calls back: what Python raises in a callback is lost
IN_A_CALLBACK = """
import ctypes, os, signal
from sds.host.interrupt import ends_at_once

compares = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
with ends_at_once():
    ctypes.CDLL(None).qsort((ctypes.c_int * 2)(), 2, 4, compares(lambda *_: os.kill(os.getpid(), signal.SIGINT) or 0))
print("went on")
"""
# A library that does not return: it waits for a lock that nobody opens, and the signal comes meanwhile
IN_A_LIBRARY = """
import ctypes, os, signal, threading
from sds.host.interrupt import ends_at_once

c = ctypes.CDLL(None)
lock = ctypes.create_string_buffer(64)
with ends_at_once():
    c.pthread_mutex_lock(lock)
    threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT), daemon=True).start()
    c.pthread_mutex_lock(lock)
print("went on")
"""


def ended(tmp_path: Path, script: str, *args: str) -> tuple[int, str, str]:
    environment = {**os.environ, "SDS_HOME": str(tmp_path), "SDS_THREADS": "1"}
    command = [sys.executable, "-c", script, *args]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=WAIT_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("sds.cli.app", "flows"),
        ("sds.kernel.errors", "run refund"),
        ("sds.lint.lint", "contracts check sds/gates/refund/contract.yaml"),
        ("onnxruntime", "run refund --limit 1"),
        ("onnxruntime", "run refund --limit 1 --saga REFUND_WITH_VOUCHER"),
        ("onnxruntime", "serve --gate refund --dev --port 0"),
        ("llama_cpp", "doctor --engine native"),
        ("llama_cpp", "run refund --limit 1 --engine native"),
        ("llama_cpp", "models prepare"),
    ],
)
def test_while_it_loads_it_just_ends(tmp_path: Path, module: str, command: str) -> None:
    code, _, said = ended(tmp_path, AT_IMPORT, module, *command.split())
    assert (code, said) in ((-signal.SIGINT, ""), (130, "interrupted\n"))
    assert 0 == decided(tmp_path)


def test_wherever_the_command_line_begins_or_ends_it_says_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C at each instruction of the two entries, as far as it raises there."""
    monkeypatch.setattr(sys, "argv", ["sds", "--version"])
    entries = {cli.main.__code__, app.main.__code__}
    before, tracing = signal.getsignal(signal.SIGINT), sys.gettrace()
    for place in count(1):
        left = iter(range(place, -1, -1))

        def trace(frame: FrameType, event: str, _: object, left: Iterator[int] = left) -> Any:
            if frame.f_code not in entries:
                return None
            frame.f_trace_opcodes = True
            raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if event == "opcode" and raises and next(left, None) == 0:
                raise KeyboardInterrupt
            return trace

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.settrace(trace)
        try:
            with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
                cli.main()
        finally:
            sys.settrace(tracing)
            signal.signal(signal.SIGINT, before)
        said = capfd.readouterr().err
        if next(left, None) is not None:
            break
        assert (130, "interrupted\n") == (getattr(ended.value, "code", None), said)
    assert place > 20


@pytest.mark.parametrize("script", [IN_A_CALLBACK, IN_A_LIBRARY])
def test_a_library_that_loads_does_not_hold_it_up(tmp_path: Path, script: str) -> None:
    assert (-signal.SIGINT, "", "") == ended(tmp_path, script)
