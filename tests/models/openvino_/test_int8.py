"""Products in 8 bits: what is folded into the weights changes nothing, and what is rounded only a little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest

from sds.models.catalog.prepare import KL_MAX
from sds.models.catalog.timing import distributions, divergence
from sds.models.files.rotation import rotation
from sds.models.openvino_ import graph, int8
from sds.models.openvino_.backend import OpenvinoBackend
from sds.models.openvino_.int8 import LARGEST, rounded_by_row, rounded_matrix
from sds.models.openvino_.names import INT8_REST, computes_in_bf16, computes_in_int8
from sds.models.protocol import BackendError, Dtype, Row
from tests.llama_gguf import Sizes, llama_gguf, random_tensors
from tests.models.comparing import answers, farthest, noise
from tests.models.openvino_.test_backend import VARIANTS, opened

__all__ = ["opened"]
INT8_NOISE = 0.15
NO_BF16 = pytest.mark.skipif(not computes_in_bf16(), reason="no BF16 in this processor")
IN_INT8 = ["int8", pytest.param("int8-bf16", marks=NO_BF16)]
pytestmark = pytest.mark.skipif(not computes_in_int8(), reason="no int8 in this processor")


def test_each_row_of_weights_is_rounded_within_its_own_range() -> None:
    rng = np.random.default_rng(3)
    matrix = (rng.standard_normal((5, 64)) * [[1e-6], [1], [1e6], [0], [1e-38]]).astype(np.float32)
    scaled = rounded_matrix(matrix)
    whole, scales = (scaled.input_value(n).get_node() for n in range(2))
    found = whole.input_value(0).get_node().data * scales.data
    step = np.maximum(np.abs(matrix).max(1, keepdims=True) / LARGEST, 1e-30)
    assert (np.abs(found - matrix) <= 0.51 * step).all()
    assert not found[3:].any()


def by_row(rows: np.ndarray, hint: str) -> tuple[np.ndarray, np.ndarray]:
    given = ops.parameter(ov.PartialShape([1, -1, rows.shape[1]]), ov.Type.f32)
    settings = {"INFERENCE_PRECISION_HINT": hint}
    compiled = ov.Core().compile_model(ov.Model(list(rounded_by_row(given)), [given], ""), "CPU", settings)
    small, largest = compiled([rows[None]]).values()
    return small[0], largest[0, :, 0]


def test_each_row_of_states_is_rounded_within_its_own_range() -> None:
    rows = np.random.default_rng(3).standard_normal((5, 48)).astype(np.float32)
    rows *= np.array([[1e-6], [1], [1e6], [0], [1e20]], np.float32)
    small, largest = by_row(rows, "f32")
    assert np.allclose(largest, np.abs(rows).max(1), rtol=1e-5)
    assert farthest(small * LARGEST, np.rint(small * LARGEST)) < 1e-4
    assert (np.abs(small * largest[:, None] - rows) <= 0.51 / LARGEST * largest[:, None]).all()


@pytest.mark.parametrize("hint", ["f32", pytest.param("bf16", marks=NO_BF16)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, 47])
def test_a_row_with_what_is_no_number_is_multiplied_by_what_is_none(bad: float, place: int, hint: str) -> None:
    rows = np.random.default_rng(3).standard_normal((6, 48)).astype(np.float32)
    _, expected = by_row(rows, hint)
    rows[3, place] = bad
    _, largest = by_row(rows, hint)
    assert not np.isfinite(largest[3])
    assert np.array_equal(np.delete(expected, 3), np.delete(largest, 3))


@pytest.mark.parametrize("dtype", IN_INT8)
@pytest.mark.parametrize("tokens", [[7], [7, 8, 9], [8, 9, 7]])
def test_a_state_that_is_no_number_shows_in_all_that_comes_after_it(
    tokens: list[int], dtype: Dtype, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    """Of token 7: the sum of its embedding, turned."""
    tensors = random_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"].copy()
    tensors["token_embd.weight"][7] = 3e38 * np.sign(rotation(Sizes().width).matrix[0])
    backend = opened(llama_gguf(tmp_path / "model.gguf", tensors=tensors), dtype=dtype, slots=2)
    backend.prefill([[20] * 20], slot=1)
    expected = backend.forward_one([21], slot=1)
    for slot in (0, 1):
        backend.prefill([[20] * 20], slot=slot)
    bad, good = backend.run([Row(0, tokens), Row(1, [21])])
    assert not np.isfinite(bad).any()
    assert np.array_equal(expected, good[0])
    with pytest.raises(BackendError, match="the model returned logits that are not numbers"):
        backend.prefill([[20] * 20, tokens])


@pytest.mark.parametrize("dtype", IN_INT8)
@pytest.mark.parametrize("parts", [("attn_q", "attn_k"), ("ffn_gate", "ffn_up")])
def test_what_becomes_no_number_within_a_layer_ends_the_decision(
    parts: tuple[str, str], dtype: Dtype, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    """Scores, or inner states, that are too large: the states before are numbers."""
    tensors = random_tensors()
    for part in parts:
        tensors[f"blk.0.{part}.weight"] *= np.float32(1e25)
    backend = opened(llama_gguf(tmp_path / "model.gguf", tensors=tensors), dtype=dtype)
    with pytest.raises(BackendError, match="the model returned logits that are not numbers"):
        backend.prefill([[20, 21, 22]])
    backend.prefill([])
    assert not np.isfinite(backend.forward_one([20, 21, 22])).any()


def test_a_norm_that_may_make_no_number_of_zeros_is_refused(tmp_path: Path) -> None:
    path = llama_gguf(tmp_path / "model.gguf", settings={"attention.layer_norm_rms_epsilon": 0.0})
    with pytest.raises(BackendError, match="the epsilon of its norms is too small for int8"):
        OpenvinoBackend(path, dtype="int8", threads=1, lengths=())
    OpenvinoBackend(path, dtype="fp32", threads=1, lengths=()).close()


@pytest.mark.parametrize("sizes", [None, *VARIANTS.values()], ids=["tiny", *VARIANTS])
def test_but_for_the_rounding_it_is_the_same_function(
    sizes: Sizes | None,
    tmp_path: Path,
    tiny_path: Callable[[int], Path],
    opened: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = llama_gguf(tmp_path / "model.gguf", sizes) if sizes else tiny_path(1)
    plain = opened(path)
    monkeypatch.setattr(graph, "rounded", lambda states: states)
    monkeypatch.setattr(int8, "rounded", lambda states, _: states)
    monkeypatch.setattr(graph, "rounded_matrix", graph._matrix)
    turned = opened(path, dtype="int8")
    assert farthest(answers(plain), answers(turned)) < 1e-3


@pytest.mark.parametrize("dtype", IN_INT8)
def test_the_rounding_is_small(dtype: Dtype, tiny_path: Callable[[int], Path], opened: Callable[..., Any]) -> None:
    exact = answers(opened(tiny_path(1)))
    found = answers(opened(tiny_path(1), dtype=dtype))
    assert 0 < noise(exact, found) < INT8_NOISE


def products(backend: OpenvinoBackend) -> list[Any]:
    """Return the products of the compiled graph."""
    ops = backend._graph.compiled().get_runtime_model().get_ops()
    return [op for op in ops if str(op.get_rt_info()["layerType"].value).startswith("FullyConnected")]


def products_in(backend: OpenvinoBackend) -> Counter[str]:
    """Return in what each product of the compiled graph is computed."""
    return Counter(str(op.get_rt_info()["primitiveType"].value).rpartition("_")[2] for op in products(backend))


@pytest.mark.parametrize("dtype", IN_INT8)
def test_products_of_every_layer_but_the_last_are_computed_in_8_bits(
    dtype: Dtype, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    """Five in each layer: queries, keys and values are one, the gate and what it lets in two. The rest is in the other type."""
    layers, rest = 3, INT8_REST[dtype]
    path = llama_gguf(tmp_path / "model.gguf", Sizes(layers=layers))
    before, found = (products_in(opened(path, dtype=each)) for each in (rest, dtype))
    assert (0, 5 * (layers - 1)) == (before["i8"], found["i8"])
    assert (rest == "bf16") == (found["bf16"] > 0)
    turns = 1 + layers - 1  # of states, and of inner states block by block
    assert found.total() == before.total() + turns


@pytest.mark.parametrize("dtype", IN_INT8)
def test_the_weights_of_the_head_are_read_in_8_bits(
    dtype: Dtype, tiny_path: Callable[[int], Path], opened: Callable[..., Any]
) -> None:
    def kept_in(backend: OpenvinoBackend) -> list[ov.Type]:
        heads = [op for op in products(backend) if op.get_output_partial_shape(0)[-1] == backend.vocab_size]
        return [op.input(1).get_source_output().get_element_type() for op in heads]

    rest, found = (kept_in(opened(tiny_path(1), dtype=each)) for each in (INT8_REST[dtype], dtype))
    assert ([ov.Type.f32], [ov.Type.i8]) == (rest, found)


@pytest.mark.parametrize(("norm", "matrix"), [("blk.0.ffn_norm", "blk.0.ffn_up"), ("output_norm", "token_embd")])
def test_weights_that_overflow_when_they_are_turned_are_refused(norm: str, matrix: str, tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors[f"{norm}.weight"] = np.full_like(tensors[f"{norm}.weight"], 3e38)
    tensors[f"{matrix}.weight"] *= 1e6
    path = llama_gguf(tmp_path / "huge.gguf", tensors=tensors)
    with pytest.raises(BackendError) as caught:
        OpenvinoBackend(path, dtype="int8", threads=1, lengths=())
    assert "some weights are too large to be rotated" == str(caught.value)


def test_transformers_does_not_compute_in_int8(tiny_folder: Callable[[int], Path]) -> None:
    from sds.models.transformers_.backend import HfBackend

    with pytest.raises(BackendError, match="transformers does not support the dtype int8 here"):
        HfBackend(tiny_folder(1), dtype="int8")


def test_the_embedded_model_is_further_from_its_weights_than_in_bf16_and_near_enough_to_be_run(own_gguf: Path) -> None:
    exact, *others = (distributions(own_gguf, "openvino", dtype, 2) for dtype in ("fp32", "bf16", "int8", "int8-bf16"))
    in_bf16, *in_int8 = (divergence(exact, each) for each in others)
    assert in_bf16 < min(in_int8) <= max(in_int8) < KL_MAX
