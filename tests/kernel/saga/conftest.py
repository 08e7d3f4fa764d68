"""The world of these tests: its contract has sagas, and its record is whole when a test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.durable import World, whole
from tests.kernel.sagas import terms


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder, terms=terms())) as made:
        yield made
