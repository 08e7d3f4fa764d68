"""The prefix cache of a backend: kv_blocks of sections that were read before, bounded by bytes, least recently used go first.

A section's keys and values depend on the sections before it and on nothing else, so all of them together are its key. It
does not know what a kv_block is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

PREFIX_BYTES_MAX = 256 << 20

T = TypeVar("T")
Sections = tuple[tuple[int, ...], ...]


class PrefixCache(Generic[T]):
    """The kv_block of the last of some sections, by all of them."""

    def __init__(self, bytes_max: int = PREFIX_BYTES_MAX) -> None:
        self._bytes_max, self._bytes = bytes_max, 0
        self._entries: dict[Sections, tuple[T, int]] = {}  # in the order of their use

    def get(self, sections: Sequence[tuple[int, ...]]) -> T | None:
        """Return the kv_block of the last of these, now the most recently used; None: it is not held."""
        entry = self._entries.pop(key := tuple(sections), None)
        if entry is None:
            return None
        self._entries[key] = entry
        return entry[0]

    def touch(self, sections: Sequence[tuple[int, ...]]) -> None:
        """Note a use of each of these, which somebody holds already and need not get."""
        for n in range(len(sections)):
            self.get(sections[: n + 1])

    def put(self, sections: Sequence[tuple[int, ...]], kv_block: T, size: int) -> None:
        """Hold the kv_block of the last of these, `size` bytes; one larger than the whole cache is not held."""
        _, before = self._entries.pop(key := tuple(sections), (None, 0))
        self._bytes -= before
        if size > self._bytes_max:
            return
        self._entries[key] = kv_block, size
        self._bytes += size
        while self._bytes > self._bytes_max:
            _, freed = self._entries.pop(next(iter(self._entries)))
            self._bytes -= freed

    def holds(self, sections: Sequence[tuple[int, ...]], behind: int = 0) -> bool:
        """Tell whether all of these are held, but for the first `behind` and those without a token."""
        return all(tuple(sections[: n + 1]) in self._entries for n in range(behind, len(sections)) if sections[n])
