"""The cells of llama.cpp's one cache: how many are taken, and when they are free again.

Flash attention adds up the cells of a prompt in the order of their index and skips those of others: a prompt whose cells
rise with its positions gives the same bits wherever they lie. llama.cpp takes the lowest free cell first, so a hole left
by another prompt would break the rise. With several slots whatever is cut off is therefore kept by a sequence that
nobody reads, and is free only after `rest`; with one, at once. It does not know sections, forks or tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import llama_cpp as lib

from sds.models.protocol import BackendError

SPARE_SEQUENCES = 3  # one keeps what was cut off, one keeps a lone token company, through one cells come and go
Span = tuple[int, int]
Stretch = ctypes.Array[ctypes.c_uint8]  # llama.cpp's own form


class LlamaKVCache:
    """All sequences' cells, `room` of them.

    `wear_max`: how many may be taken since the last rest before nobody new should begin; 0: cells do not rise.
    `keep_max`: how many stay taken over a rest.
    """

    def __init__(
        self, context: lib.llama_context_p, room: int, *, sequences: int, wear_max: int, keep_max: int
    ) -> None:
        self._context, self._memory = context, lib.llama_get_memory(context)
        self._room, self._wear_max, self._keep_max = room, wear_max, keep_max
        self._rising = wear_max > 0
        self._cut_off, self.beside, self._passing = sequences, sequences + 1, sequences + 2
        self._taken = self._kept = 0

    @property
    def fragmented(self) -> bool:
        return self._rising and self._taken - self._kept >= self._wear_max

    def full(self, tokens: int) -> bool:
        return self._rising and self._taken + tokens > self._room

    def take(self, tokens: int) -> Span:
        """Note that the next `tokens` cells are taken; return where they lie."""
        start, self._taken = self._taken, self._taken + tokens
        return start, self._taken

    def next_beside(self) -> int:
        """Return the next position of the sequence that keeps a lone token company."""
        return int(lib.llama_memory_seq_pos_max(self._memory, self.beside)) + 1

    def whole(self, sequence: int) -> bool:
        """Tell whether a sequence holds all that it read. A sliding window lets llama.cpp use cells again that lie behind it,
        which a sequence that is cut back would look at.
        """
        return int(lib.llama_memory_seq_pos_min(self._memory, sequence)) <= 0

    def share(self, source: int, target: int, position: int) -> None:
        """Let `target`, which is empty, hold what `source` holds before `position`; -1: all."""
        lib.llama_memory_seq_cp(self._memory, source, target, 0, position)

    def taken(self, sequence: int, start: int, end: int) -> Stretch | None:
        """Return what the positions from `start` to `end` hold; None where llama.cpp does not hand it out."""
        lib.llama_memory_seq_cp(self._memory, sequence, self._passing, start, end)
        size = lib.llama_state_seq_get_size(self._context, self._passing)
        held = (ctypes.c_uint8 * size)()
        written = lib.llama_state_seq_get_data(self._context, held, size, self._passing)
        lib.llama_memory_seq_rm(self._memory, self._passing, -1, -1)
        return held if written == size else None

    def put(self, sequence: int, start: int, end: int, held: Stretch) -> bool:
        """Let `sequence`, which ends at `start`, go on with what was taken there; return whether it does."""
        if not lib.llama_state_seq_set_data(self._context, held, len(held), self._passing):
            return False
        lib.llama_memory_seq_cp(self._memory, self._passing, sequence, start, end)
        lib.llama_memory_seq_rm(self._memory, self._passing, -1, -1)
        self.take(end - start)
        return True

    def cut(self, sequence: int, position: int) -> None:
        """Let go of everything from `position` on. Raises BackendError when the model's cache cannot."""
        if self._rising:
            lib.llama_memory_seq_cp(self._memory, sequence, self._cut_off, position, -1)
        if not lib.llama_memory_seq_rm(self._memory, sequence, position, -1):
            raise BackendError("the model's cache cannot be cut back")

    def lowest(self, spans: Iterable[Span]) -> int:
        """Return where those of `spans` end that may stay: without a hole from the beginning, `keep_max` at most.

        After a rest the next cell taken is the one there, so only what lies below may stay.
        """
        end = 0
        for start, stop in sorted(set(spans)):
            if start != end or stop > self._keep_max:
                break
            end = stop
        return end

    def defragment(self, lowest: int) -> None:
        """Free what was cut off; everything else lies below `lowest`."""
        for sequence in (self._cut_off, self.beside):
            lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._taken = self._kept = lowest

    def clear(self) -> None:
        lib.llama_memory_clear(self._memory, True)
        self._taken = self._kept = 0
