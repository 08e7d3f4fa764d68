"""Fixtures of the durable kernel's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.kernel.durable import World
from tests.kernel.stores import KINDS, Chosen


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what is tested is the order of writes, not the disk."""
    memory = Path("/dev/shm")  # noqa: S108  the name inside it is random
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as name:
        yield Path(name)


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    made = World(folder)
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def either_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test over each store."""
    monkeypatch.setattr(Chosen, "kind", request.param)
    return str(request.param)
