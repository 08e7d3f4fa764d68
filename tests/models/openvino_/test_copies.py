"""The copies of OpenVINO's graph: each for a line alone of its length, all share their weights, none shows in a number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import openvino as ov
import pytest

from sds.engines.config import EngineSpec, open_engine_of
from sds.engines.factory import open_engine, open_replicas
from sds.models.files.llama_weights import LlamaWeights
from sds.models.openvino_ import backend as vino
from sds.models.openvino_.backend import LENGTHS, OpenvinoBackend
from sds.models.openvino_.batch import SURPLUS_TOKENS_MAX, Batch
from sds.models.openvino_.graph import graph
from sds.models.protocol import Dtype, Row
from tests.models.openvino_.test_backend import DTYPES
from tests.scale import scale

PROMPT = [7] * 24
TOKENS = range(1, max(LENGTHS) + 20)  # shorter than the shortest, one for each, longer than the longest
FOR_ALL = len(LENGTHS)
SLOTS = 6


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Return which copy runs each call from now on."""
    copies, real = list[int | None](), vino._Request.copy_for

    def noted(self: Any, call: Batch) -> int | None:
        copies.append(real(self, call))
        return copies[-1]

    monkeypatch.setattr(vino._Request, "copy_for", noted)
    return copies


@pytest.fixture
def opened(tiny_path: Callable[[int], Path]) -> Iterator[Callable[..., OpenvinoBackend]]:
    backends: list[OpenvinoBackend] = []

    def open_one(dtype: Dtype, **options: Any) -> OpenvinoBackend:
        backends.append(OpenvinoBackend(tiny_path(1), dtype=dtype, **options))
        return backends[-1]

    yield open_one
    for backend in backends:
        backend.close()


@pytest.fixture(scope="module")
def shared(tiny_path: Callable[[int], Path]) -> Iterator[Callable[[Dtype], OpenvinoBackend]]:
    """Return the engine of a type with all copies and `SLOTS` slots: making one takes longer than what is asked of it."""
    backends: dict[Dtype, OpenvinoBackend] = {}

    def of(dtype: Dtype) -> OpenvinoBackend:
        if dtype not in backends:
            backends[dtype] = OpenvinoBackend(tiny_path(1), dtype=dtype, slots=SLOTS)
        return backends[dtype]

    yield of
    for backend in backends.values():
        backend.close()


def answered(backend: OpenvinoBackend, tokens: int) -> np.ndarray:
    backend.prefill([PROMPT])
    return backend.forward_one([9] * tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_gives_the_bits_of_that_for_all(
    dtype: Dtype, shared: Callable[[Dtype], OpenvinoBackend], chosen: list[int | None], monkeypatch: pytest.MonkeyPatch
):
    backend, random = shared(dtype), Random(1)
    lengths = random.choices(TOKENS, k=scale(150, full=1_000))
    chosen.clear()
    found = [answered(backend, tokens) for tokens in lengths]
    assert set(chosen) == {*range(FOR_ALL), FOR_ALL}
    monkeypatch.setattr(vino._Request, "copy_for", lambda *_: FOR_ALL)
    for tokens, logits in zip(lengths, found, strict=True):
        assert np.array_equal(logits, answered(backend, tokens))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_line_alone_is_read_by_the_copy_of_its_length(
    dtype: Dtype, shared: Callable[[Dtype], OpenvinoBackend], chosen: list[int | None]
):
    backend = shared(dtype)
    for tokens in TOKENS:
        backend.prefill([PROMPT])
        chosen.clear()
        backend.forward_one([9] * tokens)
        fitting = [n for n, length in enumerate(LENGTHS) if tokens <= length <= tokens + SURPLUS_TOKENS_MAX]
        assert chosen == (fitting or [FOR_ALL])[:1]
    for slot in range(2):
        backend.prefill([PROMPT], slot=slot)
    chosen.clear()
    backend.run([Row(slot, [9] * LENGTHS[0]) for slot in range(2)])
    assert chosen == [FOR_ALL]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(), (64,)])
def test_with_fewer_copies_it_gives_the_same_bits(
    lengths: tuple[int, ...],
    dtype: Dtype,
    opened: Callable[..., OpenvinoBackend],
    shared: Callable[[Dtype], OpenvinoBackend],
    chosen: list[int | None],
):
    few, many = opened(dtype, lengths=lengths), shared(dtype)
    for tokens in (1, 59, 64, 84, 130):
        chosen.clear()
        found = answered(few, tokens)
        expected = None if not lengths else 0 if tokens in (59, 64) else 1
        assert [expected] == chosen[-1:]
        assert np.array_equal(found, answered(many, tokens))


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_company_a_line_gets_the_bits_it_gets_from_a_copy_alone(
    dtype: Dtype,
    opened: Callable[..., OpenvinoBackend],
    shared: Callable[[Dtype], OpenvinoBackend],
    chosen: list[int | None],
):
    """Behind pasts of very different lengths, on both sides of where sums over FP32 are cut."""
    together, alone, random = shared(dtype), opened(dtype), Random(2)
    for turn in range(scale(12, full=200)):
        pasts, longest = ((5, 40, 600, 900), 112) if turn % 2 else ((200, 395, 400, 401, 441, 480, 600, 601), 40)
        own = [[random.randrange(3, 90) for _ in range(random.choice(pasts))] for _ in range(SLOTS)]
        rows = [
            Row(slot, [random.randrange(3, 90) for _ in range(random.randint(1, longest))]) for slot in range(SLOTS)
        ]
        for slot, section in enumerate(own):
            together.prefill([section], slot=slot)
        found = together.run(rows)
        for row, logits in zip(rows, found, strict=True):
            alone.prefill([own[row.slot]])
            assert np.array_equal(logits, alone.run([Row(0, row.tokens)])[0])
    assert len(set(chosen)) > 4


@pytest.mark.parametrize("in_int8", [False, True])
def test_copies_share_the_memory_of_their_weights(in_int8: bool, tiny_path: Callable[[int], Path]):
    weights = LlamaWeights(tiny_path(1), "OpenVINO")
    model = graph(weights, kv_type=ov.Type.bf16, context=64, in_int8=in_int8, lengths=(16, 32, 48))
    places = [sorted(matrices(op.get_function(0))) for op in model.get_ops() if op.get_type_name() == "If"]
    assert len(places) == 4
    assert len(places[0]) > 4 * weights.shape.layers
    assert all(each == places[0] for each in places)


@pytest.mark.parametrize("copied", [True, False])
def test_engines_side_by_side_have_copies_where_they_are_few(
    copied: bool, tiny_path: Callable[[int], Path], chosen: list[int | None]
):
    engines = vino.COPIED_ENGINES_MAX + (not copied)
    with (
        closing(OpenvinoBackend(tiny_path(1), dtype="fp32", threads=1, engines=engines)) as first,
        closing(first.replica(threads=1)) as second,
    ):
        chosen.clear()
        assert np.array_equal(answered(first, LENGTHS[0]), answered(second, LENGTHS[0]))
    assert set(chosen) == ({0, FOR_ALL} if copied else {None})


def matrices(body: ov.Model) -> set[int]:
    constants = (op for op in body.get_ops() if op.get_type_name() == "Constant" and len(op.shape) == 2)
    return {op.get_data().ctypes.data for op in constants}


@pytest.mark.parametrize(("skip_warmup", "lengths"), [(False, LENGTHS), (True, ())])
def test_an_engine_for_a_few_decisions_has_no_copies(
    skip_warmup: bool, lengths: tuple[int, ...], tiny_path: Callable[[int], Path]
):
    how: dict[str, Any] = {"library": "openvino", "dtype": "fp32"}
    spec = EngineSpec(name="own", kind="native", model=str(tiny_path(1)), **how)
    alone = open_engine(tiny_path(1), now_ms=lambda: 0, skip_warmup=skip_warmup, **how)
    for engine in (alone, open_engine_of(spec, now_ms=lambda: 0, skip_warmup=skip_warmup)):
        with closing(engine):
            assert lengths == engine._backend._graph.lengths


@pytest.mark.parametrize(("replicas", "lengths"), [(1, LENGTHS), (2, LENGTHS), (3, ())])
def test_the_library_runs_as_many_side_by_side_as_there_are_replicas(
    replicas: int, lengths: tuple[int, ...], tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SDS_THREADS", "3")
    how: dict[str, Any] = {"library": "openvino", "dtype": "fp32", "replicas": replicas}
    with closing(open_replicas(tiny_path(1), now_ms=lambda: 0, **how)) as opened:
        for engine in opened._engines:
            assert lengths == engine._backend._graph.lengths
            streams = engine._backend._graph.compiled().get_property("NUM_STREAMS")
            assert (min(replicas, os.cpu_count() or 1), 3 // replicas) == (streams, engine._facts["threads"])
