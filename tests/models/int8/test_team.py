"""The threads of integer passes: every piece done once, each step after the one before, and nobody waited for in vain."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from pathlib import Path

import pytest

from sds.models.int8.sources import PASSES
from tests.scale import limit_s, scale, seeded

FLAGS = ["-std=c++17", "-O1", "-g", "-march=native", "-pthread", "-Wall", "-Wextra", "-Werror"]
RACES = "-fsanitize=thread"
pytestmark = pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="not written for this processor")


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled so that a race ends it, where that can be compiled and run here."""
    source, made = Path(__file__).with_name("team.cc"), tmp_path_factory.mktemp("team") / "team"
    command = [*shlex.split(os.environ.get("CXX", "c++")), *FLAGS, f"-I{PASSES}", str(source), "-o", str(made)]
    races = ([*command, RACES], [made, "1", "0", "0"])
    if any(subprocess.run(each, check=False, capture_output=True).returncode for each in races):
        subprocess.run(command, check=True)
    return made


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_steps_follow_one_another_whoever_has_a_core(team: Path, threads: int) -> None:
    rounds, seed = scale(300, 10_000), seeded(threads).randrange(1 << 31)
    command = [team, *map(str, (threads, rounds, seed))]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=limit_s(300))
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)
