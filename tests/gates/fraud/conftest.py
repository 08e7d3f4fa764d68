"""One generated world for all tests of the fraud gate: it takes some seconds to make."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from sds.gates.fraud import gate
from sds.gates.fraud.gate import ensure_world
from sds.gates.fraud.rows import SEED, Row, rows


@lru_cache(1)
def _made_rows(part: str, *, seed: int) -> list[Row]:
    return list(rows(part, seed=seed))


@pytest.fixture(scope="package", autouse=True)
def rows_made_once() -> Iterator[None]:
    """Have the gate generate the rows of one seed once a process: it takes some seconds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gate, "rows", _made_rows)
        yield


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory, rows_made_once: None) -> Path:
    folder = tmp_path_factory.mktemp("bank") / "fraud"
    ensure_world(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the gate's folder, for a test to change."""
    return Path(shutil.copytree(made, tmp_path / "fraud"))


@pytest.fixture(scope="package")
def test_rows() -> list[Row]:
    return _made_rows("test", seed=SEED)
