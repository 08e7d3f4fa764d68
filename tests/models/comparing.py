"""What a backend answers, and how far two answers lie apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import Backend, BackendError, Row
from tests.llama_gguf import CONTEXT, PIECES, Sizes, Tensors, random_tensors
from tests.model_fixtures import TINY_THREADS


def answers(backend: Backend, seed: int = 3) -> np.ndarray:
    """Return the logits after the last tokens of a prompt of two sections, [5, vocab_size]."""
    rng = np.random.default_rng(seed)
    first, second, last = ([int(token) for token in rng.integers(3, len(PIECES), n)] for n in (40, 25, 5))
    backend.prefill([first, second])
    return backend.run([Row(0, last, 5)])[0]


def farthest(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())


def noise(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the greatest distance, as a share of how far the logits themselves lie apart."""
    return farthest(expected, found) / float(expected.std())


def noise_beside_llama_cpp(path: Path, backend: Backend) -> float:
    """Return how far what a backend answers lies from what llama.cpp does with the same file."""
    llama = LlamaBackend(path, n_ctx=CONTEXT, threads=TINY_THREADS)
    expected = answers(llama)
    llama.close()
    return noise(expected, answers(backend))


def polluted_tensors(sizes: Sizes, where: str, size: float) -> Tensors:
    """Return weights of a model one of whose tokens, 7, has numbers of any size in the first layer's keys or values, and only
    there: the first number of a state is what only it has.
    """
    tensors = random_tensors(sizes)
    tensors["token_embd.weight"][:, 0] = 0.0
    tensors["token_embd.weight"][7, 0] = 100.0
    for n in range(2):
        for name in ("attn_output", "ffn_down"):
            tensors[f"blk.{n}.{name}.weight"][0] = 0.0
    tensors[f"blk.0.{where}.weight"][:, 0] = size
    return tensors


def assert_what_is_no_number_ends_one_decision_alone(backend: Backend, bad_tokens: list[int]) -> None:
    """`backend`: of `polluted_tensors`, with two slots."""
    backend.prefill([[20] * 20], slot=1)
    expected = backend.forward_one([21], slot=1)
    for slot in (0, 1):
        backend.prefill([[20] * 20], slot=slot)
    bad, good = backend.run([Row(0, bad_tokens), Row(1, [21])])
    assert np.array_equal(expected, good[0])
    assert not np.isfinite(bad).all()
    with pytest.raises(BackendError, match="the model returned logits that are not numbers"):
        backend.prefill([[20] * 20, [7]])
    assert np.isfinite(backend.forward_one([22], slot=1)).all()


def assert_twelve_trees_take_two_calls(together: Any, alone: Backend, sections: list[list[int]]) -> None:
    """`together`: a backend of twelve slots. `sections`: what all have in common, then what each has of its own."""
    calls, real = list[int](), together._infer
    common, *own = sections

    def counted(trees: Any, *asked: Any) -> Any:
        calls.append(len(getattr(trees, "trees", trees)))
        return real(trees, *asked)

    for slot in range(12):
        together.prefill([common], slot=slot)
    together._infer = counted
    found = together.run([Row(slot, tokens) for slot, tokens in enumerate(own)])
    assert [8, 4] == calls
    for tokens, logits in zip(own, found, strict=True):
        alone.prefill([common])
        assert np.array_equal(alone.forward_one(tokens), logits[0])
