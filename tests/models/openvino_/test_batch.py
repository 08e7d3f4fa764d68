"""Rows that go on from one place are one tree: shared prefixes once, and every token sees just what stands before it."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from sds.models.openvino_.batch import PADDED_TOKENS_MAX, PAST_TOKENS, TOKENS_STEP, batches_of
from tests.scale import scale, seeded

LOGIT_ERROR_MAX = 2e-3  # of the largest: llama.cpp keeps keys and values in half precision
CONTEXT, PAST_MAX = 90, 400


@pytest.mark.parametrize("mixed_max", [0, 64, inf])
def test_calls_hold_their_rows_with_what_these_share_read_once(mixed_max: float):
    rng = seeded(61)
    for _ in range(scale(200, 5000)):
        places = [(rng.randrange(3), 7 * rng.randrange(9)) for _ in range(rng.randint(1, 6))]
        rows = [(place, [rng.randrange(3) for _ in range(rng.randint(1, 12))]) for place in places]
        batches, found = batches_of(rows, past_max=PAST_MAX, mixed_max=mixed_max)
        inputs = [batch.inputs() for batch in batches]
        for ((root, position), tokens), place in zip(rows, found, strict=True):
            batch, (ids, positions, mask, numbers, places_of) = batches[place.batch], inputs[place.batch]
            tree, on_line = batch.trees[place.padded_row], numbers[place.padded_row, place.path]
            assert (root, position) == (tree.root, tree.position)
            assert tokens == ids[0, on_line].tolist()
            assert list(range(position, position + len(tokens))) == positions[0, on_line].tolist()
            assert (place.padded_row * batch.longest + place.path).tolist() == places_of[0, on_line].tolist()
            for n, at in enumerate(place.path):
                seen = np.flatnonzero(mask[place.padded_row, 0, at] == 0).tolist()
                assert [*range(position), *(batch.past + place.path[: n + 1])] == seen
        beginnings = {(place, tuple(tokens[: n + 1])) for place, tokens in rows for n in range(len(tokens))}
        assert len(beginnings) == sum(len(tree.tokens) for batch in batches for tree in batch.trees)


def test_the_shape_of_a_call_says_nothing_of_company():
    """A row's batch is as long as one made for it and its forks alone, whoever is in it; shapes are few."""
    rng = seeded(63)
    shapes = set()
    for _ in range(scale(200, 5000)):
        rows = [((slot, rng.randrange(CONTEXT)), [1] * rng.randint(1, 40)) for slot in range(rng.randint(1, 9))]
        batches, found = batches_of(rows, past_max=PAST_MAX, mixed_max=0)
        for row, place in zip(rows, found, strict=True):
            (alone,), _ = batches_of([row], past_max=PAST_MAX, mixed_max=0)
            shape = batches[place.batch].past, batches[place.batch].longest
            assert (alone.past, alone.longest) == shape
            shapes.add(shape)
    assert len(shapes) <= (2 + CONTEXT // PAST_TOKENS) * 6


def test_trees_of_one_shape_find_each_other_whatever_stands_between():
    rows = [((slot, slot % 2 * 100), [1] * (9 + slot % 4)) for slot in range(8)]
    batches, _ = batches_of(rows, past_max=1 << 20, mixed_max=0)
    assert [4, 4] == [len(batch.trees) for batch in batches]


def test_mixed_trees_end_where_numbers_that_are_added_at_once_do():
    """A sum over what is held and the tree itself has the same parts in the same places, whatever fills the line up."""
    rng = seeded(64)
    calls_made, trees_made = 0, 0
    for _ in range(scale(200, 5000)):
        rows = [((slot, rng.randrange(300)), [1] * rng.randint(1, 90)) for slot in range(rng.randint(1, 16))]
        batches, found = batches_of(rows, past_max=1 << 20, mixed_max=inf, lengths=(24, 64))
        inputs = [batch.inputs() for batch in batches]
        for ((_, position), tokens), place in zip(rows, found, strict=True):
            batch, here = batches[place.batch], inputs[place.batch].lines[place.padded_row]
            assert position <= batch.past < 300 + PAST_TOKENS
            assert place.path.tolist() == list(range(batch.longest - len(tokens), batch.longest))
            if len(batch.trees) > 1:  # nothing of another tree stands on a line, not even where it is masked
                assert set(here.tolist()) == set(here[place.path].tolist())
        for batch, read in zip(batches, inputs, strict=True):
            assert not (batch.past + batch.longest) % PAST_TOKENS
            assert len(batch.trees) == 1 or not read.ids.shape[1] % TOKENS_STEP
        calls_made, trees_made = calls_made + len(batches), trees_made + len(rows)
    assert trees_made > 4 * calls_made


def test_company_takes_no_tree_beyond_what_leaves_no_trace_nor_back():
    """Alone and in others a tree sees at most so many places, or its batch has the shape that it has alone."""
    rng, most = seeded(65), 96
    mixed_calls = others = 0
    for _ in range(scale(300, 5000)):
        rows = [((slot, rng.randrange(70, 90)), [1] * rng.randint(1, 30)) for slot in range(rng.randint(1, 12))]
        batches, found = batches_of(rows, past_max=1 << 20, mixed_max=most, lengths=(16, 24))
        for row, place in zip(rows, found, strict=True):
            (alone,), _ = batches_of([row], past_max=1 << 20, mixed_max=most, lengths=(16, 24))
            batch = batches[place.batch]
            if alone.past + alone.longest <= most:
                assert most == batch.past + batch.longest == alone.past + alone.longest
                mixed_calls += len({len(tree.tokens) for tree in batch.trees}) > 1
            else:
                assert (alone.past, alone.longest, True) == (batch.past, batch.longest, batch.padded)
                others += len(batch.trees) > 1
    assert min(mixed_calls, others) > 100


def test_trees_on_either_side_of_the_limit_do_not_part_each_other():
    rows = [((slot, 40 + slot % 2 * 60), [1] * (9 + slot % 4)) for slot in range(8)]
    batches, _ = batches_of(rows, past_max=1 << 20, mixed_max=64)
    assert [4, 4] == [len(batch.trees) for batch in batches]


def test_a_line_alone_takes_a_length_that_is_prepared():
    def longest(tokens: int, *, mixed_max: float = inf) -> int:
        (batch,), _ = batches_of([((0, 5), [1] * tokens)], past_max=1, mixed_max=mixed_max, lengths=(24, 64, 68))
        return batch.longest

    assert [8, 24, 24, 32, 64, 64, 68, 72] == [longest(tokens) for tokens in (5, 8, 24, 25, 49, 64, 65, 69)]
    assert [1, 8, 24, 32, 56] == [longest(tokens, mixed_max=0) for tokens in (1, 8, 24, 25, 49)]
    assert [8, 24, 56, 56] == [longest(tokens, mixed_max=64) for tokens in (5, 8, 49, 56)]


@pytest.mark.parametrize("mixed_max", [0, inf])
def test_a_call_grows_no_larger_than_it_may(mixed_max: float):
    batches, found = batches_of([((slot, 500), [1] * 100) for slot in range(9)], past_max=8192, mixed_max=mixed_max)
    sizes = [5, 4] if mixed_max else [4, 4, 1]
    assert sizes == [len(batch.trees) for batch in batches]
    assert [(n, line) for n, size in enumerate(sizes) for line in range(size)] == sorted(
        (place.batch, place.padded_row) for place in found
    )
    batches, _ = batches_of([((slot, 1990), [1]) for slot in range(9)], past_max=8192, mixed_max=mixed_max)
    assert [4, 4, 1] == [len(batch.trees) for batch in batches]
    (whole,), _ = batches_of([((0, 0), [1] * 700)], past_max=1, mixed_max=mixed_max)
    assert 704 == whole.longest
    batches, _ = batches_of(
        [((0, 0), [1] * 500), *(((slot, 0), [1]) for slot in range(1, 9))], past_max=1 << 20, mixed_max=mixed_max
    )
    assert all(len(batch.trees) * batch.longest <= PADDED_TOKENS_MAX for batch in batches)
