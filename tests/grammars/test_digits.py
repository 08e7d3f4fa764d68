"""Which characters may follow the beginning of a number, against plain arithmetic and brute force."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sds.grammars.tokens.digits import START, DigitMatcher, DigitPrefix, every_literal
from sds.kernel.envelope.envelope import Bound, bound
from tests.grammars.test_number_regex import holds, probes, written
from tests.samples import BENT_NUMBERS
from tests.scale import scale, seeded
from tests.strategies import random_bound

LOWEST, HIGHEST, WIDTH_MAX = -23, 23, 26


def small_bounds() -> Iterator[Bound]:
    for lo in range(LOWEST, HIGHEST):
        for width in range(0, WIDTH_MAX, scale(3, 1)):
            for step in (1, 2, 3, 7, 10):
                allowed = bound(lo, lo + width, step=step, residue=lo * lo % step, scale=width % 3)
                if allowed is not None:
                    yield allowed


def everything(literals: DigitMatcher, size: int, at: DigitPrefix = START, text: str = "") -> Iterator[tuple[str, ...]]:
    """Yield every literal as the runs it can be written in."""
    if literals.ends(at):
        yield (text,) if text else ()
    for run, after in literals.chunks(at, size):
        yield from ((run, *rest) for rest in everything(literals, size, after))
    pointed = literals.after(at, ".")
    if pointed is not None:
        yield from ((".", *rest) for rest in everything(literals, size, pointed))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_small_bound_is_spelled_exactly_and_each_literal_in_one_way(size: int) -> None:
    for allowed in small_bounds():
        spelled = [*everything(DigitMatcher(allowed, negative=False), size)]
        spelled += [("-", *runs) for runs in everything(DigitMatcher(allowed, negative=True), size)]
        expected = [written(v, allowed.scale) for v in range(allowed.lo, allowed.hi + 1) if holds(allowed, v)]
        assert sorted(expected) == sorted("".join(runs) for runs in spelled), allowed
        assert tuple(expected) == every_literal(allowed)


@pytest.mark.parametrize("size", [2, 3])
def test_a_run_is_whole_unless_the_point_or_the_end_follows(size: int) -> None:
    for allowed in small_bounds():
        for runs in everything(DigitMatcher(allowed, negative=False), size):
            for run, then in zip(runs, (*runs[1:], "."), strict=True):
                assert run == "." or len(run) == size or then == ".", (allowed, runs)


def permits(allowed: Bound, text: str) -> bool:
    """Tell whether a text is written character by character, none refused, and may end."""
    negative = text.startswith("-")
    literals, at = DigitMatcher(allowed, negative=negative), START
    for char in text[negative:]:
        after = literals.after(at, char) if char in "0123456789." else None
        if after is None:
            return False
        at = after
    return literals.ends(at)


def test_wide_bounds_are_judged_as_arithmetic_does() -> None:
    rng, asked, members = seeded(20260801), 0, 0
    while asked < scale(30_000, 2_000_000):
        allowed = random_bound(rng.randint)
        for value in probes(rng, allowed):
            asked += 1
            members += holds(allowed, value)
            assert holds(allowed, value) == permits(allowed, written(value, allowed.scale)), (allowed, value)
        bent = {*BENT_NUMBERS, "-" + written(0, allowed.scale), "0" + written(allowed.hi, allowed.scale)}
        wrong = {text for text in bent if permits(allowed, text)}
        assert wrong <= {written(int(text), 0) for text in wrong if allowed.scale == 0 and not text.startswith("0")}
    assert members > asked // 4


def test_no_beginning_leads_nowhere() -> None:
    rng = seeded(20260802)
    for _ in range(scale(2_000, 100_000)):
        allowed = random_bound(rng.randint)
        negative = allowed.hi < 0 or (allowed.lo < 0 and bool(rng.randrange(2)))
        literals, at, text = DigitMatcher(allowed, negative=negative), START, ""
        while True:
            ways = [("", at)] if literals.ends(at) else []
            ways += [(c, after) for c in "0123456789." if (after := literals.after(at, c)) is not None]
            assert ways, (allowed, text)
            char, at = rng.choice(ways)
            if not char:
                break
            text += char
        assert holds(allowed, int(text.replace(".", "")) * (-1 if negative else 1)), (allowed, text)
