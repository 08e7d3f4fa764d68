"""The KV cache of every slot: the protocol that a prefix-caching backend uses, and an implementation in plain memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sds.models.protocol import BackendError

PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Tokens appended to the `position` tokens of a cache slot; the logits of the last `outputs` are wanted."""

    slot: int
    position: int
    tokens: Sequence[int]
    outputs: int


class KVCache(Protocol):
    """Keys and values by slot. A kv_block is a copy of those of some positions, in the cache's own form."""

    def truncate(self, slot: int, position: int, surplus: int) -> bool:
        """Drop the last `surplus` tokens, so that `position` stay. Return False where the cache cannot."""

    def read_block(self, slot: int, start: int, end: int) -> tuple[Any, int]:
        """Return a kv_block of these positions, which end with the slot's last, and its size in bytes."""

    def write_block(self, slot: int, start: int, kv_block: Any) -> None:
        """Append a kv_block, which was read behind the same tokens, to a slot of `start` tokens."""

    def fork(self, source: int, target: int, tokens: int) -> None:
        """Let `target`, perhaps a new slot, hold the `tokens` of `source`, which is not written while `target` lives."""

    def free(self, slot: int) -> None: ...


class ArrayKVCache:
    """One array a slot, [2 x layers, context, width]: keys and values of each layer in turn. Memory is committed when written.

    A fork shares its source's prefix, and gets a copy of it (copy on write) only when it continues on its own or the
    source is freed. The results of a call lie in the library's own memory. Writing them is deferred until the next
    call, because most of them are freed before.
    """

    def __init__(self, shape: tuple[int, int, int], kind: type[Any], slots: int) -> None:
        """`shape`: 2 x layers, tokens a slot holds, numbers of one token's keys (or values) in one layer."""
        self.shape, self.kind = shape, kind
        self._slots = {slot: self._empty() for slot in range(slots)}
        self._shared: dict[int, tuple[int, int]] = {}  # by fork, its prefix: the source's slot, the number of tokens
        self._written: dict[int, int] = {}  # by slot, how many tokens were ever written
        self._deferred: dict[int, list[tuple[int, NDArray[Any]]]] = {}  # by slot: first position, values

    def truncate(self, slot: int, position: int, _surplus: int) -> bool:
        """Drop deferred writes beyond `position`; what is written there already is masked."""
        if slot in self._deferred:
            self._deferred[slot] = [(start, new) for start, new in self._deferred[slot] if start < position]
        return True

    def read_block(self, slot: int, start: int, end: int) -> tuple[NDArray[Any], int]:
        self._materialise(slot)
        self._flush(slot)
        kv_block = self._slots[slot][:, start:end].copy()
        return kv_block, kv_block.nbytes

    def write_block(self, slot: int, start: int, kv_block: NDArray[Any]) -> None:
        self._materialise(slot)
        self._flush(slot)
        self._write(slot, start, kv_block)

    def fork(self, source: int, target: int, tokens: int) -> None:
        if target not in self._slots:
            self._slots[target] = self._empty()
        self._shared[target] = self.prefix(source, tokens)
        self._written.pop(target, None)

    def free(self, slot: int) -> None:
        """Free a slot. Its forks are materialised, the last of them by taking over the slot's memory."""
        self._shared.pop(slot, None)
        if not any(source == slot for source, _ in self._shared.values()):
            self._deferred.pop(slot, None)
        self._flush(slot)
        *others, heir = [fork for fork, (source, _) in self._shared.items() if source == slot] or [slot]
        for fork in others:
            self._materialise(fork)
        if heir != slot:
            _, start = self._shared.pop(heir)
            mine, left = self._slots[heir], self._slots[slot]
            end = max(start, self._written.get(heir, start))
            left[:, start:end] = mine[:, start:end]
            self._slots[heir], self._slots[slot] = left, mine

    def prefix(self, slot: int, position: int) -> tuple[int, int]:
        """Return the slot whose array holds a slot's `position` tokens: its source's, until it writes some of its own."""
        if self._shared.get(slot, (slot, -1))[1] != position:
            self._materialise(slot)
        return self._shared.get(slot, (slot, position))

    def memory(self, slot: int) -> NDArray[Any]:
        """Return a slot's array; after `free` it may be another one."""
        return self._slots[slot]

    def append(self, row: BatchRow, answered: NDArray[Any], path: Sequence[int], logits: NDArray[np.float32]) -> None:
        """Append a row's keys and values, taken from `answered`, [2 x layers, tokens, width], at the indices `path`.

        Where a logit is not finite, zeros are written instead: masked positions are multiplied by zero, and zero times
        NaN is NaN. Such logits end the decision that asked for them. A row without outputs raises BackendError.
        """
        finite = bool(np.isfinite(logits).all())
        if not finite and not row.outputs:
            raise BackendError("the model returned logits that are not numbers")
        kept = answered if finite else np.zeros_like(answered)
        in_one_piece = path[-1] - path[0] == len(path) - 1  # indices in a path increase
        breaks = [] if in_one_piece else [n for n in range(1, len(path)) if path[n] != path[n - 1] + 1]
        deferred = self._deferred.setdefault(row.slot, [])
        for start, end in pairwise([0, *breaks, len(path)]):
            deferred.append((row.position + start, kept[:, path[start] : path[start] + end - start]))

    def flush(self) -> None:
        """Make the deferred writes, before the next call overwrites the memory they are read from."""
        for slot in list(self._deferred):
            self._flush(slot)

    def _flush(self, slot: int) -> None:
        for position, new in self._deferred.pop(slot, ()):
            self._write(slot, position, new)

    def _write(self, slot: int, position: int, new: NDArray[Any]) -> None:
        end = self._written[slot] = position + new.shape[1]
        self._slots[slot][: len(new), position:end] = new

    def _empty(self) -> NDArray[Any]:
        """Return an empty array in small pages: a fork writes a few tokens in each layer, so it would commit all huge pages."""
        memory = mmap.mmap(-1, int(np.prod(self.shape)) * np.dtype(self.kind).itemsize, **PRIVATE)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return np.frombuffer(memory, self.kind).reshape(self.shape)

    def _materialise(self, slot: int) -> None:
        """Copy a fork's shared prefix into its own array."""
        source, tokens = self._shared.pop(slot, (slot, 0))
        self._flush(source)
        self._slots[slot][:, :tokens] = self._slots[source][:, :tokens]
