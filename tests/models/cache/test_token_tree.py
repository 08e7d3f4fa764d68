"""Rows that go on from one place, as forks do: whatever library reads them as a tree, each answers as it would alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sds.models.protocol import Backend, BackendError, Row
from tests.scale import scale, seeded

LOGIT_ERROR_MAX = 2e-3  # of the largest: llama.cpp keeps keys and values in half precision


def test_forks_that_share_a_pass_read_what_each_would_alone(opened: Callable[..., Backend]):
    """Random walks: fork, drop, read some of them in one pass; each is compared with its whole text in one slot."""
    rng = seeded(62)
    shared, alone = opened(slots=2), opened(slots=1)
    for _ in range(scale(12, 300)):
        texts = {slot: [rng.randrange(100, 4000) for _ in range(rng.randint(0, 9))] for slot in range(2)}
        for slot, text in texts.items():
            shared.prefill([text], slot=slot)
        for _ in range(rng.randint(1, 6)):
            for _ in range(rng.randint(0, 4)):
                source = rng.choice(list(texts))
                texts[shared.fork(source)] = list(texts[source])
            reading = rng.sample(list(texts), rng.randint(1, len(texts)))
            rows = [Row(slot, [rng.randrange(100, 103) for _ in range(rng.randint(1, 4))]) for slot in reading]
            for row, logits in zip(rows, shared.run(rows), strict=True):
                texts[row.slot] += row.tokens
                alone.prefill([])
                expected = alone.forward_one(texts[row.slot])
                assert np.abs(expected - logits[0]).max() < LOGIT_ERROR_MAX * max(1.0, float(np.abs(expected).max()))
            for fork in [slot for slot in texts if slot > 1 and rng.random() < 0.3]:
                shared.drop(fork)
                del texts[fork]


def test_what_failed_leaves_no_fork_behind_that_could_be_read(opened: Callable[..., Backend]):
    backend = opened(slots=1, n_ctx=64)
    backend.prefill([[100] * 60])
    fork = backend.fork(0)
    with pytest.raises(BackendError):
        backend.run([Row(fork, [101] * 5)])
    backend.drop(fork)
    backend.prefill([[100]])
    assert backend.vocab_size == len(backend.forward_one([101]))
