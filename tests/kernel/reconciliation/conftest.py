"""The world of these tests: some tickets, sagas, and a record that is whole when a test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.durable import World, whole
from tests.kernel.sagas import terms


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder, terms=terms())) as made:
        for number in range(2, 9):
            made.tickets.put(f"T{number}", mood="angry")
        yield made
