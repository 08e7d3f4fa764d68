"""Sections of prompts that were read before, as a backend keeps them: bounded by bytes, the least recently used go first.

What a section comes to depends on the sections before it and on nothing else, so all of them together are its key. It
does not know what a kept section is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

KEPT_BYTES_MAX = 256 << 20

T = TypeVar("T")
Sections = tuple[tuple[int, ...], ...]


class PrefixCache(Generic[T]):
    """What each section came to, behind those before it."""

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_max, self._bytes = bytes_max, 0
        self._kept: dict[Sections, tuple[T, int]] = {}  # in the order of their use

    def get(self, sections: Sequence[tuple[int, ...]]) -> T | None:
        """Return what the last of these came to, as used just now; None: it is not kept."""
        found = self._kept.pop(key := tuple(sections), None)
        if found is None:
            return None
        self._kept[key] = found
        return found[0]

    def use(self, sections: Sequence[tuple[int, ...]]) -> None:
        """Note that all of these were used just now: who holds them already need not get them."""
        for n in range(len(sections)):
            self.get(sections[: n + 1])

    def put(self, sections: Sequence[tuple[int, ...]], made: T, size: int) -> None:
        """Keep what the last of these came to, `size` bytes, where there is room for it at all."""
        _, before = self._kept.pop(key := tuple(sections), (None, 0))
        self._bytes -= before
        if size > self._bytes_max:
            return
        self._kept[key] = made, size
        self._bytes += size
        while self._bytes > self._bytes_max:
            _, freed = self._kept.pop(next(iter(self._kept)))
            self._bytes -= freed

    def holds(self, sections: Sequence[tuple[int, ...]], behind: int = 0) -> bool:
        """Tell whether all of these are kept, but for the first `behind`, and for those without a token."""
        return all(tuple(sections[: n + 1]) in self._kept for n in range(behind, len(sections)) if sections[n])
