"""The characters that may follow the beginning of a number: integer arithmetic on its bound, without expression or table.

A literal is read as its digits, without sign and point: `1.5` of `1.50` is 15 with one digit to come, so it leads to
the values 150..159. Before the point the number of digits to come is unknown, so every length is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sds.kernel.envelope.envelope import Bound, format_literal

DIGITS = "0123456789"
_TENS: tuple[int, ...] = tuple(10**n for n in range(24))


class DigitPrefix(NamedTuple):
    """The written part of a literal: its digits as one integer, how many are before the point, and how many after it
    (-1: no point yet).
    """

    digits: int = 0
    whole: int = 0
    decimals: int = -1
    closed: bool = False  # its last run is shorter than the tokenizer's, so no digit follows


START = DigitPrefix()


class DigitMatcher:
    """The literals of a bound that have one sign, without the sign."""

    __slots__ = ("_hi", "_lo", "_residue", "_scale", "_step")

    def __init__(self, allowed: Bound, *, negative: bool) -> None:
        if negative:
            self._lo, self._hi, self._residue = max(1, -allowed.hi), -allowed.lo, -allowed.residue % allowed.step
        else:
            self._lo, self._hi, self._residue = max(0, allowed.lo), allowed.hi, allowed.residue
        self._step, self._scale = allowed.step, allowed.scale

    def after(self, prefix: DigitPrefix, char: str) -> DigitPrefix | None:
        """Return the prefix with one digit or the point more; None where no value of the bound begins so."""
        digits, whole, decimals, _ = prefix
        if char == ".":
            pointed = DigitPrefix(digits, whole, 0)
            return pointed if decimals < 0 < whole and self._scale and self._reaches(digits, self._scale) else None
        digits = digits * 10 + ord(char) - 48
        if decimals >= 0:
            left = self._scale - decimals - 1
            return DigitPrefix(digits, whole, decimals + 1) if left >= 0 and self._reaches(digits, left) else None
        if whole and digits < 10:  # a leading zero
            return None
        return DigitPrefix(digits, whole + 1, -1) if self._grows(digits) else None

    def ends(self, prefix: DigitPrefix) -> bool:
        """Return whether the prefix is a value of the bound."""
        if self._scale:
            return prefix.decimals == self._scale
        return bool(prefix.whole) and self._reaches(prefix.digits, 0)

    def chunks(self, prefix: DigitPrefix, size: int) -> Iterator[tuple[str, DigitPrefix]]:
        """Yield the runs of `size` digits that may come next, and shorter ones that the point or the end may follow."""
        for char in "" if prefix.closed else DIGITS:
            after = self.after(prefix, char)
            if after is None:
                continue
            if size == 1:
                yield char, after
            else:
                if self.ends(after) or self.after(after, ".") is not None:
                    yield char, after._replace(closed=True)
                for more, last in self.chunks(after, size - 1):
                    yield char + more, last

    def _grows(self, digits: int) -> bool:
        if not digits:
            return self._reaches(0, self._scale)
        for left in range(self._scale, len(_TENS)):
            if digits * _TENS[left] > self._hi:
                return False
            if self._reaches(digits, left):
                return True
        return False

    def _reaches(self, digits: int, left: int) -> bool:
        """Return whether some value begins with these digits and has `left` more."""
        lo, hi = digits * _TENS[left], (digits + 1) * _TENS[left] - 1
        lo, hi = max(lo, self._lo), min(hi, self._hi)
        return lo + (self._residue - lo) % self._step <= hi


def every_literal(allowed: Bound) -> tuple[str, ...]:
    """Return the literals of a bound in the order of their values."""
    first = allowed.lo + (allowed.residue - allowed.lo) % allowed.step
    return tuple(format_literal(value, allowed.scale) for value in range(first, allowed.hi + 1, allowed.step))
