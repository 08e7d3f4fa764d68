"""Engines side by side over the same weights: each decides as it does alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sds.decoding.decoder import Mode
from sds.engines import native
from sds.engines.factory import open_engine, open_parallel, open_replicas
from sds.engines.native import SLOTS_EXACT_MAX, NativeEngine
from sds.engines.queueing import QueueTimeoutError
from sds.engines.replicas import Replicas
from sds.kernel.errors import ModelError, UsageError
from sds.models.int8 import library as integer_library
from sds.models.llamacpp import weights
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import BackendError, Dtype
from sds.rationale import writer_of
from tests.embedding.elsewhere import held_elsewhere
from tests.engines.conftest import running_ms
from tests.engines.test_native import packets
from tests.kernel.durable import World
from tests.scale import scale

TOKENS = 1024
REPLICAS = 3


@pytest.fixture
def engine(tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicas]:
    monkeypatch.setenv("SDS_THREADS", str(REPLICAS))
    with closing(open_replicas(tiny_path(1), replicas=REPLICAS, now_ms=running_ms, mode="exact")) as opened:
        yield opened


def test_many_threads_get_bit_for_bit_what_one_engine_decides_alone(
    world: World, engine: Replicas, tiny_path: Callable[[int], Path]
) -> None:
    asked = packets(world, scale(16, 300))
    with closing(open_engine(tiny_path(1), now_ms=running_ms, mode="exact", threads=1)) as one:
        expected = [one.propose(packet, tokens_max=TOKENS) for packet in asked]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda packet: engine.propose(packet, tokens_max=TOKENS), asked))
    for (data, before), (again, after) in zip(expected, found, strict=True):
        assert (data, before.alternatives, before.facts) == (again, after.alternatives, after.facts)
    assert {(1, 1)} == {(decoding.facts["slots"], decoding.facts["threads"]) for _, decoding in found}


@pytest.mark.parametrize(("library", "slots"), [("integer", 3), ("openvino", 1), ("openvino", 3), ("llamacpp", 3)])
def test_replicas_of_some_slots_each_decide_as_one_does_alone(
    library: str, slots: int, world: World, tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "openvino":
        pytest.importorskip("openvino", reason="OpenVINO is not installed: make openvino")
    if library == "integer":
        try:
            integer_library.library()
        except BackendError as error:
            pytest.skip(str(error))
    monkeypatch.setenv("SDS_THREADS", "2")
    how: dict[str, Any] = {"now_ms": running_ms, "library": library, "as_is": True}
    path, asked = tiny_path(1), packets(world, scale(12, 240))
    with closing(open_engine(path, threads=1, slots=slots, **how)) as one:
        expected = [one.propose(packet, tokens_max=TOKENS) for packet in asked]
    with closing(open_replicas(path, replicas=2, slots=slots, **how)) as engine, ThreadPoolExecutor(9) as pool:
        assert [slots, slots] == [each.slots for each in engine._engines]
        found = list(pool.map(lambda packet: engine.propose(packet, tokens_max=TOKENS), asked))
    for (data, before), (again, after) in zip(expected, found, strict=True):
        assert (data, before.alternatives) == (again, after.alternatives)
    assert {(slots, 1)} == {(decoding.facts["slots"], decoding.facts["threads"]) for _, decoding in found}
    assert slots == 1 or 1 < max(rows for _, decoding in found for _, rows in decoding.facts["rows"])


def test_counting_tokens_waits_for_a_busy_tokenizer_only_so_long(
    tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "COUNT_MS_MAX", 20)
    with closing(open_engine(tiny_path(1), now_ms=running_ms)) as alone:
        with (
            held_elsewhere(alone._scheduler.tokenizer(running_ms() + 1000)),
            pytest.raises(QueueTimeoutError, match="the model's tokenizer was not free in time"),
        ):
            alone.count_tokens("x")
        assert 1 == alone.count_tokens("x")


def test_the_weights_are_in_memory_once(
    tiny_path: Callable[[int], Path], engine: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, really = list[Any](), weights.load_gguf
    monkeypatch.setattr(weights, "load_gguf", lambda *path, **how: loaded.append(path) or really(*path, **how))
    with closing(open_replicas(tiny_path(1), replicas=4, now_ms=running_ms)) as opened:
        assert 1 == len(loaded)
        assert engine.model == opened.model


def test_whoever_lets_go_last_frees_the_weights(tiny_path: Callable[[int], Path]) -> None:
    first = LlamaBackend(tiny_path(1), threads=1)
    expected = first.forward_one([5, 6, 7]).tolist()
    second = first.replica(threads=1)
    first.close()
    with pytest.raises(BackendError, match="the model is closed"):
        first.replica(threads=1)
    assert expected == second.forward_one([5, 6, 7]).tolist()
    assert (first.name, first.fingerprint) == (second.name, second.fingerprint)
    third = second.replica(threads=1)
    second.close()
    third.close()
    with pytest.raises(BackendError, match="the model is closed"):
        third.forward_one([5])


def test_a_packet_that_expires_while_all_are_busy_is_not_decided(world: World, engine: Replicas) -> None:
    (packet,) = packets(world, 1)
    started, go_on = threading.Barrier(REPLICAS + 1), threading.Event()

    def is_cached(_: int) -> None:
        with engine._one(10.0):
            started.wait(10.0)
            assert go_on.wait(10.0)

    with ThreadPoolExecutor(REPLICAS) as pool:
        busy = pool.map(is_cached, range(REPLICAS))
        started.wait(10.0)
        with pytest.raises(ModelError, match="no engine was free in time") as caught:
            engine.propose(replace(packet, expires_at_ms=running_ms() + 50), tokens_max=TOKENS)
        go_on.set()
        list(busy)
    assert "DEADLINE_EXCEEDED" == caught.value.reason_code
    assert packet.envelope.contains(engine.propose(packet, tokens_max=TOKENS)[0])


def test_an_engine_that_raised_is_free_again(world: World, engine: Replicas) -> None:
    (packet,) = packets(world, 1)
    for _ in range(2 * REPLICAS):
        with pytest.raises(ModelError):
            engine.propose(packet, tokens_max=1)
    assert packet.envelope.contains(engine.propose(packet, tokens_max=TOKENS)[0])


def test_it_counts_tokens_and_says_why(world: World, engine: Replicas) -> None:
    (packet,) = packets(world, 1)
    assert 2 == engine.count_tokens("x y")
    data, _ = engine.propose(packet, tokens_max=TOKENS)
    assert len(writer_of(engine).explain(packet, data, chars_max=20, deadline_ms=running_ms() + 10_000)) <= 20


def test_one_that_does_not_open_closes_those_before_it(
    tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[NativeEngine]()
    really, replica = NativeEngine.close, NativeEngine.replica
    monkeypatch.setattr(NativeEngine, "close", lambda engine: closed.append(engine) or really(engine))

    def fails_later(engine: NativeEngine, *, threads: int) -> NativeEngine:
        if made:
            raise ModelError("no memory")
        made.append(replica(engine, threads=threads))
        return made[0]

    made = list[NativeEngine]()
    monkeypatch.setattr(NativeEngine, "replica", fails_later)
    with pytest.raises(ModelError, match="no memory"):
        open_replicas(tiny_path(1), replicas=3, now_ms=running_ms)
    assert 2 == len(closed)


@pytest.mark.parametrize("count", [0, 65])
def test_there_are_as_many_as_can_be(tiny_path: Callable[[int], Path], count: int) -> None:
    with pytest.raises(UsageError, match=f"the number of replicas must be 1 to 64, got {count}"):
        open_replicas(tiny_path(1), replicas=count, now_ms=running_ms)
    with pytest.raises(UsageError, match=f"the number of decisions at once must be 1 to 64, got {count}"):
        open_parallel(tiny_path(1), parallel=count, now_ms=running_ms)


def test_transformers_has_none(tiny_folder: Callable[[int], Path]) -> None:
    with pytest.raises(UsageError, match="replicas run only on the processor"):
        open_replicas(tiny_folder(1), replicas=2, now_ms=running_ms)


@pytest.mark.parametrize(("slots", "mode"), [(2, "greedy"), (7, "greedy"), (5, "exact")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_company_in_openvino_leaves_no_trace_in_a_decision(
    slots: int, mode: Mode, dtype: Dtype, world: World, tiny_path: Callable[[int], Path]
) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed: make openvino")
    from sds.models.openvino_.names import computes_in_bf16

    if dtype == "bf16" and not computes_in_bf16():
        pytest.skip("no BF16 in this processor")
    asked = packets(world, scale(12, 300))
    how: dict[str, Any] = {"now_ms": running_ms, "library": "openvino", "dtype": dtype, "mode": mode}
    with closing(open_engine(tiny_path(1), slots=slots, **how)) as engine:
        expected = [engine.propose(packet, tokens_max=TOKENS) for packet in asked]
        with ThreadPoolExecutor(slots + 2) as pool:
            found = list(pool.map(lambda packet: engine.propose(packet, tokens_max=TOKENS), asked))
    for (data, before), (again, after) in zip(expected, found, strict=True):
        assert (data, before.alternatives, before.passes) == (again, after.alternatives, after.passes)
        assert 0.0 == after.facts["noise_logp_max"]
    assert max(rows for _, decoding in found for _, rows in decoding.facts["rows"]) > max(
        rows for _, decoding in expected for _, rows in decoding.facts["rows"]
    )


@pytest.mark.parametrize(("parallel", "engines"), [(16, 4), (3, 3), (1, 1)])
def test_llama_cpp_decides_several_at_once_in_engines_side_by_side(
    parallel: int, engines: int, tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDS_THREADS", "4")
    with closing(open_parallel(tiny_path(1), parallel=parallel, now_ms=running_ms)) as opened:
        side_by_side = opened._engines if isinstance(opened, Replicas) else [opened]
        assert [1] * engines == [engine.slots for engine in side_by_side]
        assert {4 // engines} == {engine._facts["threads"] for engine in side_by_side}


def test_on_a_card_llama_cpp_decides_several_at_once_in_shared_passes(
    tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the weights are read once for all; and what was prepared for the processor is not looked for."""
    monkeypatch.setattr("sds.models.llamacpp.weights.gpus", lambda: ("An Own Card",))
    monkeypatch.setattr("sds.engines.factory.open_weights", pytest.fail)
    with closing(open_parallel(tiny_path(1), parallel=3, now_ms=running_ms, device="cuda")) as opened:
        assert isinstance(opened, NativeEngine)
        assert (3, "cuda", "An Own Card") == (opened.slots, opened._facts["device"], opened._facts["card"])
    with pytest.raises(UsageError, match="replicas run on the processor only"):
        open_replicas(tiny_path(1), replicas=2, now_ms=running_ms, device="cuda")


def test_openvino_and_transformers_decide_several_at_once_in_shared_passes(
    tiny_path: Callable[[int], Path], tiny_folder: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed: make openvino")
    monkeypatch.setenv("SDS_THREADS", "1")
    for path, library in ((tiny_path(1), "openvino"), (tiny_folder(1), None)):
        with closing(open_parallel(path, parallel=3, now_ms=running_ms, library=library)) as opened:
            assert isinstance(opened, NativeEngine)
            assert 3 == opened.slots
    with closing(
        open_parallel(tiny_path(1), parallel=64, now_ms=running_ms, library="openvino", mode="exact")
    ) as opened:
        assert SLOTS_EXACT_MAX == opened.slots


def test_a_file_that_changes_while_it_is_opened_is_refused(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, really = tmp_path / "mine.gguf", weights.load_gguf
    path.write_bytes(tiny_path(1).read_bytes())

    def replaced(file: Path, **how: Any) -> Any:
        loaded = really(file, **how)
        path.write_bytes(tiny_path(1).read_bytes() + b"\0")
        return loaded

    monkeypatch.setattr(weights, "load_gguf", replaced)
    with pytest.raises(BackendError, match="was changed while it was opened"):
        LlamaBackend(path, threads=1)
