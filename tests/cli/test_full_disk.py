"""On a disk without room every command says what it could not write, and that room is what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Shell

# Runs the command of the other arguments in a folder that is a disk of its own without any room left
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=64k,mode=700 tmpfs "$1" && cd "$1" && shift || exit 99
head -c 65536 /dev/zero > filler 2> /dev/null
exec "$@"
"""
APART = ["unshare", "--map-root-user", "--mount"]
COMMAND = [sys.executable, "-c", "from sds.cli import main; main()"]


def can_mount() -> bool:
    try:
        return not subprocess.run([*APART, "true"], capture_output=True, check=False).returncode
    except OSError:
        return False


@pytest.mark.skipif(not can_mount(), reason="no file system may be mounted here")
@pytest.mark.parametrize(
    ("command", "home", "message"),
    [
        ("restore --from {full}/copy --gate refund", "disk", "disk/refund/.restore."),
        ("backup --to copy", "full", "the record cannot be copied: database or disk is full"),
        ("new held_payments", "full", "`held_payments` cannot be written: no space left on device"),
        ("keys add shop --role submit --gate refund", "disk", "the service's database failed: its disk is full"),
        ("run refund --limit 1", "disk", "disk/refund` cannot be written: no space left on device"),
    ],
)
def test_it_says_so(tmp_path: Path, report: object, shell: Shell, command: str, home: str, message: str) -> None:
    assert report
    if not (shell.home / "copy").exists():
        shell.ok("backup", "--to", str(shell.home / "copy"), "--with-key")
    disk = tmp_path / "disk"
    disk.mkdir()
    homes = {"full": str(shell.home), "disk": str(disk)}
    environment = {**os.environ, "SDS_HOME": homes[home], "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    words = command.format(**homes).split()
    done = subprocess.run(
        [*APART, "sh", "-c", ON_A_SMALL_DISK, "sh", str(disk), *COMMAND, *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    said = done.stderr.splitlines()
    assert (2, "mend:  free disk space") == (len(said), said[-1]), done.stderr
    assert message in said[0]
    assert done.returncode
