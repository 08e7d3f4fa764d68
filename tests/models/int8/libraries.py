"""Integer passes as they run here, and compiled of plain C++ as for the widest registers, which run on any machine."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from sds.models.int8 import backend
from sds.models.int8 import library as integer_library
from sds.models.int8.library import PassesLibrary
from sds.models.int8.sources import PASSES, passes_sources
from sds.models.protocol import Dtype
from tests.scale import scale

FLAGS = ["-std=c++17", "-O2", "-march=native", "-DPASSES_PLAIN", "-Wno-psabi", "-fPIC", "-shared", "-pthread"]
UNDEFINED = [
    "-fsanitize=undefined",
    "-fno-sanitize=alignment",
    "-fno-sanitize-recover",
]  # what C++ leaves undefined ends it
CHECKS = [[], UNDEFINED][scale(0, 1)]  # three times as slow
RUNS: list[tuple[str, Dtype]] = [("here", "int16"), ("here", "int8"), ("plain", "int16"), ("plain", "int8")]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PassesLibrary:
    """Compile them once for all tests of a process: some five seconds, and with -O3 ten."""
    made = tmp_path_factory.mktemp("passes") / "passes-plain.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    stamp = f'-DPASSES_SOURCES="{passes_sources()}"'
    subprocess.run([*compiler, *FLAGS, *CHECKS, stamp, str(PASSES / "passes.cc"), "-o", str(made)], check=True)
    return PassesLibrary(made)


@pytest.fixture(params=RUNS, ids=" ".join)
def precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Dtype:
    """Run a test in every precision: in the registers of this machine, and in those it may not have."""
    which, found = request.param
    if which == "plain":
        library: PassesLibrary = request.getfixturevalue("plain")
        for module in (backend, integer_library):
            monkeypatch.setattr(module, "library", lambda: library)
    return found


def stale(path: Path) -> Path:
    """Compile passes that say they were made of other sources."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = [flag for flag in FLAGS if flag != "-O2"]
    subprocess.run(
        [*compiler, *flags, '-DPASSES_SOURCES="other"', str(PASSES / "passes.cc"), "-o", str(path)], check=True
    )
    return path
