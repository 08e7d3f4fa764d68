"""Random bounds and envelopes, for Hypothesis, which shrinks them, and for seeded tests.

Both draw by a `Pick(lo, hi)`: `random.Random(seed).randint`, or Hypothesis's integers. Every bound has a language within
the limits: one whose step has other factors than two and five has few values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

from sds.kernel.envelope.envelope import (
    DENY,
    MAGNITUDE_MAX,
    SCALE_MAX,
    Bound,
    DecisionEnvelope,
    KindBound,
    bound,
    envelope_of,
)

Pick = Callable[[int, int], int]
T = TypeVar("T")

# Some names begin others: the hard case for a grammar.
KINDS = ("COMPENSATE", "HOLD", "PAY", "PAY_LATER", "REFUND_TICKET", "VOUCHER")
REASONS = ("A", "A0", "CREW", "GOODWILL", "HUMAN_REVIEW", "WEATHER", "WEATHER_SEVERE")
PARAMS = ("amount", "amount_extra", "days", "x")
ROUND_STEPS = (1, 1, 2, 5, 10, 16, 25, 50, 100, 125, 500, 1000, 10**6)
ODD_STEP_MAX = 5000
ODD_VALUES_MAX = 100


def random_bound(pick: Pick, scale: int | None = None) -> Bound:
    """Draw a bound of any sign, scale, size and number of values."""
    size = 10 ** pick(0, 15)
    at = pick(-size, size)
    if pick(0, 2):
        step, width = one_of(pick, ROUND_STEPS), pick(0, 10 ** pick(0, 15))
    else:
        step = pick(1, ODD_STEP_MAX)
        width = step * pick(0, ODD_VALUES_MAX)
    hi = min(at + width, MAGNITUDE_MAX)
    scale = pick(0, SCALE_MAX) if scale is None else scale
    residue = pick(0, step - 1) if pick(0, 1) else 0
    return bound(at, hi, step=step, residue=residue, scale=scale) or Bound(at, at, 1, 0, scale)


def random_kind(pick: Pick, name: str) -> KindBound:
    params = tuple((param, random_bound(pick)) for param in some_of(pick, PARAMS))
    fills = (("fixed", pick(0, 10**6), 2),) if not pick(0, 3) else ()
    reasons = some_of(pick, REASONS) or (one_of(pick, REASONS),)
    return KindBound(name, reasons, params, fills)


def random_envelope(pick: Pick) -> DecisionEnvelope:
    """Draw an envelope: one in eight has no refusal (the bottom), one in eight BLOCK for it, one in three a rationale."""
    kinds = [random_kind(pick, name) for name in some_of(pick, KINDS)]
    named = pick(0, 7)
    refusal = "BLOCK" if named == 7 else DENY
    if named:
        kinds.append(KindBound(refusal, some_of(pick, REASONS) or ("CREW",)))
    return envelope_of(kinds, 0 if pick(0, 2) else pick(1, 60), refusal=refusal)


def one_of(pick: Pick, items: Sequence[T]) -> T:
    return items[pick(0, len(items) - 1)]


def some_of(pick: Pick, items: Sequence[T]) -> tuple[T, ...]:
    """Draw a subset of items, in their order."""
    return tuple(item for item in items if pick(0, 1))


@st.composite
def bounds(draw: st.DrawFn, scale: int | None = None) -> Bound:
    return random_bound(lambda lo, hi: draw(st.integers(lo, hi)), scale)


@st.composite
def envelopes(draw: st.DrawFn) -> DecisionEnvelope:
    return random_envelope(lambda lo, hi: draw(st.integers(lo, hi)))
