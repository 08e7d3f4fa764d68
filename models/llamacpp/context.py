"""A context of llama.cpp: its settings, which make passes repeatable; the cells of its one KV cache; the prompt in one
sequence; and the batch it reads, over numpy arrays, so that filling it costs microseconds.

Flash attention adds up the cells of a prompt in the order of their index and skips those of others: a prompt whose
cells are in the order of its positions has the same bits wherever they lie. llama.cpp takes the lowest free cell first,
so a hole left by another prompt would break that order. With several slots, truncated cells are therefore moved to a
sequence that nobody reads, and are free only after `defragment`; with one slot, they are free at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from sds.models.llamacpp.weights import UNFIT_HINT, GgufModel, is_one_state, unfit
from sds.models.protocol import FORKS_MAX, BackendError, check_slots

CACHE_TOKENS_MAX = 1 << 17  # of all slots together, since all can be full at once
SPARE_SEQUENCES = 3  # for truncated cells, for padding tokens, and for kv_blocks being read or written
Section = tuple[int, ...]
Span = tuple[int, int]
KVBlock = ctypes.Array[ctypes.c_uint8]  # llama.cpp's own form
_SEQUENCE = ctypes.POINTER(lib.llama_seq_id)


class LlamaKVCache:
    """Counts the used cells of all sequences, `size` in all, and frees them.

    `fragmented_max`: how many cells may be used since the last `defragment` before no new prompt should begin; 0: cells
    need no order. `keep_max`: how many cells may stay in use over a `defragment`.
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
        """Count the next `tokens` cells as used; return where they lie."""
        start, self._used = self._used, self._used + tokens
        return start, self._used

    def padding_position(self) -> int:
        """Return the next position of the sequence of padding tokens."""
        return int(lib.llama_memory_seq_pos_max(self._memory, self.padding)) + 1

    def is_whole(self, sequence: int) -> bool:
        """Return whether a sequence holds all that it read. With a sliding window llama.cpp reuses cells behind it,
        which a truncated sequence would need.
        """
        return int(lib.llama_memory_seq_pos_min(self._memory, sequence)) <= 0

    def share(self, source: int, target: int, position: int) -> None:
        """Let `target`, which is empty, hold what `source` holds before `position`; -1: all."""
        lib.llama_memory_seq_cp(self._memory, source, target, 0, position)

    def read_block(self, sequence: int, start: int, end: int) -> KVBlock | None:
        """Return the kv_block of the positions from `start` to `end`; None where llama.cpp does not give it."""
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
        """Return up to which cell `spans` may stay over a `defragment`: without a hole from the first on, at most `keep_max`.

        The next cell used after it is that one, so only cells below it may stay.
        """
        end = 0
        for start, stop in sorted(set(spans)):
            if start != end or stop > self._keep_max:
                break
            end = stop
        return end

    def defragment(self, keep: int) -> None:
        """Free truncated cells; all others lie below cell `keep`."""
        for sequence in (self._truncated, self.padding):
            lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._used = self._kept = keep

    def clear(self) -> None:
        lib.llama_memory_clear(self._memory, True)
        self._used = self._kept = 0


@dataclass(slots=True)
class Prompt:
    """The prompt in one sequence. `origin`: its slot. `spans`: its sections' cells. `writes`: of a fork, its tokens
    beyond the slot by the number of the pass that wrote them; forks of a fork share them.
    """

    sequence: int
    origin: int
    sections: list[Section] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    position: int = 0
    writes: dict[int, int] = field(default_factory=dict)

    def truncate(self, sections: int) -> None:
        del self.sections[sections:], self.spans[sections:]
        self.position = sum(map(len, self.sections))

    def is_all(self, sections: Sequence[Section]) -> bool:
        """Return whether these sections are all that it has read."""
        return self.sections == list(sections) and self.position == sum(map(len, sections))

    def restore(self, sections: Sequence[Section]) -> None:
        """Set these sections as all that it holds, from the first cell on."""
        ends = list(accumulate(map(len, sections), initial=0))
        self.sections, self.spans, self.position = list(sections), list(pairwise(ends)), ends[-1]


class TokenBatch:
    """The rows of one run, end to end, at most `size_max` tokens; `part` gives llama.cpp some of them."""

    def __init__(self, size_max: int) -> None:
        self.size = 0
        self._tokens = np.zeros(size_max, np.int32)
        self._positions = np.zeros(size_max, np.int32)
        self._sequences = np.zeros(size_max, np.int32)
        self._wanted = np.zeros(size_max, np.int8)
        self._ones = np.ones(size_max, np.int32)
        self._counting = np.arange(size_max, dtype=np.int32)
        pointers = self._sequences.ctypes.data + self._sequences.itemsize * np.arange(size_max)
        self._pointers = pointers.astype(np.uintp)  # llama.cpp reads each token's one sequence through a pointer

    def clear(self) -> None:
        self.size = 0

    def add(self, tokens: Sequence[int], *, position: int, sequence: int, outputs: int) -> None:
        """Append a row; the outputs of its last `outputs` tokens are wanted."""
        start, end = self.size, self.size + len(tokens)
        self._tokens[start:end] = tokens
        self._positions[start:end] = self._counting[position : position + len(tokens)]
        self._sequences[start:end] = sequence
        self._wanted[start : end - outputs] = 0
        self._wanted[end - outputs : end] = 1
        self.size = end

    def outputs(self, start: int, end: int) -> int:
        return int(np.count_nonzero(self._wanted[start:end]))

    def pad_lone_output(self, start: int, end: int) -> slice:
        """If these tokens have one output, ask for a second; return which of the outputs are wanted.

        For one output llama.cpp uses another matrix kernel than for several, with other bits.
        """
        if self.outputs(start, end) != 1:
            return slice(None)
        first = bool(self._wanted[start])
        self._wanted[start + 1 if first else start] = 1
        return slice(0, 1) if first else slice(1, 2)

    def part(self, start: int, end: int) -> lib.llama_batch:
        """Return the tokens from `start` to `end`. The result points into this object, which must outlive it."""
        return lib.llama_batch(
            end - start,
            _at(self._tokens, start, ctypes.POINTER(lib.llama_token)),
            None,
            _at(self._positions, start, ctypes.POINTER(lib.llama_pos)),
            _at(self._ones, start, ctypes.POINTER(ctypes.c_int32)),
            _at(self._pointers, start, ctypes.POINTER(_SEQUENCE)),
            _at(self._wanted, start, ctypes.POINTER(ctypes.c_int8)),
        )


def _at(array: NDArray[np.generic], index: int, kind: type[ctypes._Pointer[ctypes._CData]]) -> object:
    return ctypes.cast(array.ctypes.data + index * array.itemsize, kind)


def check_cache(slots: int, n_ctx: int) -> None:
    check_slots(slots)
    if slots * n_ctx > CACHE_TOKENS_MAX:
        raise BackendError(
            f"{slots} slots of {n_ctx} tokens need a cache of more than {CACHE_TOKENS_MAX} tokens",
            hint="ask for fewer slots or a smaller context",
        )


def check_fit(model: GgufModel, slots: int) -> None:
    """Raise BackendError for a model that can write no decision, or none beside others."""
    if why := unfit(model.pointer):
        raise BackendError(why, hint=UNFIT_HINT)
    if slots > 1 and is_one_state(model.pointer):
        raise BackendError(
            "a model with recurrent state can decide only one case at a time",
            hint="use one slot; on the processor, `replicas` decide several at once",
        )


def new_context(model: GgufModel, cells: int, n_batch: int, slots: int, threads: int) -> lib.llama_context_p:
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = cells, n_batch, n_batch
    params.n_threads = params.n_threads_batch = threads
    params.n_seq_max = slots + FORKS_MAX + SPARE_SEQUENCES
    params.n_outputs_max = max(n_batch, params.n_seq_max)  # with fewer than one a sequence, llama.cpp ends the process
    params.kv_unified = True
    params.offload_kqv = params.op_offload = model.on_gpu  # or a build for a GPU would use it for some passes
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if slots > 1 else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context: lib.llama_context_p | None = lib.llama_init_from_model(model.pointer, params)
    if context is None:
        raise BackendError(f"no memory for a cache of {cells} tokens", hint="load the model with a smaller context")
    return context
