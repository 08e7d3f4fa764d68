"""The cells of llama.cpp's one KV cache: how many are used, and when they are free again.

Flash attention adds up the cells of a prompt in the order of their index and skips those of others: a prompt whose cells
rise with its positions gives the same bits wherever they lie. llama.cpp takes the lowest free cell first, so a hole left
by another prompt would break the rise. With several slots whatever is truncated is therefore moved to a sequence that
nobody reads, and is free only after `defragment`; with one, at once. It does not know sections, forks or tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import llama_cpp as lib

from sds.models.protocol import BackendError

SPARE_SEQUENCES = 3  # for what was truncated, for padding tokens, and for kv_blocks that are read or written
Span = tuple[int, int]
KVBlock = ctypes.Array[ctypes.c_uint8]  # llama.cpp's own form


class LlamaKVCache:
    """All sequences' cells, `size` of them.

    `fragmented_max`: how many may be used since the last `defragment` before no new prompt should begin; 0: cells need
    not rise. `keep_max`: how many stay in use over a `defragment`.
    """

    def __init__(
        self, context: lib.llama_context_p, size: int, *, sequences: int, fragmented_max: int, keep_max: int
    ) -> None:
        self._context, self._memory = context, lib.llama_get_memory(context)
        self._size, self._fragmented_max, self._keep_max = size, fragmented_max, keep_max
        self._rising = fragmented_max > 0
        self._truncated, self.padding, self._transfer = sequences, sequences + 1, sequences + 2
        self._used = self._kept = 0

    @property
    def fragmented(self) -> bool:
        return self._rising and self._used - self._kept >= self._fragmented_max

    def full(self, tokens: int) -> bool:
        return self._rising and self._used + tokens > self._size

    def use(self, tokens: int) -> Span:
        """Note that the next `tokens` cells are used; return where they lie."""
        start, self._used = self._used, self._used + tokens
        return start, self._used

    def padding_position(self) -> int:
        """Return the next position of the sequence of padding tokens."""
        return int(lib.llama_memory_seq_pos_max(self._memory, self.padding)) + 1

    def is_whole(self, sequence: int) -> bool:
        """Tell whether a sequence holds all that it read. A sliding window lets llama.cpp use cells again that lie behind it,
        which a sequence that is truncated would look at.
        """
        return int(lib.llama_memory_seq_pos_min(self._memory, sequence)) <= 0

    def share(self, source: int, target: int, position: int) -> None:
        """Let `target`, which is empty, hold what `source` holds before `position`; -1: all."""
        lib.llama_memory_seq_cp(self._memory, source, target, 0, position)

    def read_block(self, sequence: int, start: int, end: int) -> KVBlock | None:
        """Return the kv_block of the positions from `start` to `end`; None where llama.cpp does not hand it out."""
        lib.llama_memory_seq_cp(self._memory, sequence, self._transfer, start, end)
        size = lib.llama_state_seq_get_size(self._context, self._transfer)
        kv_block = (ctypes.c_uint8 * size)()
        written = lib.llama_state_seq_get_data(self._context, kv_block, size, self._transfer)
        lib.llama_memory_seq_rm(self._memory, self._transfer, -1, -1)
        return kv_block if written == size else None

    def write_block(self, sequence: int, start: int, end: int, kv_block: KVBlock) -> bool:
        """Append a kv_block to `sequence`, which ends at `start`; return whether llama.cpp took it."""
        if not lib.llama_state_seq_set_data(self._context, kv_block, len(kv_block), self._transfer):
            return False
        lib.llama_memory_seq_cp(self._memory, self._transfer, sequence, start, end)
        lib.llama_memory_seq_rm(self._memory, self._transfer, -1, -1)
        self.use(end - start)
        return True

    def truncate(self, sequence: int, position: int) -> None:
        """Drop everything from `position` on. Raises BackendError when the model's cache cannot."""
        if self._rising:
            lib.llama_memory_seq_cp(self._memory, sequence, self._truncated, position, -1)
        if not lib.llama_memory_seq_rm(self._memory, sequence, position, -1):
            raise BackendError("the model's cache cannot be cut back")

    def keepable(self, spans: Iterable[Span]) -> int:
        """Return up to which cell `spans` may stay over a `defragment`: without a hole from the first on, `keep_max` at most.

        After it the next cell used is that one, so only what lies below may stay.
        """
        end = 0
        for start, stop in sorted(set(spans)):
            if start != end or stop > self._keep_max:
                break
            end = stop
        return end

    def defragment(self, keep: int) -> None:
        """Free what was truncated; everything else lies below cell `keep`."""
        for sequence in (self._truncated, self.padding):
            lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._used = self._kept = keep

    def clear(self) -> None:
        lib.llama_memory_clear(self._memory, True)
        self._used = self._kept = 0
