"""OpenVINO is measured beside llama.cpp on the same BF16 weights; where it is the faster one, decisions run in it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sds.cli.setup import doctor
from sds.engines import factory
from sds.engines.factory import open_engine, open_weights, runtime_facts
from sds.engines.native import NativeEngine
from sds.host.clock import now_ms
from sds.host.paths import open_record
from sds.models.catalog import prepare
from sds.models.catalog.backends import BACKENDS
from sds.models.catalog.catalog import Prepared, prepared
from sds.models.files.fingerprint import gguf_fingerprint
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.openvino_.facts import OPENVINO
from sds.models.openvino_.names import INSTALL_HINT, QUANTIZED
from sds.models.protocol import Dtype
from sds.replay import Circumstance, Replay, _circumstances, opener, replay
from tests.models.catalog.preparing import (
    BF16_WINS,
    INT8_WINS,
    OPENVINO_WINS,
    changed,
    in_openvino,
    preparation,
    weights,
)
from tests.replays import GATE, record


@pytest.fixture
def installed(
    kept_for_openvino: tuple[Path, Path, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """A source, and where the program looks for what was prepared of it."""
    source, cache, _ = kept_for_openvino
    monkeypatch.setenv("SDS_CACHE", str(tmp_path / "cache"))
    return source, shutil.copytree(cache, tmp_path / "cache" / "models")


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure once, and what company does not at all."""
    monkeypatch.setattr(prepare, "ROUNDS", 1)
    monkeypatch.setattr(prepare, "variance_logp", lambda *_: None)


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sds.models.openvino_.backend", raising=False)
    monkeypatch.setitem(sys.modules, "openvino", None)


@in_openvino
def test_it_runs_the_very_file_that_llama_cpp_runs(kept_for_openvino: tuple[Path, Path, Prepared]) -> None:
    source, cache, found = kept_for_openvino
    sha12 = gguf_fingerprint(source)[:12]
    assert f"tiny-1.gguf as BF16 through OpenVINO, made from {sha12}" == found.name
    assert ("openvino", [cache / f"{sha12}-BF16.gguf"]) == (found.record.library, list(cache.glob("*.gguf")))
    assert found == prepared(source, cache)
    why = "BF16 through OpenVINO takes 500.0 ms for a decision's passes, own type 3000.0 (6.0x), and is "
    assert found.record.why.startswith(why)


@in_openvino
def test_it_is_measured_as_each_weight_type_is(kept_for_openvino: tuple[Path, Path, Prepared]) -> None:
    record = kept_for_openvino[2].record
    named = [("llamacpp", name) for name in ("own type", "BF16", "F16", "Q8_0")]
    measured = [(each.library, each.type) for each in record.measured]
    assert [*named, *[("openvino", "BF16")] * 4] == measured
    bf16, *through = record.measured[1], *record.measured[4:]
    assert [None, "fp32", "int8", "int8-bf16"] == [each.dtype for each in through]
    for each in through:
        assert (bf16.bytes, bf16.decisions) == (each.bytes, each.decisions)
        assert 0 < each.kl_mean < prepare.KL_MAX
    assert 5 == len({bf16.kl_mean, *(each.kl_mean for each in through)})


@in_openvino
def test_where_int8_is_the_fastest_decisions_run_in_it(
    kept_for_openvino: tuple[Path, Path, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another library, or another data type, is had by naming it; what was decided in one is replayed in it."""
    quick(monkeypatch)
    monkeypatch.setenv("SDS_CACHE", str(tmp_path / "cache"))
    source = kept_for_openvino[0]
    found, _ = preparation(tmp_path / "cache" / "models", INT8_WINS).run(source)
    why = "BF16 through OpenVINO in int8 takes 250.0 ms for a decision's passes, own type 3000.0 (12.0x), and is "
    assert found.record.why.startswith(why)
    engines = {
        how: open_engine(source, now_ms=lambda: 0, **dict(zip(("library", "dtype"), how, strict=False)))
        for how in [(), ("openvino",), ("openvino", "bf16"), ("llamacpp",)]
    }
    names = [engine.model.partition(",")[0] for engine in engines.values()]
    dtypes = [facts_of(engine).get("dtype") for engine in engines.values()]
    in_int8 = "tiny-1.gguf as BF16 through OpenVINO in int8"
    assert [in_int8, in_int8, "tiny-1.gguf as BF16 through OpenVINO", "tiny-1.gguf as BF16"] == names
    assert ["int8", "int8", "bf16", None] == dtypes
    (first,) = record(tmp_path, model=source, events=1)
    changed(tmp_path / "cache" / "models", without="dtype")  # as another preparation would have it
    _, second = record(tmp_path, model=source, events=2)
    again = [replayed(tmp_path, source, dfid) for dfid in (first, second)]
    assert [(True, ()), (True, ())] == [(one.identical, one.circumstances) for one in again]


@in_openvino
def test_what_is_further_from_the_exact_weights_than_was_asked_is_not_kept(
    kept_for_openvino: tuple[Path, Path, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where it was measured and kept before, when more was allowed."""
    quick(monkeypatch)
    source, _, before = kept_for_openvino
    far_from = {each.dtype: each.kl_mean for each in before.record.measured[4:]}
    assert far_from["fp32"] < far_from[None] < min(far_from["int8"], far_from["int8-bf16"])
    between = (far_from[None] + min(far_from["int8"], far_from["int8-bf16"])) / 2
    far = {"own", *(each.type for each in before.record.measured[1:4] if each.kl_mean <= between)}
    for durations, kl_max, dtype, anew in [
        (INT8_WINS, prepare.KL_MAX, "int8", True),
        ({name: INT8_WINS[name] for name in INT8_WINS if name in {*far, "openvino", "fp32"}}, between, None, True),
        (INT8_WINS, prepare.KL_MAX, None, False),
    ]:
        found, now = preparation(tmp_path, durations, kl_max=kl_max).run(source)
        assert ("openvino", dtype, anew) == (found.record.library, found.record.dtype, now)


@in_openvino
def test_on_a_processor_without_bf16_what_needs_none_is_measured(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sds.models.openvino_ import names

    quick(monkeypatch)
    monkeypatch.setattr(names, "computes_in_bf16", lambda: False)
    lines: list[str] = []
    found, _ = preparation(tmp_path, {**BF16_WINS, "fp32": 0.5, "int8": 0.25}, log=lines.append).run(tiny_path(1))
    assert ("openvino", "int8", 6) == (found.record.library, found.record.dtype, len(found.record.measured))
    assert "BF16 through OpenVINO is not measured: this processor does not compute in bf16 (choose fp32)" in lines


@in_openvino
def test_weights_that_are_bf16_already_are_run_from_their_own_file(
    kept_for_openvino: tuple[Path, Path, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    source = shutil.copy(weights(kept_for_openvino[1]), tmp_path / "mine.gguf")
    durations = {name: took for name, took in OPENVINO_WINS.items() if name != "BF16"}
    found, _ = preparation(tmp_path / "cache", durations).run(source)
    assert (source, "mine.gguf through OpenVINO", None) == (found.path, found.name, found.record.file)
    assert found.record.why.startswith("BF16 through OpenVINO takes 500.0 ms for a decision's passes, BF16 3000.0 ")


@pytest.mark.usefixtures("uninstalled")
def test_where_it_is_not_installed_it_is_not_tried(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    monkeypatch.setitem(BACKENDS, OPENVINO.name, replace(OPENVINO, version=lambda: None))
    lines: list[str] = []
    found, _ = preparation(tmp_path, OPENVINO_WINS, log=lines.append).run(tiny_path(1))
    assert ("BF16", "llamacpp", 4) == (found.record.type, found.record.library, len(found.record.measured))
    assert [] == [line for line in lines if "OpenVINO" in line]


@in_openvino
@pytest.mark.usefixtures("installed")
def test_doctor_says_what_a_model_was_prepared_for_that_is_gone_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "which is not installed" not in doctor._versions()
    monkeypatch.setitem(BACKENDS, OPENVINO.name, replace(OPENVINO, version=lambda: None))
    assert doctor._versions().endswith(f", a model was prepared for OpenVINO, which is not installed ({INSTALL_HINT})")


def facts_of(engine: NativeEngine) -> dict[str, Any]:
    with closing(engine):
        return engine._facts


@in_openvino
def test_what_company_does_comes_along_only_for_the_library_it_was_measured_in(installed: tuple[Path, Path]) -> None:
    source, cache = installed
    changed(cache, shape_noise_logp_max=0.125)
    found = [
        open_weights(source, lambda path, *_: LlamaBackend(path, threads=1), cache=cache, library=library)
        for library in (None, "llamacpp")
    ]
    for one in found:
        one.backend.close()
    told = [(one.library, one.noise_logp_max, one.noise_slots) for one in found]
    assert [("openvino", None, 0), ("llamacpp", 0.125, 16)] == told


@in_openvino
def test_several_slots_are_those_of_the_library_it_was_prepared_for(installed: tuple[Path, Path]) -> None:
    """In llama.cpp what was measured there comes along; in OpenVINO company leaves no trace."""
    source, cache = installed
    changed(cache, shape_noise_logp_max=0.125)
    facts = facts_of(open_engine(source, now_ms=lambda: 0, slots=2))
    assert facts["library"].startswith("openvino 20")
    assert (2, 0.0) == (facts["slots"], facts["noise_logp_max"])
    named = facts_of(open_engine(source, now_ms=lambda: 0, slots=2, library="llamacpp"))
    assert named["library"].startswith("llama-cpp-python ")
    assert 0.125 == named["noise_logp_max"]


@in_openvino
@pytest.mark.usefixtures("uninstalled")
def test_where_it_cannot_be_opened_any_more_the_file_itself_runs_in_llama_cpp(installed: tuple[Path, Path]) -> None:
    source, _ = installed
    engine = open_engine(source, now_ms=lambda: 0)
    assert facts_of(engine)["library"].startswith("llama-cpp-python ")
    assert f"tiny-1.gguf@{gguf_fingerprint(source)[:12]}" == engine.model
    assert (f"OpenVINO is not installed: the model runs without prepared weights ({INSTALL_HINT})",) == (engine.notices)


def replayed(home: Path, source: Path, dfid: str) -> Replay:
    with closing(open_record(home / GATE)) as store:
        return replay(store, dfid, open_it=opener(source, now_ms=now_ms), now_ms=now_ms)


@in_openvino
def test_a_decision_is_replayed_in_the_library_that_decided_it(
    installed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = installed
    (first,) = record(tmp_path, model=source, events=1)
    changed(cache, library="llamacpp")
    _, second = record(tmp_path, model=source, events=2)
    found = [replayed(tmp_path, source, dfid) for dfid in (first, second)]
    assert [(True, ()), (True, ())] == [(one.identical, one.circumstances) for one in found]
    monkeypatch.setattr(factory, "version", lambda _: "2027.1")
    (library, *_) = replayed(tmp_path, source, first).circumstances
    assert ("library", "openvino 2027.1") == (library.name, library.replayed)
    assert str(library.recorded).startswith("openvino 2026.")


@in_openvino
def test_a_record_says_what_is_in_int8_and_in_what_the_rest_is() -> None:
    """Before it did, the same names meant something else: a replay names that."""
    kinds: tuple[Dtype, ...] = ("int8", "int8-bf16", "bf16")
    before, *facts = {"dtype": "int8"}, *(runtime_facts("openvino", dtype=dtype) for dtype in kinds)
    assert ["fp32", "bf16", None] == [each.get("rest") for each in facts]
    assert [True, True, False] == ["in_8_bits" in each for each in facts]
    found = _circumstances(before, {name: facts[0][name] for name in ("dtype", "in_8_bits", "rest")})
    assert (Circumstance("in_8_bits", None, QUANTIZED), Circumstance("rest", None, "fp32")) == found
