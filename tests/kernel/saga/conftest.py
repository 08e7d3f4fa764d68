"""The world of these tests: its contract has sagas, and its record is whole when a test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from tests.kernel.durable import World
from tests.kernel.sagas import terms


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    made = World(folder, terms=terms())
    yield made
    assert () == verify.verify(made.store).faults
    made.close()
