from __future__ import annotations

from collections.abc import Iterator

import pytest

from sds.gates.refund.rail.client import RailProcess


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RailProcess]:
    with RailProcess(tmp_path_factory.mktemp("rail") / "rail.db") as started:
        yield started


@pytest.fixture
def rail(process: RailProcess) -> Iterator[RailProcess]:
    yield process
    process.misbehave()
