"""What is particular to OpenVINO: the same numbers as the other libraries, whatever shares a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from sds.models.catalog.batch_variance import batch_variance
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.openvino_.backend import OpenvinoBackend
from sds.models.openvino_.names import computes_in_bf16, computes_in_int8
from sds.models.protocol import Backend, BackendError, Dtype, Row
from tests.hostile import Vocabulary, tiny_checkpoint
from tests.llama_gguf import Sizes, llama_gguf, random_tensors
from tests.model_fixtures import TINY_THREADS
from tests.models.comparing import (
    answers,
    assert_twelve_trees_take_two_calls,
    assert_what_is_no_number_ends_one_decision_alone,
    farthest,
    noise,
    noise_beside_llama_cpp,
    polluted_tensors,
)
from tests.models.test_backends import sections_of
from tests.scale import scale, seeded

NOISE = 0.02  # of how far logits lie apart: llama.cpp keeps keys and values in half precision; another model moves 1
BF16_NOISE = 0.1
DTYPES = [
    "fp32",
    pytest.param("bf16", marks=pytest.mark.skipif(not computes_in_bf16(), reason="no BF16 in this processor")),
    pytest.param("int8", marks=pytest.mark.skipif(not computes_in_int8(), reason="no int8 in this processor")),
    pytest.param(
        "int8-bf16",
        marks=pytest.mark.skipif(
            not (computes_in_int8() and computes_in_bf16()), reason="no int8 or no BF16 in this processor"
        ),
    ),
]


@pytest.fixture
def opened() -> Iterator[Callable[..., OpenvinoBackend]]:
    backends: list[OpenvinoBackend] = []

    def open_one(path: Path, *, dtype: Dtype = "fp32", **options: Any) -> OpenvinoBackend:
        backends.append(OpenvinoBackend(path, dtype=dtype, threads=TINY_THREADS, **{"lengths": (), **options}))
        return backends[-1]

    yield open_one
    for backend in backends:
        backend.close()


def test_logits_are_those_of_transformers(tiny_vino: Backend, tiny_hf: Backend):
    assert farthest(answers(tiny_hf), answers(tiny_vino)) < 1e-3


VARIANTS = {
    "two keys for four heads": Sizes(heads=4, key_heads=2, head=8),
    "a key for each head": Sizes(key_heads=2),
    "odd sizes": Sizes(layers=3, heads=3, head=10, width=34, inner=50),
    "heads wider than the state": Sizes(head=24),
}


@pytest.mark.parametrize("sizes", VARIANTS.values(), ids=VARIANTS.keys())
def test_whatever_its_sizes_a_model_answers_as_in_llama_cpp(
    sizes: Sizes, tmp_path: Path, opened: Callable[..., OpenvinoBackend]
):
    assert_as_in_llama_cpp(llama_gguf(tmp_path / "model.gguf", sizes), opened)


def test_a_head_of_its_own_is_used(tmp_path: Path, opened: Callable[..., OpenvinoBackend]):
    tensors = random_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"][::-1].copy()
    assert_as_in_llama_cpp(llama_gguf(tmp_path / "model.gguf", tensors=tensors), opened)


def test_a_rotation_of_its_own_is_used(tmp_path: Path, opened: Callable[..., OpenvinoBackend]):
    tensors = random_tensors() | {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    settings = {"rope.freq_base": 500_000.0}
    assert_as_in_llama_cpp(llama_gguf(tmp_path / "model.gguf", tensors=tensors, settings=settings), opened)


def assert_as_in_llama_cpp(path: Path, opened: Callable[..., OpenvinoBackend]) -> None:
    assert noise_beside_llama_cpp(path, opened(path)) < NOISE


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.BF16, Kind.F16])
def test_weights_are_de_quantised_exactly(kind: Kind, tmp_path: Path, opened: Callable[..., OpenvinoBackend]):
    def stored(values: np.ndarray) -> np.ndarray:
        return dequantize(quantize(values, kind), kind) if values.ndim > 1 else values

    plain = {name: stored(values) for name, values in random_tensors().items()}
    first = opened(llama_gguf(tmp_path / "stored.gguf", kind=kind))
    second = opened(llama_gguf(tmp_path / "plain.gguf", tensors=plain))
    assert np.array_equal(answers(first), answers(second))


@pytest.mark.skipif(not computes_in_bf16(), reason="no BF16 in this processor")
def test_in_bf16_it_is_as_near_to_llama_cpp_as_bf16_is(
    vocabulary: Vocabulary, tmp_path: Path, opened: Callable[..., OpenvinoBackend]
):
    path = tiny_checkpoint(tmp_path / "bf16.gguf", vocabulary, 1, weights=Kind.BF16)
    llama = LlamaBackend(path, threads=TINY_THREADS)
    theirs, ours = answers(llama), answers(opened(path, dtype="bf16"))
    llama.close()
    assert noise(theirs, ours) < BF16_NOISE


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_gives_bit_equal_logits_whatever_was_cached(
    dtype: Dtype, tiny_path: Callable[[int], Path], opened: Callable[..., OpenvinoBackend]
):
    backend = opened(tiny_path(1), dtype=dtype)
    first, second, other = sections_of(4, 30, 12, 20)
    backend.prefill([first, second])
    expected = backend.forward_one([20, 21])
    assert np.float32 == expected.dtype
    for before in ([first, other], [other], []):
        backend.prefill(before)
        backend.forward_one([22])
        backend.run([Row(backend.fork(0), tail) for tail in ([23], [24, 25])])
        backend.prefill([first, second])
        assert np.array_equal(expected, backend.forward_one([20, 21]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_several_prompts_and_their_forks_are_close_to_each_alone(
    dtype: Dtype, tiny_path: Callable[[int], Path], opened: Callable[..., OpenvinoBackend]
):
    several, alone = opened(tiny_path(1), dtype=dtype, slots=3), opened(tiny_path(1), dtype=dtype)
    common, *own = sections_of(5, 30, 1, 9, 60)
    tails = [[20], [20, 21, 22], [20, 21, 23, 24], [25]]
    for slot, section in enumerate(own):
        several.prefill([common, section], slot=slot)
    forks = {several.fork(slot): slot for slot in (0, 0, 2)}
    rows = [Row(at, tail, len(tail)) for at, tail in zip([1, *forks], tails, strict=True)]
    for passes in (1, 2):  # the second behind what was read in the first
        for row, logits in zip(rows, several.run(rows), strict=True):
            alone.prefill([common, own[forks.get(row.slot, row.slot)]])
            for _ in range(passes):
                (expected,) = alone.run([Row(0, row.tokens, row.outputs)])
            assert noise(expected, logits) < (1e-4 if dtype == "fp32" else BF16_NOISE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whatever_its_company_a_row_gets_the_bits_it_gets_alone(
    dtype: Dtype, tiny_path: Callable[[int], Path], opened: Callable[..., OpenvinoBackend]
):
    """Walks of prompts and their forks, whose passes are made together in one backend and one by one in the other."""
    rng = seeded(41)
    together, apart = (opened(tiny_path(1), dtype=dtype, slots=5) for _ in range(2))
    common = sections_of(5, 37)[0]
    shared = 0
    for _ in range(scale(6, 200)):
        own = [[rng.randrange(3, 90) for _ in range(rng.choice([1, 5, 20, 21, 60]))] for _ in range(5)]
        for slot, section in enumerate(own):
            for backend in (together, apart):
                backend.prefill([common, section], slot=slot)
        forks = [slot for slot in range(5) for _ in range(rng.randrange(3))]
        at = [*range(5), *(together.fork(slot) for slot in forks)]
        assert at[5:] == [apart.fork(slot) for slot in forks]
        for _ in range(3):
            rows = [Row(slot, [rng.randrange(3, 90) for _ in range(rng.choice([1, 2, 9]))]) for slot in at]
            families = [
                [row for row, origin in zip(rows, [*range(5), *forks], strict=True) if origin == n] for n in range(5)
            ]
            found = dict(zip(at, together.run(rows), strict=True))
            for family in families:
                for row, logits in zip(family, apart.run(family), strict=True):
                    assert np.array_equal(logits, found[row.slot])
            shared += len(rows)
    assert shared > 5
    assert 0.0 == batch_variance(together)


@pytest.fixture
def polluted(tmp_path: Path, opened: Callable[..., OpenvinoBackend]) -> Callable[..., OpenvinoBackend]:
    """Open a model one of whose tokens, 7, has keys of any size."""

    def open_one(size: float, **options: Any) -> OpenvinoBackend:
        tensors = polluted_tensors(Sizes(), "attn_k", size)
        return opened(llama_gguf(tmp_path / "model.gguf", tensors=tensors), **options)

    return open_one


NO_NUMBERS = 3e38


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e9, 1e12, 1e30, 1e37, NO_NUMBERS])
def test_a_prompt_is_not_touched_by_what_an_earlier_one_left_beyond_its_end(
    size: float, dtype: Dtype, polluted: Callable[..., OpenvinoBackend]
):
    backend = polluted(size, dtype=dtype)

    def after(token: int) -> np.ndarray:
        backend.prefill([[20] * 20])
        return backend.forward_one([token])

    expected = {token: after(token) for token in range(30, 40)}
    for left in ([7], [22, 7, 23]):
        backend.prefill([[20] * 20])
        assert (size == NO_NUMBERS) == (not np.isfinite(backend.forward_one(left)).all())
        for token, logits in expected.items():
            assert np.array_equal(logits, after(token))
            backend.prefill([[20] * 20])
            backend.forward_one(left)


@pytest.mark.parametrize("bad_tokens", [[7], [7, 8, 9], [8, 9, 7]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_is_the_end_of_its_own_decision_alone(
    dtype: Dtype, bad_tokens: list[int], polluted: Callable[..., OpenvinoBackend]
):
    assert_what_is_no_number_ends_one_decision_alone(polluted(NO_NUMBERS, dtype=dtype, slots=2), bad_tokens)


def test_logits_whose_sum_is_no_number_are_numbers(tmp_path: Path, opened: Callable[..., OpenvinoBackend]):
    """Whoever asked goes on from them, so what was read must have been kept."""
    tensors = random_tensors()
    rows = tensors["token_embd.weight"]
    tensors["output.weight"] = np.tile(np.sign(rows[20]) * 1e36, (len(rows), 1)).astype(np.float32)
    backend = opened(llama_gguf(tmp_path / "model.gguf", tensors=tensors))
    backend.prefill([[30] * 20])
    first, second = backend.run([Row(0, [20, 20], 2)])[0]
    assert np.isfinite(first).all()
    assert abs(first.sum(dtype=np.float64)) > np.finfo(np.float32).max
    backend.prefill([[30] * 20])
    backend.forward_one([20])
    assert np.allclose(second, backend.forward_one([20]), rtol=1e-4)


def test_a_pass_of_many_is_cut_into_several_calls_and_shows_it_nowhere(
    tiny_path: Callable[[int], Path], opened: Callable[..., OpenvinoBackend]
):
    together, alone = opened(tiny_path(1), slots=12), opened(tiny_path(1))
    assert_twelve_trees_take_two_calls(together, alone, sections_of(9, 30, *([60] * 12)))


def test_loading_and_running_prints_nothing(
    tmp_path: Path, opened: Callable[..., OpenvinoBackend], capfd: pytest.CaptureFixture[str]
):
    answers(opened(llama_gguf(tmp_path / "model.gguf")))
    assert ("", "") == tuple(capfd.readouterr())


def test_a_model_whose_first_call_fails_is_not_opened(
    tiny_path: Callable[[int], Path], opened: Callable[..., OpenvinoBackend], monkeypatch: pytest.MonkeyPatch
):
    """The first call was made when it was opened."""
    monkeypatch.setattr(OpenvinoBackend, "_call", lambda *_: (_ for _ in ()).throw(BackendError("no memory")))
    with pytest.raises(BackendError, match="no memory"):
        opened(tiny_path(1), dtype="fp32")
