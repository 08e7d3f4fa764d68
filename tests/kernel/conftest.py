"""Fixtures of the durable kernel's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.kernel.durable import World
from tests.stores.both import runs_over_both
from tests.stores.opened import KINDS, SQLITE, Chosen
from tests.stores.schemas import give_back


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what is tested is the order of writes, not the disk."""
    memory = Path("/dev/shm")  # noqa: S108  the name inside it is random
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as name:
        yield Path(name)
        give_back(Path(name))


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    made = World(folder)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def store_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open the store that the test is run over."""
    if hasattr(request, "param"):
        monkeypatch.setattr(Chosen, "kind", request.param)
    alone = request.node.get_closest_marker("sqlite_alone")
    if alone and Chosen.kind != SQLITE:
        pytest.skip(f"SQLite's alone: {alone.args[0]}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "SDS_TEST_STORE" in os.environ or metafunc.definition.get_closest_marker("sqlite_alone"):
        return  # all over that one
    if runs_over_both(metafunc.module.__name__, metafunc.function.__name__, metafunc.fixturenames):
        metafunc.parametrize("store_kind", KINDS, indirect=True)
