"""The slots of a backend, with one prompt in each, and the prefix cache of sections that need not be read again.

A section's keys and values depend only on the sections before it, so all of these together are its key. Every section
is read in calls of its own, so where calls are cut never depends on what was cached. Nothing here knows where keys and
values lie, or what a kv_block is made of.

`SlotBackend`: what all backends share. `PrefixCachingBackend`: for a library that caches no prompts by itself; a
backend over one only defines how rows are run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from sds.models.cache.kv_cache import BatchRow, KVCache
from sds.models.protocol import FORKS_MAX, BackendError, ChatFrame, Row
from sds.models.tokenizer.tokenizer import ModelTokenizer, Tokenizer

PREFIX_BYTES_MAX = 256 << 20
CALL_TOKENS_MAX = 512  # of one row

T = TypeVar("T")
Sections = tuple[tuple[int, ...], ...]


def shared_sections(wanted: Sequence[Sequence[int]], held: Sequence[Sequence[int]]) -> int:
    """Return how many leading sections two prompts share."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(wanted, held, strict=False))
    return sum(1 for _ in shared)


class PrefixCache(Generic[T]):
    """The kv_block of the last of some sections, by all of these; bounded in bytes, the least recently used go first."""

    def __init__(self, bytes_max: int = PREFIX_BYTES_MAX) -> None:
        self._bytes_max, self._bytes = bytes_max, 0
        self._entries: dict[Sections, tuple[T, int]] = {}  # in the order of their use

    def get(self, sections: Sequence[tuple[int, ...]]) -> T | None:
        """Return the kv_block of the last of these sections, now the most recently used; None where it is not held."""
        entry = self._entries.pop(key := tuple(sections), None)
        if entry is None:
            return None
        self._entries[key] = entry
        return entry[0]

    def touch(self, sections: Sequence[tuple[int, ...]]) -> None:
        """Count a use of each of these sections, which a slot holds already."""
        for n in range(len(sections)):
            self.get(sections[: n + 1])

    def put(self, sections: Sequence[tuple[int, ...]], kv_block: T, size: int) -> None:
        """Hold the kv_block of the last of these sections, `size` bytes. One larger than the whole cache is not held."""
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
        """Return whether all of these sections are held, except the first `behind` and empty ones."""
        return all(tuple(sections[: n + 1]) in self._entries for n in range(behind, len(sections)) if sections[n])


def check_fits(tokens: int, context_tokens_max: int) -> None:
    if tokens > context_tokens_max:
        raise BackendError(
            f"{tokens} tokens are more than the model's context of {context_tokens_max}",
            hint="shorten the prompt or load the model with a larger context",
        )


def check_known(tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise BackendError("a token is outside the vocabulary")


def check_rows(rows: Sequence[Row]) -> None:
    if len({row.slot for row in rows}) != len(rows):
        raise BackendError("a pass may hold at most one row of each slot")
    for row in rows:
        if not row.tokens:
            raise BackendError("a step needs at least one token")
        if not 0 <= row.outputs <= len(row.tokens):
            raise BackendError(f"{row.outputs} outputs of {len(row.tokens)} tokens were asked for")


class HeldPrompt(Protocol):
    """The prompt in one slot: `position` tokens, `sections` first. `origin`: the slot that a fork descends from."""

    origin: int
    sections: list[tuple[int, ...]]
    position: int


P = TypeVar("P", bound=HeldPrompt)


class SlotBackend(ModelTokenizer, ABC, Generic[P]):
    """The part of `Backend` that does not depend on where keys and values lie: checks, texts, and forks by number."""

    lookahead_tokens_max, rows_may_be_cut = 0, True
    name: str
    fingerprint: str
    context_tokens_max: int
    _path: Path  # of the weights, for replicas
    _prompts: dict[int, P]  # by slot; forks from `slots` on

    def __init__(self, words: Tokenizer, template: str | None, slots: int) -> None:
        super().__init__(words, template)
        self.slots = self._next_fork = slots
        self._open = True

    @abstractmethod
    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """As in `Backend`."""

    @abstractmethod
    def _forked(self, source: P) -> P:
        """Return the prompt of a new fork, equal to `source`."""

    @abstractmethod
    def _dropped(self, prompt: P) -> None:
        """Free the keys and values of a fork."""

    @abstractmethod
    def _free(self) -> None:
        """Free the library's memory; called once."""

    def frame(self) -> ChatFrame:
        self._ready()
        return super().frame()

    def forward_one(self, tokens: Sequence[int], *, slot: int = 0) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.run([Row(slot, tokens)])[0][0]
        return logits

    def fork(self, slot: int) -> int:
        """Return a new slot with what `slot` holds. A fork is dropped together with its prompt."""
        self._ready()
        source = self._prompt(slot)
        if len(self._prompts) - self.slots >= FORKS_MAX:
            raise BackendError(
                f"more than {FORKS_MAX} forks at once", hint="drop some forks, or score fewer alternatives"
            )
        forked = self._forked(source)
        fork, self._next_fork = self._next_fork, self._next_fork + 1
        self._prompts[fork] = forked
        return fork

    def drop(self, fork: int) -> None:
        """Free a fork's slot. A fork that went with its prompt, or after a failure, may be dropped again."""
        self._ready()
        if not self.slots <= fork < self._next_fork:
            raise BackendError(f"there is no fork {fork}")
        dropped = self._prompts.pop(fork, None)
        if dropped is not None:
            self._dropped(dropped)

    def close(self) -> None:
        if self._open:
            self._open = False
            self.words.release()
            self._free()

    def _ready(self) -> None:
        if not self._open:
            raise BackendError("the model is closed")

    def _prompt(self, slot: int) -> P:
        prompt = self._prompts.get(slot)
        if prompt is None:
            raise BackendError(f"there is no slot {slot}")
        return prompt

    def _begun(self, sections: Sequence[Sequence[int]], slot: int) -> list[tuple[int, ...]]:
        """Return the sections that a slot is to hold, after dropping its forks. Raises BackendError where they do not fit."""
        if not 0 <= slot < self.slots:
            raise BackendError(f"there is no slot {slot}")
        wanted = [tuple(section) for section in sections]
        check_fits(sum(map(len, wanted)), self.context_tokens_max)
        for section in wanted:
            check_known(section, self.vocab_size)
        self._drop_forks(slot)
        return wanted

    def _drop_forks(self, *slots: int) -> None:
        for fork in [fork for fork, made in self._prompts.items() if fork >= self.slots and made.origin in slots]:
            self.drop(fork)

    def _shared(self, wanted: Sequence[Sequence[int]]) -> list[int]:
        """Return by slot how many of these leading sections it holds."""
        return [shared_sections(wanted, self._prompts[slot].sections) for slot in range(self.slots)]

    def _check(self, rows: Sequence[Row]) -> None:
        check_rows(rows)
        for row in rows:
            check_known(row.tokens, self.vocab_size)
            check_fits(self._prompt(row.slot).position + len(row.tokens), self.context_tokens_max)

    def _replica(self, **opened: Any) -> Self:
        """Return another backend over the same weights, opened with these arguments."""
        kind: Any = type(self)
        made: Self = kind(self._path, fingerprint=self.fingerprint, **opened)
        made.name = self.name
        return made


@dataclass(slots=True)
class _Prompt:
    """What one slot of the KV cache holds: `position` tokens, `sections` first. `origin`: the slot a fork descends from."""

    cache_slot: int
    origin: int
    sections: list[tuple[int, ...]] = field(default_factory=list)
    position: int = 0


class PrefixCachingBackend(SlotBackend[_Prompt]):
    """All of `Backend`, for a library that can run rows over the slots of a KV cache.

    Sections that were read are cached, up to a number of bytes (`PrefixCache`), and copied back with the same bits. A
    row alone in its call depends only on the tokens before it and where they were cut. Rows that share a call may be
    padded, which shows in the last digits.
    """

    def __init__(self, *, slots: int, words: Tokenizer, template: str | None, kv_cache: KVCache) -> None:
        super().__init__(words, template, slots)
        self.pass_tokens_max, self._kv_cache = CALL_TOKENS_MAX, kv_cache
        self._prompts = {slot: _Prompt(slot, slot) for slot in range(slots)}
        self._prefix_cache: PrefixCache[Any] = PrefixCache()

    @abstractmethod
    def _call(self, rows: Sequence[BatchRow]) -> list[NDArray[np.float32]]:
        """Append the rows, none longer than CALL_TOKENS_MAX; return [outputs, vocab_size] for each."""

    @abstractmethod
    def _failing(self, what: str) -> AbstractContextManager[None]:
        """Turn the library's exceptions into a `BackendError`; changes of the KV cache run within it, too."""

    @property
    def fragmented(self) -> bool:
        return False

    def defragment(self) -> None:
        """Do nothing: every slot has its own memory, which is free once it is truncated."""

    def prefill(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        """Make `slot` hold exactly these sections. Its forks are dropped; cached sections are copied."""
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
        """Append the last of these sections after the others: from the prefix cache, or by reading it."""
        prompt, section = self._prompts[slot], sections[-1]
        start = prompt.position
        if (kv_block := self._prefix_cache.get(sections)) is not None:
            with self._freed_on_error([slot], "a stored section could not be restored"):
                self._kv_cache.write_block(prompt.cache_slot, start, kv_block)
            prompt.position += len(section)
        elif section:
            self._read([Row(slot, section, 0)])
            with self._freed_on_error([slot], "a section could not be stored"):
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
        """Return the part of a row, from token `start` on, that one call runs."""
        tokens, prompt = row.tokens[start : start + CALL_TOKENS_MAX], self._prompts[row.slot]
        end, wanted = start + len(tokens), len(row.tokens) - row.outputs
        return BatchRow(prompt.cache_slot, prompt.position, tokens, max(0, end - max(start, wanted)))

    @contextmanager
    def _freed_on_error(self, slots: Sequence[int], what: str) -> Iterator[None]:
        """Run the block; on an error, which leaves half a pass behind, free these slots and delete the forks among them."""
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
