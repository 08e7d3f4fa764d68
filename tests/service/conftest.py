"""A home of its own for every test of the service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.service.testbed import Bed, opened_bed
from tests.stores.opened import POSTGRESQL, Chosen
from tests.stores.server import own_database


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder; with SDS_TEST_STORE=postgresql also a database, in which everything is kept."""
    monkeypatch.setenv("SDS_HOME", str(tmp_path))
    monkeypatch.delenv("SDS_STORE", raising=False)
    with ExitStack() as opened:
        if Chosen.kind == POSTGRESQL:
            if alone := request.node.get_closest_marker("sqlite_alone"):
                pytest.skip(f"SQLite's alone: {alone.args[0]}")
            monkeypatch.setenv("SDS_STORE", opened.enter_context(own_database()))
        yield tmp_path


@pytest.fixture
def bed(home: Path) -> Iterator[Bed]:
    with opened_bed(home) as made:
        yield made
