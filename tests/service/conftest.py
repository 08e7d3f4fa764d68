"""A home of its own for every test of the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.testbed import Bed, opened_bed


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SDS_HOME", str(tmp_path))
    monkeypatch.delenv("SDS_STORE", raising=False)
    return tmp_path


@pytest.fixture
def bed(home: Path) -> Iterator[Bed]:
    with opened_bed(home) as made:
        yield made
