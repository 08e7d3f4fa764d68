"""The unit and the image start the service with options that it has, and leave it more time to end than it takes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from sds.cli.app import app

ROOT = Path(__file__).parents[3]
UNIT, IMAGE = ROOT / "deploy" / "sds.service", ROOT / "Containerfile"
COMMANDS = {
    "the unit": shlex.split(re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)[0]),
    "the image": re.findall(r'"([^"]*)"', re.findall(r"^CMD (.*)$", IMAGE.read_text(), re.MULTILINE)[0]),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_the_service_is_started_with_options_that_it_has(command: list[str]) -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert ("sds", "serve") == (Path(command[0]).name, command[1])
    given = serve.make_context("serve", command[2:]).params
    assert (["refund"], 8080) == (list(given["gate"]), given["port"])


def test_a_service_that_is_stopped_is_given_more_time_than_it_takes_to_drain() -> None:
    (stop_s,) = map(float, re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE))
    drains_s = [float(each[each.index("--drain-s") + 1]) for each in COMMANDS.values()]
    assert stop_s > max(drains_s) + 15  # what its threads in the background are in the middle of


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "sds.service"
    unit.write_text(UNIT.read_text().replace(COMMANDS["the unit"][0], "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    assert (0, "") == (done.returncode, done.stdout + done.stderr)
