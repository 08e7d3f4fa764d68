"""Rows that go on from one place are one tree: shared beginnings once, and every token sees just what stands before it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sds.models.protocol import Backend, BackendError, Row
from sds.models.token_trees import forest
from tests.scale import scale, seeded

LOGIT_ERROR_MAX = 1e-3  # fp32, other shapes


def test_a_forest_is_its_rows_with_what_they_share_read_once():
    rng = seeded(61)
    for _ in range(scale(200, 5000)):
        places = [(rng.randrange(3), 7 * rng.randrange(3)) for _ in range(rng.randint(1, 6))]
        rows = [(place, [rng.randrange(3) for _ in range(rng.randint(1, 6))]) for place in places]
        found = forest(rows)
        ids, positions, mask = found.inputs()
        seen = mask == 0
        for (place, tokens), (line, path) in zip(rows, found.paths, strict=True):
            tree, padding = found.trees[line], found.held - place[1]
            assert place == (tree.root, tree.position)
            assert tokens == ids[line, path].tolist()
            assert list(range(place[1], place[1] + len(tokens))) == positions[line, path].tolist()
            for n, at in enumerate(path):
                assert ([False] * padding + [True] * place[1]) == seen[line, 0, at, : found.held].tolist()
                assert path[: n + 1].tolist() == np.flatnonzero(seen[line, 0, at, found.held :]).tolist()
        beginnings = {(place, tuple(tokens[: n + 1])) for place, tokens in rows for n in range(len(tokens))}
        assert len(beginnings) == sum(len(tree.tokens) for tree in found.trees)


def test_forks_that_share_a_pass_read_what_each_would_alone(opened: Callable[..., Backend]):
    """Random walks: fork, drop, read some of them in one pass; each is compared with its whole text in one slot."""
    rng = seeded(62)
    shared, alone = opened(slots=2), opened(slots=1)
    for _ in range(scale(12, 300)):
        texts = {slot: [rng.randrange(100, 4000) for _ in range(rng.randint(0, 9))] for slot in range(2)}
        for slot, text in texts.items():
            shared.begin([text], slot=slot)
        for _ in range(rng.randint(1, 6)):
            for _ in range(rng.randint(0, 4)):
                source = rng.choice(list(texts))
                texts[shared.fork(source)] = list(texts[source])
            reading = rng.sample(list(texts), rng.randint(1, len(texts)))
            rows = [Row(slot, [rng.randrange(100, 103) for _ in range(rng.randint(1, 4))]) for slot in reading]
            for row, logits in zip(rows, shared.run(rows), strict=True):
                texts[row.slot] += row.tokens
                alone.begin([])
                expected = alone.step(texts[row.slot])
                assert np.abs(expected - logits[0]).max() < LOGIT_ERROR_MAX * max(1.0, float(np.abs(expected).max()))
            for fork in [slot for slot in texts if slot > 1 and rng.random() < 0.3]:
                shared.drop(fork)
                del texts[fork]


def test_what_failed_leaves_no_fork_behind_that_could_be_read(opened: Callable[..., Backend]):
    backend = opened(slots=1, n_ctx=64)
    backend.begin([[100] * 60])
    fork = backend.fork(0)
    with pytest.raises(BackendError):
        backend.run([Row(fork, [101] * 5)])
    backend.drop(fork)
    backend.begin([[100]])
    assert backend.vocab_size == len(backend.step([101]))
