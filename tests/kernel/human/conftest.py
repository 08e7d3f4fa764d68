"""The gate at which a human decides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.durable import World
from tests.kernel.humans import TERMS


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    """A gate whose agent decides nothing alone, seen hours after it has handed its cases over."""
    made = World(folder, terms=TERMS)
    yield made
    made.close()
