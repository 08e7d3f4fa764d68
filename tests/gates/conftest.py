from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from sds.cli.decisions import run as cli
from sds.gates.refund.gate import ensure_world
from sds.gates.refund.rail.client import RailProcess
from tests.proposers import Greedy


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RailProcess]:
    with RailProcess(tmp_path_factory.mktemp("rail") / "rail.db") as started:
        yield started


@pytest.fixture
def rail(process: RailProcess) -> Iterator[RailProcess]:
    yield process
    process.misbehave()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the refund gate's folder; in `sds run` its model pays whatever the envelope permits."""
    monkeypatch.setenv("SDS_HOME", str(tmp_path))
    monkeypatch.setattr(cli, "opened_engine", lambda *_, **__: nullcontext(Greedy()))
    ensure_world(tmp_path / "refund", claims=40)
    return tmp_path / "refund"
