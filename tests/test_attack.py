"""The attack from outside holds, at CI size: `python -m tests.attack` is the same by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack.__main__ import PARTS
from tests.scale import limit_s, scale

ROOT = Path(__file__).parents[1]
IN_A_STORM = "kills"  # in CI, over both stores: tests.storms.kill, which counts the same and what callers were answered
IN_CI = [part for part in PARTS if part != IN_A_STORM]


@pytest.mark.parametrize("part", PARTS if scale(0, 1) else IN_CI)
def test_every_figure_of_the_attack_holds(part: str) -> None:
    command = [sys.executable, "-m", "tests.attack", part]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s(600), check=False)
    print(done.stdout, done.stderr)
    said = json.loads(done.stdout.splitlines()[-1])
    assert (0, True) == (done.returncode, said["holds"])
    assert said["parts"][part]["figures"]


def test_a_part_that_is_not_there_is_refused_in_plain_words() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.attack", "peace"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (2, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("error: there is no part `peace`; parts are: restores, ")
