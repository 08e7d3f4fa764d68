"""One generated world for all tests of the fraud gate: it takes some seconds to make."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sds.gates.fraud.gate import ensure_world
from sds.gates.fraud.rows import SEED, Row
from tests.conftest import made_rows


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bank") / "fraud"
    ensure_world(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the gate's folder, for a test to change."""
    return Path(shutil.copytree(made, tmp_path / "fraud"))


@pytest.fixture(scope="package")
def test_rows() -> list[Row]:
    return made_rows("test", seed=SEED)
