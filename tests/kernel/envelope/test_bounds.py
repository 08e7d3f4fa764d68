"""Bounds are exact sets of integers, equal when they hold the same values."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sds.kernel.envelope.envelope import (
    MAGNITUDE_MAX,
    SCALE_MAX,
    Bound,
    bound,
    format_literal,
    meet_bounds,
    parse_literal,
)
from tests.scale import scale, seeded
from tests.strategies import bounds

SMALL = range(-6, 7)


def values(allowed: Bound | None) -> frozenset[int]:
    return frozenset() if allowed is None else frozenset(range(allowed.lo, allowed.hi + 1, allowed.step))


def small_bounds() -> dict[tuple[int, int, int, int], Bound | None]:
    """Every way to write a bound over a few integers."""
    return {
        (lo, hi, step, residue): bound(lo, hi, step=step, residue=residue)
        for lo, hi, step in product(SMALL, SMALL, range(1, 7))
        for residue in range(step)
    }


def test_a_bound_holds_exactly_the_integers_of_its_definition():
    for (lo, hi, step, residue), found in small_bounds().items():
        expected = {n for n in SMALL if lo <= n <= hi and n % step == residue}
        assert expected == values(found)
        assert expected == {n for n in range(-20, 21) if found is not None and n in found}
        assert len(expected) == (len(found) if found else 0)


def test_two_bounds_are_equal_exactly_when_they_hold_the_same_values():
    by_values: dict[frozenset[int], set[Bound | None]] = {}
    for found in small_bounds().values():
        by_values.setdefault(values(found), set()).add(found)
    assert {1} == {len(ways) for ways in by_values.values()}
    assert len(by_values) == len({way for ways in by_values.values() for way in ways})


def test_the_meet_of_two_bounds_is_the_intersection_of_their_values():
    rng, ways = seeded(1), sorted({b for b in small_bounds().values() if b}, key=repr)
    for _ in range(scale(20_000, 200_000)):
        a, b = rng.choice(ways), rng.choice(ways)
        both = meet_bounds(a, b)
        assert values(a) & values(b) == values(both)
        assert both is None or both == bound(both.lo, both.hi, step=both.step, residue=both.residue)


@given(bounds(scale=2), bounds(scale=2), st.data())
def test_the_meet_of_large_bounds_holds_a_value_exactly_when_both_do(a: Bound, b: Bound, data: st.DataObject):
    both = meet_bounds(a, b)
    assert both == meet_bounds(b, a)
    side = data.draw(st.sampled_from([a, b] if both is None else [a, b, both]))
    value = side.lo + side.step * data.draw(st.integers(0, (side.hi - side.lo) // side.step))
    assert (value in a and value in b) == (both is not None and value in both)


def test_bounds_of_different_scales_have_nothing_in_common():
    assert meet_bounds(Bound(1, 5, 1, 0, 0), Bound(1, 5, 1, 0, 2)) is None


def test_steps_are_counted_from_zero_and_not_from_the_lower_end():
    assert Bound(15, 30, 5, 0, 0) == bound(12, 34, step=5)


@pytest.mark.parametrize(
    ("lo", "hi", "step", "scale", "message"),
    [
        (0, 1, 1, SCALE_MAX + 1, "scale `7` is not between 0 and 6"),
        (0, 1, 1, -1, "scale `-1` is not between 0 and 6"),
        (0, 1, 0, 0, "step `0` is not between 1 and 1000000000000000"),
        (0, MAGNITUDE_MAX + 1, 1, 0, "`1000000000000001` is beyond 1000000000000000"),
        (-MAGNITUDE_MAX - 1, 0, 1, 0, "`-1000000000000001` is beyond 1000000000000000"),
    ],
)
def test_a_bound_beyond_the_limits_is_an_error(lo: int, hi: int, step: int, scale: int, message: str):
    with pytest.raises(ValueError) as caught:
        bound(lo, hi, step=step, scale=scale)
    assert message == str(caught.value)


@pytest.mark.parametrize("stranger", [True, False, 1.0, "1", None])
def test_a_bound_holds_integers_and_nothing_that_merely_equals_one(stranger: object):
    assert stranger not in Bound(0, 1, 1, 0, 0)


@given(st.integers(-MAGNITUDE_MAX, MAGNITUDE_MAX), st.integers(0, SCALE_MAX))
def test_a_value_has_one_literal_and_the_literal_one_value(value: int, decimals: int):
    assert value == parse_literal(format_literal(value, decimals), decimals)


@given(st.text(st.sampled_from("-+0123456789.eE_ "), max_size=8), st.integers(0, SCALE_MAX))
def test_no_other_text_is_read_as_a_value(text: str, decimals: int):
    value = parse_literal(text, decimals)
    assert value is None or format_literal(value, decimals) == text


@pytest.mark.parametrize(
    ("text", "decimals", "value"),
    [
        ("150.00", 2, 15000),
        ("-0.05", 2, -5),
        ("0", 0, 0),
        *((text, 0, None) for text in ("-0", "007", "+5", "1e2", "5.", "5\n", "\u0665", "NaN", "")),
        *((text, 2, None) for text in ("-0.00", "99.9", "150", "150.000", ".50")),
    ],
)
def test_literals_have_exactly_their_decimals_and_nothing_to_spare(text: str, decimals: int, value: int | None):
    assert value == parse_literal(text, decimals)
