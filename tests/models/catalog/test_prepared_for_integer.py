"""Integer passes are measured beside the others on the same BF16 weights; where they are the fastest, decisions run in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from sds.engines.factory import open_engine
from sds.host.clock import now_ms
from sds.host.paths import open_record
from sds.models.catalog import prepare
from sds.models.catalog.backends import BACKENDS
from sds.models.catalog.catalog import prepared
from sds.models.int8 import sources
from sds.models.int8.facts import INT8
from sds.models.int8.library import library
from sds.models.protocol import BackendError
from sds.replay import opener, replay
from tests.models.catalog.preparing import BF16_WINS, preparation
from tests.replays import GATE, record

INTEGER_WINS = {"own": 3.0, "BF16": 1.0, "bytes": 0.7, "int16": 0.5}


def outruns(monkeypatch: pytest.MonkeyPatch, *, here: bool) -> None:
    monkeypatch.setitem(BACKENDS, INT8.name, replace(INT8, outruns=lambda: here))


@pytest.fixture
def installed(tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A source, and where the program looks for what was prepared of it."""
    outruns(monkeypatch, here=True)
    monkeypatch.setattr(prepare, "ROUNDS", 1)
    monkeypatch.setattr(prepare, "variance_logp", lambda *_: None)
    monkeypatch.setenv("SDS_CACHE", str(tmp_path / "cache"))
    source, cache = tiny_path(1), tmp_path / "cache" / "models"
    # eight bits are coarse in a model as small as this
    preparation(cache, INTEGER_WINS, kl_max=1.0).run(source)
    return source, cache


def test_decisions_run_in_them_and_are_replayed_bit_for_bit(installed: tuple[Path, Path], tmp_path: Path) -> None:
    source, cache = installed
    found = prepared(source, cache)
    assert found is not None
    assert ("integer", "int16") == (found.record.library, found.record.dtype)
    measured = [(each.type, each.library) for each in found.record.measured]
    assert [("own type", "llamacpp"), ("BF16", "llamacpp"), *[("BF16", "integer")] * 2] == measured
    assert found.record.why.startswith("BF16 through integer passes in int16 takes 500.0 ms for a decision's passes")
    engine = open_engine(source, now_ms=lambda: 0)
    assert engine.model.startswith("tiny-1.gguf as BF16 through integer passes in int16, made from ")
    engine.close()
    for dfid in record(tmp_path, model=source, events=2):
        with closing(open_record(tmp_path / GATE)) as store:
            again = replay(store, dfid, open_it=opener(source, now_ms=now_ms), now_ms=now_ms)
        assert (True, ()) == (again.identical, again.circumstances)


def test_on_a_processor_where_they_may_be_slower_every_type_is_measured(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outruns(monkeypatch, here=False)
    monkeypatch.setattr(prepare, "ROUNDS", 1)
    monkeypatch.setattr(prepare, "variance_logp", lambda *_: None)
    found, _ = preparation(tmp_path, {**BF16_WINS, "bytes": 1.7, "int16": 1.5}, kl_max=1.0).run(tiny_path(1))
    assert ["own type", "BF16", "F16", "Q8_0", "BF16", "BF16"] == [each.type for each in found.record.measured]
    assert ("BF16", "llamacpp") == (found.record.type, found.record.library)


def test_those_that_were_compiled_of_other_sources_are_measured_anew(
    installed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "passes_sources", lambda: "0" * 12)
    with pytest.raises(BackendError, match="measured on another machine or with other libraries"):
        prepared(*installed)


def test_where_they_were_not_compiled_the_next_fastest_is_kept_and_it_is_said(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "ROUNDS", 1)
    monkeypatch.setattr("sds.models.int8.library.PASSES", tmp_path)
    library.cache_clear()
    lines: list[str] = []
    durations = {**BF16_WINS, "int16": 0.5}
    try:
        found, _ = preparation(tmp_path / "cache", durations, log=lines.append).run(tiny_path(1))
    finally:
        library.cache_clear()
    assert ("llamacpp", "BF16") == (found.record.library, found.record.type)
    (said,) = (line for line in lines if "not measured" in line)
    assert said.startswith("BF16 through integer passes in int8 is not measured: the integer passes are not compiled (")
