"""The copies of OpenVINO's graph: each stays prepared for one shape, all share their weights, and none shows in a number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import openvino as ov
import pytest

from sds.models import openvino as vino
from sds.models.openvino import COPIES, OpenvinoBackend
from sds.models.openvino_graph import Weights, graph
from sds.models.protocol import Dtype
from tests.models.test_openvino import DTYPES
from tests.scale import scale

PROMPT = [7] * 24
LENGTHS = tuple(range(8, 8 * (COPIES + 4), 8))  # more shapes than copies


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Return which copy runs each call from now on."""
    copies, real = list[int | None](), vino._Request.copy_for

    def noted(self: Any, shape: tuple[int, int]) -> int | None:
        copies.append(real(self, shape))
        return copies[-1]

    monkeypatch.setattr(vino._Request, "copy_for", noted)
    return copies


@pytest.fixture
def opened(tiny_path: Callable[[int], Path]) -> Iterator[Callable[[Dtype], OpenvinoBackend]]:
    backends: list[OpenvinoBackend] = []

    def open_one(dtype: Dtype) -> OpenvinoBackend:
        backends.append(OpenvinoBackend(tiny_path(1), dtype=dtype))
        return backends[-1]

    yield open_one
    for backend in backends:
        backend.close()


def answered(backend: OpenvinoBackend, tokens: int) -> np.ndarray:
    backend.begin([PROMPT])
    return backend.step([9] * tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_copy_gives_the_same_bits(
    dtype: Dtype, opened: Callable[[Dtype], OpenvinoBackend], chosen: list[int | None]
):
    backend, random = opened(dtype), Random(1)
    expected = {tokens: answered(backend, tokens) for tokens in LENGTHS}
    used: dict[int, set[int | None]] = {tokens: set() for tokens in LENGTHS}
    for _ in range(scale(400, full=4_000)):
        tokens = random.choice(LENGTHS)
        assert np.array_equal(expected[tokens], answered(backend, tokens))
        used[tokens].add(chosen[-1])
    assert all(copies == set(range(COPIES)) for copies in used.values())


def test_a_shape_stays_with_its_copy_until_as_many_others_came(
    opened: Callable[[Dtype], OpenvinoBackend], chosen: list[int | None]
):
    backend = opened("fp32")
    backend.begin([PROMPT])
    chosen.clear()
    of_one, *others = LENGTHS[: COPIES + 1]
    for tokens in (of_one, of_one, *others[:-1], of_one, others[-1], of_one, *others, of_one):
        answered(backend, tokens)
    first, again, *_ = chosen
    assert first == again == chosen[COPIES + 1] == chosen[COPIES + 3]
    assert len(set(chosen[1 : COPIES + 1])) == COPIES
    assert chosen[COPIES + 4 :].count(first) == 1  # it is one of the others' by then
    assert set(chosen[-COPIES:]) == set(range(COPIES))


@pytest.mark.parametrize("in_int8", [False, True])
def test_copies_share_the_memory_of_their_weights(in_int8: bool, tiny_path: Callable[[int], Path]):
    weights = Weights(tiny_path(1))
    layers = weights.shape.layers
    model = graph(weights, kept=ov.Type.bf16, context=64, layers=layers, head=True, in_int8=in_int8, copies=4)
    places = [sorted(matrices(op.get_function(0))) for op in model.get_ops() if op.get_type_name() == "If"]
    assert len(places) == 4
    assert len(places[0]) > 4 * weights.shape.layers
    assert all(each == places[0] for each in places)


def test_states_of_fewer_layers_come_from_a_single_copy(
    opened: Callable[[Dtype], OpenvinoBackend], chosen: list[int | None]
):
    backend = opened("fp32")
    chosen.clear()
    backend.hidden([PROMPT, [9] * 5], layer=1)
    assert set(chosen) == {None}


def test_engines_that_share_the_cores_have_a_single_copy_each(
    tiny_path: Callable[[int], Path], chosen: list[int | None]
):
    backend = OpenvinoBackend(tiny_path(1), dtype="fp32", threads=1)
    try:
        answered(backend, 8)
    finally:
        backend.close()
    assert set(chosen) == ({None} if (os.cpu_count() or 1) > 1 else set(range(COPIES)))


def matrices(body: ov.Model) -> set[int]:
    constants = (op for op in body.get_ops() if op.get_type_name() == "Constant" and len(op.shape) == 2)
    return {op.get_data().ctypes.data for op in constants}
