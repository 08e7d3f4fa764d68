"""What a backend answers, and how far two answers lie apart."""

from __future__ import annotations

import numpy as np

from sds.models.protocol import Backend, Row
from tests.llama_gguf import PIECES


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
