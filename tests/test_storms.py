"""Every storm, small: `python -m tests.storms NAME` is the same by hand, and prints what replays it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storms import ALL
from tests.storms.ground import SQLITE

ROOT = Path(__file__).parents[1]


def storm(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.storms", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3_600, check=False)


@pytest.mark.parametrize("name", [name for name, each in ALL.items() if SQLITE in each.stores])
def test_every_promise_holds_in_a_storm(name: str) -> None:
    done = storm(name)
    print(done.stdout, done.stderr)
    said = json.loads(done.stdout.splitlines()[-1])
    assert (0, True) == (done.returncode, said["holds"])
    assert said["storms"][name]["figures"]
    assert f"replay: python -m tests.storms {name} --n " in done.stdout


def test_a_storm_that_is_not_there_is_refused_in_plain_words() -> None:
    done = storm("peace")
    assert (2, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("error: there is no storm `peace`; storms are: kill, ")
