"""Rows that go on from one place are one tree: shared beginnings once, and every token sees just what stands before it."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import pytest

from sds.models.cache.token_tree import HELD_TOKENS, LINES_TOKENS_MAX, TOKENS_STEP, calls_of
from sds.models.protocol import Backend, BackendError, Row
from tests.scale import scale, seeded

LOGIT_ERROR_MAX = 2e-3  # of the largest: llama.cpp keeps keys and values in half precision
CONTEXT, HELD_MAX = 90, 400


@pytest.mark.parametrize("mixed_max", [0, 64, inf])
def test_calls_hold_their_rows_with_what_these_share_read_once(mixed_max: float):
    rng = seeded(61)
    for _ in range(scale(200, 5000)):
        places = [(rng.randrange(3), 7 * rng.randrange(9)) for _ in range(rng.randint(1, 6))]
        rows = [(place, [rng.randrange(3) for _ in range(rng.randint(1, 12))]) for place in places]
        calls, found = calls_of(rows, held_max=HELD_MAX, mixed_max=mixed_max)
        inputs = [call.inputs() for call in calls]
        for ((root, position), tokens), place in zip(rows, found, strict=True):
            call, (ids, positions, mask, numbers, places_of) = calls[place.call], inputs[place.call]
            tree, on_line = call.trees[place.line], numbers[place.line, place.path]
            assert (root, position) == (tree.root, tree.position)
            assert tokens == ids[0, on_line].tolist()
            assert place.path.tolist() == [n for _, there in place.stretches() for n in range(there.start, there.stop)]
            assert all(place.path[start] == there.start for start, there in place.stretches())
            assert list(range(position, position + len(tokens))) == positions[0, on_line].tolist()
            assert (place.line * call.longest + place.path).tolist() == places_of[0, on_line].tolist()
            for n, at in enumerate(place.path):
                seen = np.flatnonzero(mask[place.line, 0, at] == 0).tolist()
                assert [*range(position), *(call.held + place.path[: n + 1])] == seen
        beginnings = {(place, tuple(tokens[: n + 1])) for place, tokens in rows for n in range(len(tokens))}
        assert len(beginnings) == sum(len(tree.tokens) for call in calls for tree in call.trees)


def test_the_shape_of_a_call_says_nothing_of_company():
    """A row's call is as long as one made for it and its forks alone, whoever is in it; shapes are few."""
    rng = seeded(63)
    shapes = set()
    for _ in range(scale(200, 5000)):
        rows = [((seat, rng.randrange(CONTEXT)), [1] * rng.randint(1, 40)) for seat in range(rng.randint(1, 9))]
        calls, found = calls_of(rows, held_max=HELD_MAX, mixed_max=0)
        for row, place in zip(rows, found, strict=True):
            (alone,), _ = calls_of([row], held_max=HELD_MAX, mixed_max=0)
            shape = calls[place.call].held, calls[place.call].longest
            assert (alone.held, alone.longest) == shape
            shapes.add(shape)
    assert len(shapes) <= (2 + CONTEXT // HELD_TOKENS) * 6


def test_trees_of_one_shape_find_each_other_whatever_stands_between():
    rows = [((seat, seat % 2 * 100), [1] * (9 + seat % 4)) for seat in range(8)]
    calls, _ = calls_of(rows, held_max=1 << 20, mixed_max=0)
    assert [4, 4] == [len(call.trees) for call in calls]


def test_mixed_trees_end_where_numbers_that_are_added_at_once_do():
    """A sum over what is held and the tree itself has the same parts in the same places, whatever fills the line up."""
    rng = seeded(64)
    calls_made, trees_made = 0, 0
    for _ in range(scale(200, 5000)):
        rows = [((seat, rng.randrange(300)), [1] * rng.randint(1, 90)) for seat in range(rng.randint(1, 16))]
        calls, found = calls_of(rows, held_max=1 << 20, mixed_max=inf, lengths=(24, 64))
        inputs = [call.inputs() for call in calls]
        for ((_, position), tokens), place in zip(rows, found, strict=True):
            call, here = calls[place.call], inputs[place.call].lines[place.line]
            assert position <= call.held < 300 + HELD_TOKENS
            assert place.path.tolist() == list(range(call.longest - len(tokens), call.longest))
            if len(call.trees) > 1:  # nothing of another tree stands on a line, not even where it is masked
                assert set(here.tolist()) == set(here[place.path].tolist())
        for call, read in zip(calls, inputs, strict=True):
            assert not (call.held + call.longest) % HELD_TOKENS
            assert len(call.trees) == 1 or not read.ids.shape[1] % TOKENS_STEP
        calls_made, trees_made = calls_made + len(calls), trees_made + len(rows)
    assert trees_made > 4 * calls_made


def test_company_takes_no_tree_beyond_what_leaves_no_trace_nor_back():
    """Alone and in company a tree sees at most so many places, or its call has the shape that it has alone."""
    rng, most = seeded(65), 96
    mixed_calls = company = 0
    for _ in range(scale(300, 5000)):
        rows = [((seat, rng.randrange(70, 90)), [1] * rng.randint(1, 30)) for seat in range(rng.randint(1, 12))]
        calls, found = calls_of(rows, held_max=1 << 20, mixed_max=most, lengths=(16, 24))
        for row, place in zip(rows, found, strict=True):
            (alone,), _ = calls_of([row], held_max=1 << 20, mixed_max=most, lengths=(16, 24))
            call = calls[place.call]
            if alone.held + alone.longest <= most:
                assert most == call.held + call.longest == alone.held + alone.longest
                mixed_calls += len({len(tree.tokens) for tree in call.trees}) > 1
            else:
                assert (alone.held, alone.longest, True) == (call.held, call.longest, call.padded)
                company += len(call.trees) > 1
    assert min(mixed_calls, company) > 100


def test_trees_on_either_side_of_the_limit_do_not_part_each_other():
    rows = [((seat, 40 + seat % 2 * 60), [1] * (9 + seat % 4)) for seat in range(8)]
    calls, _ = calls_of(rows, held_max=1 << 20, mixed_max=64)
    assert [4, 4] == [len(call.trees) for call in calls]


def test_a_line_alone_takes_a_length_that_is_prepared():
    def longest(tokens: int, *, mixed_max: float = inf) -> int:
        (call,), _ = calls_of([((0, 5), [1] * tokens)], held_max=1, mixed_max=mixed_max, lengths=(24, 64, 68))
        return call.longest

    assert [8, 24, 24, 32, 64, 64, 68, 72] == [longest(tokens) for tokens in (5, 8, 24, 25, 49, 64, 65, 69)]
    assert [1, 8, 24, 32, 56] == [longest(tokens, mixed_max=0) for tokens in (1, 8, 24, 25, 49)]
    assert [8, 24, 56, 56] == [longest(tokens, mixed_max=64) for tokens in (5, 8, 49, 56)]


@pytest.mark.parametrize("mixed_max", [0, inf])
def test_a_call_grows_no_larger_than_it_may(mixed_max: float):
    calls, found = calls_of([((seat, 500), [1] * 100) for seat in range(9)], held_max=8192, mixed_max=mixed_max)
    sizes = [5, 4] if mixed_max else [4, 4, 1]
    assert sizes == [len(call.trees) for call in calls]
    assert [(n, line) for n, size in enumerate(sizes) for line in range(size)] == sorted(
        (place.call, place.line) for place in found
    )
    calls, _ = calls_of([((seat, 1990), [1]) for seat in range(9)], held_max=8192, mixed_max=mixed_max)
    assert [4, 4, 1] == [len(call.trees) for call in calls]
    (whole,), _ = calls_of([((0, 0), [1] * 700)], held_max=1, mixed_max=mixed_max)
    assert 704 == whole.longest
    calls, _ = calls_of(
        [((0, 0), [1] * 500), *(((seat, 0), [1]) for seat in range(1, 9))], held_max=1 << 20, mixed_max=mixed_max
    )
    assert all(len(call.trees) * call.longest <= LINES_TOKENS_MAX for call in calls)


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
