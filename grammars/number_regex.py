"""The exact regular expression for the literals of a bound, derived from their digits.

It is written apart from the kernel's arithmetic on purpose: it is the second implementation of the same set, and a test
keeps the two equal. The result uses only literals, classes, counted repetition and groups, so Python `re`, Rust
`regex`, llguidance and outlines-core all read it alike.

A literal is a sign and a string of digits with the point at a fixed place. For each length the digits form a block. A
block is cut at a digit where the range or the remainder branches:

- a block between two ends consists of the two edges and the free digits between them;
- a free block has no ends, only a remainder: the strings of `k` digits with `value = rest (mod step)`. Where the step
  divides `10**j`, only the last `j` digits matter. Otherwise it is cut in the middle, and each remainder of the upper half
  goes with the one remainder of the lower half that completes it: about `10**(k/2)` pieces at worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd

from sds.kernel.envelope.envelope import Bound
from sds.kernel.errors import LanguageError

REGEX_CHARS_MAX = 65_536


def number_regex(bound: Bound) -> str:
    """Return the expression that matches the literals of exactly the integers of `bound`.

    Raises LanguageError when it would be longer than REGEX_CHARS_MAX, or match nothing.
    """
    blocks = _Blocks(bound.scale, bound.step)
    parts: list[str] = []
    if bound.lo < 0:
        magnitudes = _either(blocks.lengths(max(1, -bound.hi), -bound.lo, -bound.residue))
        parts.append(magnitudes and f"-{magnitudes}")
    if bound.hi >= 0:
        parts += blocks.lengths(max(0, bound.lo), bound.hi, bound.residue)
    regex = _either(parts)
    if not regex:
        raise LanguageError("the bounds of a number contain no value", reason_code="LANGUAGE_EMPTY")
    return regex


class _Blocks:
    """Expressions for blocks of `k` digits whose value is `rest` modulo a step; "" is the empty set.

    `below`: the number of digits after a block in the whole number, on either side of the point.
    """

    def __init__(self, scale: int, step: int) -> None:
        self._scale = scale
        self._step = step
        self._known: dict[tuple[int, int, int, int], str] = {}

    def lengths(self, lo: int, hi: int, rest: int) -> Iterator[str]:
        """Yield one expression for each number of digits in `lo..hi`, which is not negative."""
        shortest = self._scale + 1
        for k in range(max(shortest, len(str(lo))), max(shortest, len(str(hi))) + 1):
            first = 10 ** (k - 1) if k > shortest else 0
            yield self._between(k, max(lo, first), min(hi, 10**k - 1), rest % self._step)

    def _between(self, k: int, lo: int, hi: int, rest: int) -> str:
        """Return an expression for the last `k` digits of a number, where these must lie in `lo..hi`."""
        unit = 10 ** (k - 1)
        if lo == 0 and hi == 10 * unit - 1:
            return self._free(k, 0, rest, self._step)
        if k == 1:
            return _digit(d for d in range(lo, hi + 1) if d % self._step == rest)
        (low, low_rest), (high, high_rest) = divmod(lo, unit), divmod(hi, unit)
        if low == high:
            return self._edge(low, k, low_rest, high_rest, rest)
        whole_low, whole_high = low_rest == 0, high_rest == unit - 1
        first = "" if whole_low else self._edge(low, k, low_rest, unit - 1, rest)
        last = "" if whole_high else self._edge(high, k, 0, high_rest, rest)
        inner = range(low if whole_low else low + 1, high + 1 if whole_high else high)
        return _either([first, *self._inner(inner, k, rest), last])

    def _edge(self, digit: int, k: int, lo: int, hi: int, rest: int) -> str:
        tail = self._between(k - 1, lo, hi, (rest - digit * 10 ** (k - 1)) % self._step)
        return self._joined(str(digit), tail, k - 1)

    def _inner(self, digits: range, k: int, rest: int) -> Iterator[str]:
        """Yield the blocks that begin with one of `digits`. Digits that leave the same remainder share a block."""
        shared: dict[int, list[int]] = {}
        for digit in digits:
            shared.setdefault((rest - digit * 10 ** (k - 1)) % self._step, []).append(digit)
        for left, alike in shared.items():
            yield self._joined(_digit(alike), self._free(k - 1, 0, left, self._step), k - 1)

    def _free(self, k: int, below: int, rest: int, step: int) -> str:
        """Return an expression for all strings of `k` digits with value = rest (mod step)."""
        if step == 1:
            return self._any(k, below)
        if rest >= 10**k:
            return ""
        if k == 1:
            return _digit(range(rest, 10, step))
        key = (k, below, rest, step)
        if key not in self._known:
            self._known[key] = self._cut(k, below, rest, step)
        return self._known[key]

    def _cut(self, k: int, below: int, rest: int, step: int) -> str:
        settled = next((j for j in range(1, k) if 10**j % step == 0), 0)
        if settled:
            tail = self._free(settled, below, rest, step)
            return self._joined(self._any(k - settled, below + settled), tail, below + settled)
        low = k // 2
        upper_unit = 10**low
        upper_step = step // gcd(step, upper_unit)
        classes = min(upper_step, 10 ** (k - low))
        if (10**k - 1 - rest) // step < classes:
            return self._listed(k, below, range(rest, 10**k, step))
        if classes > REGEX_CHARS_MAX:
            raise _too_long()
        parts: list[str] = []
        size = 0
        for upper in range(classes):
            lower = self._free(low, below, (rest - upper * upper_unit) % step, step)
            part = lower and self._joined(self._free(k - low, below + low, upper, upper_step), lower, below + low)
            size += len(part)
            if size > REGEX_CHARS_MAX:
                raise _too_long()
            parts.append(part)
        return _either(parts)

    def _listed(self, k: int, below: int, values: range) -> str:
        if len(values) * k > REGEX_CHARS_MAX:
            raise _too_long()
        point = self._scale - below
        texts = (str(value).rjust(k, "0") for value in values)
        return _either(rf"{t[:-point]}\.{t[-point:]}" if 0 < point < k else t for t in texts)

    def _any(self, k: int, below: int) -> str:
        point = self._scale - below
        return rf"{_run(k - point)}\.{_run(point)}" if 0 < point < k else _run(k)

    def _joined(self, upper: str, lower: str, place: int) -> str:
        """Join two neighbouring blocks. `place`: the digits of the lower one and below; the point may stand between them."""
        if not upper or not lower:
            return ""
        return rf"{upper}\.{lower}" if place == self._scale else upper + lower


def _either(blocks: Iterable[str]) -> str:
    parts = [block for block in blocks if block]
    regex = parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})" if parts else ""
    if len(regex) > REGEX_CHARS_MAX:
        raise _too_long()
    return regex


def _digit(digits: Iterable[int]) -> str:
    chosen = sorted(digits)
    if len(chosen) < 2:
        return "".join(map(str, chosen))
    if chosen[-1] - chosen[0] == len(chosen) - 1:
        return f"[{chosen[0]}-{chosen[-1]}]"
    return f"[{''.join(map(str, chosen))}]"


def _run(k: int) -> str:
    return "[0-9]" if k == 1 else f"[0-9]{{{k}}}"


def _too_long() -> LanguageError:
    return LanguageError(f"the numbers need an expression of more than {REGEX_CHARS_MAX} characters")
