"""What is particular to integer passes: sums that are exact, and so the same bits in any company, cut and number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sds.models.catalog.batch_variance import batch_variance
from sds.models.files.rotation import Rotation
from sds.models.int8 import backend as integer
from sds.models.int8.backend import IntegerBackend
from sds.models.int8.library import product
from sds.models.protocol import Dtype, Row
from tests.llama_gguf import Sizes, Tensors, llama_gguf, random_tensors
from tests.model_fixtures import TINY_THREADS
from tests.models.comparing import (
    answers,
    assert_twelve_trees_take_two_calls,
    assert_what_is_no_number_ends_one_decision_alone,
    noise,
    noise_beside_llama_cpp,
    polluted_tensors,
)
from tests.models.test_backends import sections_of
from tests.scale import scale, seeded

# Of how far logits lie apart, where weights are whole numbers; another model moves 1.
NOISE: dict[Dtype, float] = {"int16": 0.02, "int8": 0.3}
ROUNDED = 0.4  # where weights are rounded, in a model as small as this
HEAD = 32
OWN = Sizes(head=HEAD)


@pytest.fixture
def opened(precision: Dtype) -> Iterator[Callable[..., IntegerBackend]]:
    backends: list[IntegerBackend] = []

    def open_one(path: Path, **options: Any) -> IntegerBackend:
        backends.append(IntegerBackend(path, **{"dtype": precision, "threads": TINY_THREADS, **options}))
        return backends[-1]

    yield open_one
    for backend in backends:
        backend.close()


DEPTHS = pytest.mark.parametrize("depth", [16, 37, 576, 1536, 9000])
COUNTS = (1, 5, 6, 7, 12, 13, 25, 97)  # of rows


@DEPTHS
def test_products_are_added_up_exactly(depth: int, precision: Dtype):
    """Of whole numbers as large as they are rounded to; of halves, the greatest sum there can be is among them."""
    in_bytes = precision == "int8"
    largest = 127 if in_bytes else min(32767, (2**31 - 1) // (127 * depth))
    # bytes beside the largest are such that any processor takes them as they are
    most_states, most_weights = (15, 75) if in_bytes else (largest, 127)
    for rows in COUNTS:
        rng = np.random.default_rng(rows * depth)
        states, weights = (
            rng.integers(-most, most, (count, depth), endpoint=True)
            for count, most in ((rows, most_states), (75, most_weights))
        )
        states[:, 0], weights[:, 0] = largest, -127
        states[:, 1] = 1
        if not in_bytes:
            states[-1], weights[-1] = largest, -127
        expected = (states @ weights.T).astype(np.float32)
        for threads in (1, 3):
            found, _ = product(
                states.astype(np.float32), weights.astype(np.float32), in_bytes=in_bytes, threads=threads
            )
            assert np.allclose(expected, found, rtol=3e-7, atol=0.0), f"{rows} rows, {threads} threads"


@pytest.mark.parametrize("beside", [16, 2], ids=["all", "two of sixteen"])
@DEPTHS
def test_nothing_is_too_large_to_be_added_up(depth: int, beside: int, precision: Dtype):
    """The greatest sums there can be, of whatever signs: off by no more than states are rounded. With few of them, it is two
    products that leave 16 bits first.
    """
    for rows in COUNTS:
        rng = np.random.default_rng(rows * depth)
        states, weights = (127.0 * rng.choice([-1, 1], (count, depth)).astype(np.float32) for count in (rows, 75))
        for each in (states, weights):
            each[:, np.arange(depth) % 16 >= beside] = 0
        aligned = min(rows, len(weights))
        weights[:aligned] = states[:aligned] * rng.choice([-1, 1], (aligned, 1))
        found, _ = product(states, weights, in_bytes=precision == "int8", threads=1)
        expected = states.astype(np.float64) @ weights.T
        assert np.allclose(expected, found, rtol=0.02, atol=0.0), f"{rows} rows"


def test_rows_have_the_bits_they_have_alone(precision: Dtype):
    states, weights = np.random.default_rng(2).standard_normal((2, 50, 130), np.float32)
    in_bytes = precision == "int8"
    whole, _ = product(states, weights, in_bytes=in_bytes, threads=2)
    for n in range(len(states)):
        assert np.array_equal(whole[n : n + 1], product(states[n : n + 1], weights, in_bytes=in_bytes, threads=1)[0])


@pytest.fixture
def unturned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let states be as the model has them: weights that are whole numbers then stay whole."""
    monkeypatch.setattr(
        integer, "rotation", lambda width: Rotation(np.ones(width, np.float32), (np.eye(width, dtype=np.float32),))
    )


def whole(sizes: Sizes) -> Tensors:
    """Return weights that are whole numbers, each row up to 127 of what it counts in."""

    def rounded(values: np.ndarray) -> np.ndarray:
        if values.ndim == 1:
            return np.ones_like(values)
        unit = np.exp2(np.ceil(np.log2(np.abs(values).max(1, keepdims=True) / 127)))
        found = np.rint(values / unit)
        found[:, 0] = 127 * np.sign(values[:, 0])
        return np.asarray(found * unit, np.float32)

    return {name: rounded(values) for name, values in random_tensors(sizes).items()}


SIZES = {
    "one key for two heads": OWN,
    "two keys for four heads": Sizes(heads=4, key_heads=2, head=HEAD),
    "a key for each head": Sizes(key_heads=2, head=HEAD),
    "odd sizes": Sizes(layers=3, heads=3, head=HEAD, width=34, inner=50),
    "wide heads": Sizes(head=2 * HEAD, width=72, inner=200),
}


@pytest.mark.usefixtures("unturned")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_whatever_its_sizes_a_model_answers_as_in_llama_cpp(
    sizes: Sizes, precision: Dtype, tmp_path: Path, opened: Callable[..., IntegerBackend]
):
    assert_as_in_llama_cpp(llama_gguf(tmp_path / "model.gguf", sizes, tensors=whole(sizes)), precision, opened)


@pytest.mark.usefixtures("unturned")
def test_a_head_and_a_rotation_of_its_own_are_used(
    precision: Dtype, tmp_path: Path, opened: Callable[..., IntegerBackend]
):
    tensors = whole(OWN) | {"rope_freqs.weight": np.linspace(1, 8, HEAD // 2, dtype=np.float32)}
    tensors["output.weight"] = tensors["token_embd.weight"][::-1].copy()
    settings = {"rope.freq_base": 500_000.0}
    path = llama_gguf(tmp_path / "model.gguf", OWN, tensors=tensors, settings=settings)
    assert_as_in_llama_cpp(path, precision, opened)


def assert_as_in_llama_cpp(
    path: Path, precision: Dtype, opened: Callable[..., IntegerBackend], *, noise_max: float | None = None
) -> None:
    assert noise_beside_llama_cpp(path, opened(path)) < (noise_max or NOISE[precision])


def test_turned_and_rounded_weights_are_nearly_those_of_llama_cpp(
    precision: Dtype, tmp_path: Path, opened: Callable[..., IntegerBackend]
):
    path = llama_gguf(tmp_path / "model.gguf", Sizes(head=HEAD, width=64, inner=128))
    assert_as_in_llama_cpp(path, precision, opened, noise_max=ROUNDED)


@pytest.mark.parametrize("times", [70, 500, 3000])
def test_what_is_seen_many_times_weighs_as_what_is_seen_once(
    times: int, precision: Dtype, tmp_path: Path, opened: Callable[..., IntegerBackend]
):
    """Of one token all values are equal, however often it stands there, and their sum is the greatest there can be."""
    settings: dict[str, float | str | list[int]] = {"context_length": 4096}
    backend = opened(llama_gguf(tmp_path / "model.gguf", OWN, settings=settings), n_ctx=4096)
    for token in (20, 21, 22):
        backend.prefill([])
        once = backend.forward_one([token])
        backend.prefill([[token] * (times - 1)])
        assert noise(once, backend.forward_one([token])) < (0.002 if precision == "int16" else 0.05)


def test_cuts_company_forks_and_threads_show_nowhere(
    tiny_path: Callable[[int], Path], opened: Callable[..., IntegerBackend]
):
    """Walks of prompts and their forks, read together by two threads, and token by token by one."""
    rng = seeded(41)
    together, alone = opened(tiny_path(1), slots=5, threads=2), opened(tiny_path(1))
    common = sections_of(5, 37)[0]
    for _ in range(scale(3, 100)):
        own = [[rng.randrange(3, 90) for _ in range(rng.choice([1, 5, 20, 21, 60]))] for _ in range(5)]
        for slot, section in enumerate(own):
            together.prefill([common, section], slot=slot)
        forks = [slot for slot in range(5) for _ in range(rng.randrange(3))]
        at = [*range(5), *(together.fork(slot) for slot in forks)]
        said = {slot: list(own[origin]) for slot, origin in zip(at, [*range(5), *forks], strict=True)}
        for _ in range(3):
            rows = [Row(slot, [rng.randrange(3, 90) for _ in range(rng.choice([1, 2, 9]))], 1) for slot in at]
            for row, logits in zip(rows, together.run(rows), strict=True):
                said[row.slot] += row.tokens
                alone.prefill([[*common, *said[row.slot][:-1]]])
                assert np.array_equal(alone.forward_one(said[row.slot][-1:]), logits[0])
    assert 0.0 == batch_variance(together)


def test_more_trees_than_a_call_holds_show_it_nowhere(
    tiny_path: Callable[[int], Path], opened: Callable[..., IntegerBackend]
):
    together, alone = opened(tiny_path(1), slots=12), opened(tiny_path(1))
    assert_twelve_trees_take_two_calls(together, alone, sections_of(9, 30, *([60] * 12)))


@pytest.mark.usefixtures("unturned")
@pytest.mark.parametrize("where", ["attn_k", "attn_v"])
@pytest.mark.parametrize("bad_tokens", [[7], [7, 8, 9], [8, 9, 7]])
def test_what_is_no_number_is_the_end_of_its_own_decision_alone(
    where: str, bad_tokens: list[int], tmp_path: Path, opened: Callable[..., IntegerBackend]
):
    tensors = polluted_tensors(OWN, where, 3e38)
    tensors["blk.0.attn_norm.weight"][0] = 1.0
    backend = opened(llama_gguf(tmp_path / "model.gguf", OWN, tensors=tensors), slots=2)
    assert_what_is_no_number_ends_one_decision_alone(backend, bad_tokens)


def test_backends_side_by_side_give_the_bits_of_one_alone(
    tiny_path: Callable[[int], Path], opened: Callable[..., IntegerBackend]
):
    first = opened(tiny_path(1))
    others = [first.replica(threads=2) for _ in range(3)]
    expected, found = answers(first), dict[int, np.ndarray]()

    def ask(n: int) -> None:
        for _ in range(5):
            found[n] = answers(others[n])

    workers = [threading.Thread(target=ask, args=[n]) for n in range(len(others))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    first.close()  # the weights stay as long as one needs them
    assert all(np.array_equal(expected, each) for each in found.values())
    assert np.array_equal(expected, answers(others[0]))
    for other in others:
        other.close()
