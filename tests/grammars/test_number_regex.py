"""The number expression against integer arithmetic: no false accept, no false reject."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given

from sds.grammars.number_regex import REGEX_CHARS_MAX, number_regex
from sds.kernel.envelope.envelope import MAGNITUDE_MAX, Bound, bound
from sds.kernel.errors import LanguageError
from tests.grammars.byte_matcher import ByteMatcher
from tests.samples import BENT_NUMBERS, values_near
from tests.scale import scale, seeded
from tests.strategies import bounds, random_bound

VALUES_EACH = 60
SMALL = (
    bound(0, 0),
    bound(-3, 3),
    bound(-1, 0, scale=1),
    bound(1, 130, step=7, residue=3),
    bound(-250, 250, step=25, scale=2),
    bound(95, 1105, step=15, residue=10, scale=2),
    bound(-999, 1001, step=500, residue=1, scale=3),
    bound(99_990, 100_010, scale=6),
    bound(0, 1200, step=40, scale=1),
    bound(-10_000, 0, step=999, residue=998),
)


def written(value: int, decimals: int) -> str:
    """Write minor units with plain arithmetic, not with the kernel's function."""
    whole, part = divmod(abs(value), 10**decimals)
    point = "." + f"{part:0{decimals}d}" if decimals else ""
    return ("-" if value < 0 else "") + str(whole) + point


def holds(allowed: Bound, value: int) -> bool:
    return allowed.lo <= value <= allowed.hi and (value - allowed.residue) % allowed.step == 0


def probes(rng: Random, allowed: Bound) -> set[int]:
    ends = {end + by for end in (allowed.lo, allowed.hi) for by in (-allowed.step, -1, 0, 1, allowed.step)}
    return ends | {values_near(rng, allowed) for _ in range(VALUES_EACH)} | {0}


def test_exactly_the_integers_of_the_bound_match() -> None:
    rng, asked, members = seeded(20260701), 0, 0
    while asked < scale(40_000, 2_000_000):
        allowed = random_bound(rng.randint)
        matches = re.compile(number_regex(allowed)).fullmatch
        for value in probes(rng, allowed):
            asked += 1
            members += holds(allowed, value)
            assert holds(allowed, value) == bool(matches(written(value, allowed.scale))), (allowed, value)
    assert members > asked // 4


def test_every_integer_around_a_small_bound_is_judged_right() -> None:
    rng, asked = seeded(20260702), 0
    while asked < scale(60_000, 2_000_000):
        lo, step = rng.randint(-1500, 1500), rng.randint(1, 60)
        allowed = bound(lo, lo + rng.randint(0, 1200), step=step, residue=rng.randint(0, 60), scale=rng.randint(0, 4))
        if allowed is None:
            continue
        matches = re.compile(number_regex(allowed)).fullmatch
        expected = {v for v in range(lo - 50, lo + 1300) if holds(allowed, v)}
        assert expected == {v for v in range(lo - 50, lo + 1300) if matches(written(v, allowed.scale))}, allowed
        asked += 1350


@given(bounds())
def test_malformed_literals_never_match(allowed: Bound) -> None:
    matches = re.compile(number_regex(allowed)).fullmatch
    exact = written(allowed.hi, allowed.scale)
    plain = {*BENT_NUMBERS, "-" + written(0, allowed.scale)}
    bent = {"0" + exact, "+" + exact, exact + " ", " " + exact, exact + "\n", exact + "e0", exact + "."}
    decimals = {written(allowed.hi * 10**more, allowed.scale + more) for more in (1, 2)}
    assert [text for text in plain | bent | decimals if matches(text)] == []


@pytest.mark.parametrize("allowed", SMALL)
def test_the_compiled_mask_permits_exactly_the_literals_of_a_small_bound(allowed: Bound) -> None:
    expected = {written(v, allowed.scale).encode() for v in range(allowed.lo, allowed.hi + 1) if holds(allowed, v)}
    assert expected == ByteMatcher(f"start: /{number_regex(allowed)}/").everything()


def test_the_compiled_mask_judges_random_bounds_as_arithmetic_does() -> None:
    rng, asked = seeded(20260703), 0
    while asked < scale(5_000, 100_000):
        allowed = random_bound(rng.randint)
        matcher = ByteMatcher(f"start: /{number_regex(allowed)}/")
        for value in probes(rng, allowed):
            asked += 1
            literal = written(value, allowed.scale).encode()
            assert holds(allowed, value) == matcher.accepts(literal), (allowed, value)
        for text in (*BENT_NUMBERS, f"0{written(allowed.hi, allowed.scale)}"):
            assert bool(re.fullmatch(number_regex(allowed), text)) == matcher.accepts(text.encode()), (allowed, text)


@pytest.mark.parametrize(
    ("lo", "hi", "step"),
    [(0, MAGNITUDE_MAX, 7), (-MAGNITUDE_MAX, MAGNITUDE_MAX, 999_983), (3, 10**13, 9973), (0, MAGNITUDE_MAX, 10**9 + 7)],
)
def test_a_bound_that_needs_too_long_an_expression_is_refused(lo: int, hi: int, step: int) -> None:
    allowed = bound(lo, hi, step=step)
    assert allowed is not None
    with pytest.raises(LanguageError, match=f"more than {REGEX_CHARS_MAX} characters") as refused:
        number_regex(allowed)
    assert refused.value.reason_code == "LANGUAGE_TOO_LARGE"


def test_a_bound_without_values_has_no_expression() -> None:
    with pytest.raises(LanguageError, match="the bounds of a number contain no value"):
        number_regex(Bound(3, 4, 10, 7, 0))


@pytest.mark.parametrize(
    ("lo", "hi", "step", "chars_max"),
    [
        (1, 15_000, 1, 110),
        (10, 150, 5, 40),
        (0, MAGNITUDE_MAX, 25, 700),
        (0, 9999, 7, 3100),
        (0, 2 * 10**9, 60, 19_000),
    ],
)
def test_expressions_stay_short(lo: int, hi: int, step: int, chars_max: int) -> None:
    allowed = bound(lo, hi, step=step, scale=2 if step == 1 else 0)
    assert allowed is not None
    assert chars_max > len(number_regex(allowed))
