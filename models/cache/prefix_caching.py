"""Prefix caching: which sections each slot holds, and which of them need not be read again.

A backend over a library that keeps no prompts by itself derives from `PrefixCachingBackend` and says how rows are run. Every
section is read in calls of its own, so where calls are cut never depends on what was cached.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sds.models.cache.kv_cache import BatchRow, KVCache
from sds.models.cache.prefix_cache import PrefixCache
from sds.models.cache.slots import SlotBackend
from sds.models.protocol import FORKS_MAX, BackendError, Row, shared_sections
from sds.models.tokenizer.tokenizer import Tokenizer

CALL_TOKENS_MAX = 512  # of one row


@dataclass(slots=True)
class _Prompt:
    """What one slot of the KV cache holds: `position` tokens, `sections` first. `origin`: the slot a fork descends from."""

    cache_slot: int
    origin: int
    sections: list[tuple[int, ...]] = field(default_factory=list)
    position: int = 0


class PrefixCachingBackend(SlotBackend[_Prompt]):
    """All of `Backend`, for a library that can run rows over the slots of a KV cache.

    Sections that were read are kept, up to a number of bytes (`PrefixCache`), and copied back with the same bits. A row
    alone in its call depends on nothing but the tokens before it and where they were cut; rows that share a call may be
    padded, which shows in the last digits.
    """

    def __init__(self, *, slots: int, words: Tokenizer, template: str | None, kv_cache: KVCache) -> None:
        super().__init__(words, template, slots)
        self.pass_tokens_max, self._kv_cache = CALL_TOKENS_MAX, kv_cache
        self._prompts = {slot: _Prompt(slot, slot) for slot in range(slots)}
        self._prefix_cache: PrefixCache[Any] = PrefixCache()

    @abstractmethod
    def _call(self, rows: Sequence[BatchRow]) -> list[NDArray[np.float32]]:
        """Append the rows, none longer than CALL_TOKENS_MAX; return the logits of each, [outputs, vocab_size]."""

    @abstractmethod
    def _failing(self, what: str) -> AbstractContextManager[None]:
        """Turn whatever the library raises into a `BackendError`; the KV cache is changed within it, too."""

    @property
    def fragmented(self) -> bool:
        return False

    def defragment(self) -> None:
        """Do nothing: every slot has memory of its own, which is free as soon as it is truncated."""

    def prefill(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        """Make `slot` hold exactly these sections. Its forks are dropped; what was read before is copied."""
        self._ready()
        wanted, prompt = self._begun(sections, slot), self._prompts[slot]
        shared = shared_sections(wanted, prompt.sections)
        position = sum(map(len, wanted[:shared]))
        surplus = prompt.position - position
        with self._freed_on_error([slot], "the model's cache cannot be cut back"):
            if surplus and not self._kv_cache.truncate(prompt.cache_slot, position, surplus):
                self._kv_cache.free(prompt.cache_slot)
                shared = position = 0
        prompt.sections, prompt.position = prompt.sections[:shared], position
        self._prefix_cache.touch(wanted[:shared])
        for n in range(shared, len(wanted)):
            self._append_section(slot, wanted[: n + 1])
            prompt.sections.append(wanted[n])

    def is_cached(self, sections: Sequence[Sequence[int]]) -> bool:
        wanted = [tuple(section) for section in sections]
        return self._prefix_cache.holds(wanted, behind=min(self._shared(wanted)))

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        self._ready()
        self._check(rows)
        return self._read(rows)

    def _forked(self, source: _Prompt) -> _Prompt:
        used = {prompt.cache_slot for prompt in self._prompts.values()}
        cache_slot = next(n for n in range(self.slots + FORKS_MAX) if n not in used)
        with self._failing("the prompt could not be forked"):
            self._kv_cache.fork(source.cache_slot, cache_slot, source.position)
        return _Prompt(cache_slot, source.origin, list(source.sections), source.position)

    def _dropped(self, prompt: _Prompt) -> None:
        self._kv_cache.free(prompt.cache_slot)

    def _append_section(self, slot: int, sections: Sequence[tuple[int, ...]]) -> None:
        """Append the last of these sections behind the others: from the prefix cache, or by reading it."""
        prompt, section = self._prompts[slot], sections[-1]
        start = prompt.position
        if (kv_block := self._prefix_cache.get(sections)) is not None:
            with self._freed_on_error([slot], "a kept section could not be put back"):
                self._kv_cache.write_block(prompt.cache_slot, start, kv_block)
            prompt.position += len(section)
        elif section:
            self._read([Row(slot, section, 0)])
            with self._freed_on_error([slot], "a section could not be kept"):
                self._prefix_cache.put(sections, *self._kv_cache.read_block(prompt.cache_slot, start, prompt.position))

    def _read(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Append the rows; return the logits of each, [outputs, vocab_size]."""
        logits: list[list[NDArray[np.float32]]] = [[] for _ in rows]
        what = f"the model could not be run on {sum(len(row.tokens) for row in rows)} tokens"
        with self._freed_on_error([row.slot for row in rows], what):
            for start in range(0, max((len(row.tokens) for row in rows), default=0), CALL_TOKENS_MAX):
                numbers = [n for n, row in enumerate(rows) if start < len(row.tokens)]
                batch = [self._batch_row(rows[n], start) for n in numbers]
                for n, row, answered in zip(numbers, batch, self._call(batch), strict=True):
                    logits[n].append(answered)
                    self._prompts[rows[n].slot].position += len(row.tokens)
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in logits]

    def _batch_row(self, row: Row, start: int) -> BatchRow:
        """Return the part of a row from token `start` on that is run in one call."""
        tokens, prompt = row.tokens[start : start + CALL_TOKENS_MAX], self._prompts[row.slot]
        end, wanted = start + len(tokens), len(row.tokens) - row.outputs
        return BatchRow(prompt.cache_slot, prompt.position, tokens, max(0, end - max(start, wanted)))

    @contextmanager
    def _freed_on_error(self, slots: Sequence[int], what: str) -> Iterator[None]:
        """Whatever fails leaves half a pass behind: then these slots hold nothing, and forks among them are gone."""
        try:
            with self._failing(what):
                yield
        except BackendError:
            for slot in slots:
                prompt = self._prompts[slot]
                self._kv_cache.free(prompt.cache_slot)
                prompt.sections, prompt.position = [], 0
                if slot >= self.slots:
                    del self._prompts[slot]
            raise
