"""Keys and values of every seat of a backend, in plain memory: a call is handed those of its rows."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sds.models.cache.token_tree import HELD_TOKENS, Call

PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
LINES_BYTES_MAX = 256 << 20  # what calls of several trees take besides, once such were made


class ArrayKVCache:
    """Keys and values of every seat, [2 x layers, context and a little more, cell]: memory committed when it is written.

    A fork reads what it has in common with its source from there (`_trunks`: which seat, how many tokens), and takes
    a copy only when it goes on by itself, or the source goes. What a call answered is noted, and copied only when the next
    one comes, which writes over it: most of it is forgotten before.
    """

    together = True

    def __init__(self, shape: tuple[int, int, int], kind: type[Any], seats: int) -> None:
        """`shape`: keys and values of all layers, tokens a seat holds, width of each; `kind`: of what, by its size."""
        planes, tokens, width = shape
        self._shape, self._kind = (planes, tokens + HELD_TOKENS, width), kind
        self._seats = {seat: self._empty() for seat in range(seats)}
        self._trunks: dict[int, tuple[int, int]] = {}
        self._ends: dict[int, int] = {}  # how far each was written
        self._noted: dict[int, list[tuple[int, NDArray[Any]]]] = {}  # what is not copied yet, and to what position
        self._lines = np.empty(0, kind)  # where those of several stand side by side during a call
        self.lines_held_max = LINES_BYTES_MAX // (planes * width * self._lines.itemsize)

    def cut(self, seat: int, position: int, _surplus: int) -> bool:
        """What lies beyond a prompt's end is masked, and need not be copied any more."""
        if seat in self._noted:
            self._noted[seat] = [(start, new) for start, new in self._noted[seat] if start < position]
        return True

    def taken(self, seat: int, start: int, end: int) -> tuple[NDArray[Any], int]:
        self._own(seat)
        self._settle(seat)
        stretch = self._seats[seat][:, start:end].copy()
        return stretch, stretch.nbytes

    def put(self, seat: int, start: int, stretch: NDArray[Any]) -> None:
        self._own(seat)
        self._settle(seat)
        self._keep(seat, start, stretch)

    def fork(self, source: int, target: int, tokens: int) -> None:
        if target not in self._seats:
            self._seats[target] = self._empty()
        self._trunks[target] = self.place(source, tokens)
        self._ends.pop(target, None)

    def forget(self, seat: int) -> None:
        """Let what was forked from this seat stand by itself: the last to do so takes its memory over."""
        self._trunks.pop(seat, None)
        if not any(source == seat for source, _ in self._trunks.values()):
            self._noted.pop(seat, None)
        self._settle(seat)
        *others, heir = [fork for fork, (source, _) in self._trunks.items() if source == seat] or [seat]
        for fork in others:
            self._own(fork)
        if heir != seat:
            _, start = self._trunks.pop(heir)
            mine, left = self._seats[heir], self._seats[seat]
            end = max(start, self._ends.get(heir, start))
            left[:, start:end] = mine[:, start:end]
            self._seats[heir], self._seats[seat] = left, mine

    def place(self, seat: int, position: int) -> tuple[int, int]:
        """Return where a seat's next token goes on: behind so many tokens of the seat that holds them."""
        if self._trunks.get(seat, (seat, -1))[1] != position:
            self._own(seat)
        return self._trunks.get(seat, (seat, position))

    def seat(self, number: int) -> NDArray[Any]:
        """Return the memory of a seat: another array where another prompt took it over."""
        return self._seats[number]

    def held(self, call: Call, count: int) -> Sequence[NDArray[Any]]:
        """Return what stands before the trees of a call, for each of the first `count` keys and values [lines, held, cell].

        Beyond a tree's own beginning lies whatever was written there: numbers, of which the mask leaves nothing.
        """
        seats = [self._seats[tree.root] for tree in call.trees]
        if len(seats) == 1:
            return list(seats[0][:count, None, : call.held])
        shape = count, len(seats), call.held, self._shape[2]
        if self._lines.size < (size := int(np.prod(shape))):
            self._lines = np.empty(0, self._kind)  # not both at once
            self._lines = np.empty(size, self._kind)
        lines = self._lines[:size].reshape(shape)
        for n, seat in enumerate(seats):
            lines[:, n] = seat[:count, : call.held]
        return list(lines)

    def note(self, seat: int, position: int, new: NDArray[Any]) -> None:
        """Let the seat hold, from `position` on, what a call answered, [2 x layers, tokens, cell]: it stays there until `settle`."""
        self._noted.setdefault(seat, []).append((position, new))

    def settle(self) -> None:
        """Copy what was noted and not forgotten: the next call writes over it."""
        for seat in list(self._noted):
            self._settle(seat)

    def _settle(self, seat: int) -> None:
        for position, new in self._noted.pop(seat, ()):
            self._keep(seat, position, new)

    def _keep(self, seat: int, position: int, new: NDArray[Any]) -> None:
        end = self._ends[seat] = position + new.shape[1]
        self._seats[seat][: len(new), position:end] = new

    def _empty(self) -> NDArray[Any]:
        """In small pages: a fork writes a few tokens in each layer, and in huge ones that would be all of its memory."""
        memory = mmap.mmap(-1, int(np.prod(self._shape)) * np.dtype(self._kind).itemsize, **PRIVATE)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return np.frombuffer(memory, self._kind).reshape(self._shape)

    def _own(self, seat: int) -> None:
        source, tokens = self._trunks.pop(seat, (seat, 0))
        self._settle(source)
        self._seats[seat][:, :tokens] = self._seats[source][:, :tokens]
