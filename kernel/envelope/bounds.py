"""Exact sets of integers in minor units: `{ n : lo <= n <= hi, n = residue (mod step) }`.

The residue is absolute, not relative to `lo`: raising `lo` can then only remove values, never shift the others
into range. Every `Bound` is normalised, so two bounds hold the same values exactly when they are equal.
No value here is ever a float.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import gcd

SCALE_MAX = 6
MAGNITUDE_MAX = 10**15
_LITERAL = re.compile(r"(-?)(0|[1-9][0-9]{0,15})(?:\.([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class Bound:
    """A normalised, non-empty set of integers; `scale` is the number of decimals its literals show.

    Build one with `bound()`: the constructor does not normalise.
    """

    lo: int
    hi: int
    step: int
    residue: int
    scale: int

    def __contains__(self, value: object) -> bool:
        return type(value) is int and self.lo <= value <= self.hi and value % self.step == self.residue

    def __len__(self) -> int:
        return (self.hi - self.lo) // self.step + 1


def bound(lo: int, hi: int, *, step: int = 1, residue: int = 0, scale: int = 0) -> Bound | None:
    """Return the normalised bound, or None when it holds no value.

    `lo`, `hi`, `step`, `residue` are minor units (cents at scale 2). Raises ValueError outside the limits.
    """
    if not 0 <= scale <= SCALE_MAX:
        raise ValueError(f"scale `{scale}` is not between 0 and {SCALE_MAX}")
    if step < 1 or step > MAGNITUDE_MAX:
        raise ValueError(f"step `{step}` is not between 1 and {MAGNITUDE_MAX}")
    lo, hi = within_limits(lo), within_limits(hi)
    residue %= step
    lo += (residue - lo) % step
    hi -= (hi - residue) % step
    if lo > hi:
        return None
    if lo == hi:
        step, residue = 1, 0
    return Bound(lo, hi, step, residue, scale)


def within_limits(value: int) -> int:
    """Return `value`. Raises ValueError when it is larger, in either direction, than any amount may be."""
    if not -MAGNITUDE_MAX <= value <= MAGNITUDE_MAX:
        raise ValueError(f"`{value}` is beyond {MAGNITUDE_MAX}")
    return value


def meet(a: Bound, b: Bound) -> Bound | None:
    """Return the intersection of two bounds, or None when it is empty or their scales differ."""
    if a.scale != b.scale:
        return None
    common = gcd(a.step, b.step)
    if (a.residue - b.residue) % common:
        return None
    step = a.step // common * b.step
    turns = (b.residue - a.residue) // common * pow(a.step // common, -1, b.step // common) % (b.step // common)
    residue = (a.residue + a.step * turns) % step
    lo, hi = max(a.lo, b.lo), min(a.hi, b.hi)
    lo += (residue - lo) % step
    hi -= (hi - residue) % step
    if lo > hi:
        return None
    return Bound(lo, hi, 1, 0, a.scale) if lo == hi else Bound(lo, hi, step, residue, a.scale)


def parse_literal(text: str, scale: int) -> int | None:
    """Return the minor units a decimal literal denotes, or None when it is not in the one accepted form.

    Exactly `scale` decimals, no leading zero, no plus sign, no exponent, no negative zero.
    """
    found = _LITERAL.fullmatch(text)
    if found is None:
        return None
    sign, whole, decimals = found.groups(default="")
    if len(decimals) != scale:
        return None
    value = int(whole + decimals)
    if sign:
        return -value if value else None
    return value


def format_literal(value: int, scale: int) -> str:
    """Return the one accepted literal of `value` minor units: `format_literal(15000, 2) == "150.00"`."""
    sign, digits = ("-" if value < 0 else ""), str(abs(value)).rjust(scale + 1, "0")
    return f"{sign}{digits[:-scale]}.{digits[-scale:]}" if scale else f"{sign}{digits}"
