"""Ctrl-C: while the model loads it just ends; between decisions it says what was done, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

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
    assert "stopped after" in said
    assert "Traceback" not in said
    shell = Shell(tmp_path)
    assert {"success", "leased"} <= json.loads(shell.ok("recover", "--json")).keys()
    assert "0 faults" in shell.ok("ledger", "verify")


def test_before_the_first_decision_it_just_ends(tmp_path: Path) -> None:
    running = start(tmp_path)
    time.sleep(1.0)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=WAIT_S)
    assert 0 != running.returncode
    assert 0 == decided(tmp_path)
