"""Prompts in the seats of a store: which sections each holds, and what of them need not be read again.

A backend over a library that keeps no prompts by itself derives from `PrefixCachingBackend` and says how a call is made. Every
section is read in calls of its own, so where calls are cut never depends on what was kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sds.models.cache.prefix_cache import PrefixCache
from sds.models.protocol import (
    FORKS_MAX,
    BackendError,
    ChatFrame,
    Row,
    check_fits,
    check_known,
    check_rows,
    shared_sections,
)
from sds.models.tokenizer.tokenizer import Tokenizer, model_frame, tokens_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

CALL_TOKENS_MAX = 512
PADDING_TOKENS_MAX = 64  # of one call: more costs more than a call of its own


@dataclass(frozen=True, slots=True)
class Part:
    """What one row appends to the `position` tokens its seat holds, and of how many of its last tokens comes an answer."""

    seat: int
    position: int
    tokens: Sequence[int]
    outputs: int


class KVCache(Protocol):
    """Where the keys and values of every seat lie. `together`: rows of several seats can share a call, and each can be
    cut back to any length.
    """

    @property
    def together(self) -> bool: ...

    def cut(self, seat: int, position: int, surplus: int) -> bool:
        """Return whether the seat now holds `position` tokens, its last `surplus` forgotten."""

    def taken(self, seat: int, start: int, end: int) -> tuple[Any, int]:
        """Return a copy of what the seat, which ends there, holds of these positions, and its size in bytes."""

    def put(self, seat: int, start: int, stretch: Any) -> None:
        """Let the seat, which ends at `start`, go on with what was taken there behind the same tokens."""

    def fork(self, source: int, target: int, tokens: int) -> None:
        """Let `target`, a seat perhaps new, hold what `source` does, which stays as it is until `target` is forgotten."""

    def forget(self, seat: int) -> None: ...


@dataclass(slots=True)
class _Prompt:
    """What one seat of the store holds: sections, of `position` tokens together, but for what was appended after them."""

    seat: int
    origin: int
    sections: list[tuple[int, ...]] = field(default_factory=list)
    position: int = 0


class PrefixCachingBackend(ABC):
    """What all of `Backend` comes to once a library can read tokens into the seats of a store.

    A row alone in its call depends on nothing but the tokens before it and where they were cut; rows that share a call
    may be padded, which shows in the last digits.
    """

    lookahead_tokens_max, rows_may_be_cut = 0, True
    name: str
    fingerprint: str
    vocab_size: int
    context_tokens_max: int

    def __init__(self, *, slots: int, words: Tokenizer, template: str | None, store: KVCache) -> None:
        self.slots, self.pass_tokens_max = slots, CALL_TOKENS_MAX
        self._words, self._template, self._store = words, template, store
        self._prompts = {slot: _Prompt(slot, slot) for slot in range(slots)}
        self._kept: PrefixCache[Any] = PrefixCache()
        self._next_fork = slots
        self._frame: ChatFrame | None = None
        self._open = True

    @abstractmethod
    def _call(self, parts: Sequence[Part]) -> list[NDArray[np.float32]]:
        """Append the parts, in one call unless it groups rows itself; return the logits of each, [outputs, vocab_size]."""

    @abstractmethod
    def _failing(self, what: str) -> AbstractContextManager[None]:
        """Turn whatever the library raises into a `BackendError`; the store is changed within it, too."""

    @abstractmethod
    def _free(self) -> None:
        """Give back the library's memory, once."""

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return tokens_of(self._words, text, special=special)

    def piece(self, token: int) -> bytes:
        return b"" if self._words.is_control(token) else self._words.spelling(token)

    @property
    def words(self) -> Tokenizer:
        return self._words

    def frame(self) -> ChatFrame:
        self._ready()
        if self._frame is None:
            self._frame = model_frame(self._template, self._words)
        return self._frame

    @property
    def fragmented(self) -> bool:
        return False

    def defragment(self) -> None:  # noqa: B027  not abstract: nothing wears
        """Do nothing: every slot has a place of its own, which is free as soon as it is cut back."""

    def prefill(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        """Make `slot` hold exactly these sections. Its forks are dropped; what was read before is copied."""
        self._ready()
        if not 0 <= slot < self.slots:
            raise BackendError(f"there is no slot {slot}")
        wanted = [tuple(section) for section in sections]
        check_fits(sum(map(len, wanted)), self.context_tokens_max)
        for section in wanted:
            check_known(section, self.vocab_size)
        prompt = self._prompts[slot]
        for fork in [fork for fork, made in self._prompts.items() if fork >= self.slots and made.origin == slot]:
            self.drop(fork)
        shared = shared_sections(wanted, prompt.sections)
        position = sum(map(len, wanted[:shared]))
        with self._forgetting([slot], "the model's cache cannot be cut back"):
            if not self._cut(prompt, position):
                self._store.forget(prompt.seat)
                shared = position = 0
        prompt.sections, prompt.position = prompt.sections[:shared], position
        self._kept.use(wanted[:shared])
        for n in range(shared, len(wanted)):
            self._extend(slot, wanted[: n + 1])
            prompt.sections.append(wanted[n])

    def is_cached(self, sections: Sequence[Sequence[int]]) -> bool:
        wanted = [tuple(section) for section in sections]
        every = (self._prompts[slot].sections for slot in range(self.slots))
        return self._kept.holds(wanted, behind=min(shared_sections(wanted, held) for held in every))

    def forward_one(self, tokens: Sequence[int], *, slot: int = 0) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.run([Row(slot, tokens)])[0][0]
        return logits

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        self._ready()
        self._runnable(rows)
        return self._read(rows)

    def fork(self, slot: int) -> int:
        """Return a new slot with what `slot` holds: and goes on by itself. A fork goes when its prompt does."""
        self._ready()
        source = self._prompt(slot)
        if len(self._prompts) - self.slots >= FORKS_MAX:
            raise BackendError(f"more than {FORKS_MAX} forks at once", hint="drop some, or score fewer alternatives")
        taken = {prompt.seat for prompt in self._prompts.values()}
        seat = next(seat for seat in range(self.slots + FORKS_MAX) if seat not in taken)
        with self._failing("the prompt could not be forked"):
            self._store.fork(source.seat, seat, source.position)
        fork, self._next_fork = self._next_fork, self._next_fork + 1
        self._prompts[fork] = _Prompt(seat, source.origin, list(source.sections), source.position)
        return fork

    def drop(self, fork: int) -> None:
        """Give a fork's slot back; one that went with its prompt, or after a failure, may be dropped again."""
        self._ready()
        if not self.slots <= fork < self._next_fork:
            raise BackendError(f"there is no fork {fork}")
        dropped = self._prompts.pop(fork, None)
        if dropped is not None:
            self._store.forget(dropped.seat)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._free()

    def _ready(self) -> None:
        if not self._open:
            raise BackendError("the model is closed")

    def _prompt(self, slot: int) -> _Prompt:
        prompt = self._prompts.get(slot)
        if prompt is None:
            raise BackendError(f"there is no slot {slot}")
        return prompt

    def _runnable(self, rows: Sequence[Row]) -> None:
        check_rows(rows)
        for row in rows:
            check_known(row.tokens, self.vocab_size)
            check_fits(self._prompt(row.slot).position + len(row.tokens), self.context_tokens_max)

    def _extend(self, slot: int, sections: Sequence[tuple[int, ...]]) -> None:
        """Append the last of these sections to the others: as it is kept, or read."""
        prompt, section = self._prompts[slot], sections[-1]
        start = prompt.position
        if (stretch := self._kept.get(sections)) is not None:
            with self._forgetting([slot], "a kept section could not be put back"):
                self._store.put(prompt.seat, start, stretch)
            prompt.position += len(section)
        elif section:
            self._read([Row(slot, section, 0)])
            with self._forgetting([slot], "a section could not be kept"):
                self._kept.put(sections, *self._store.taken(prompt.seat, start, prompt.position))

    def _cut(self, prompt: _Prompt, position: int) -> bool:
        surplus = prompt.position - position
        return not surplus or self._store.cut(prompt.seat, position, surplus)

    def _read(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Append the rows; return for each its logits, [outputs, vocab_size]."""
        found: list[list[NDArray[np.float32]]] = [[] for _ in rows]
        tokens = sum(len(row.tokens) for row in rows)
        what = f"the model could not be run on {tokens} tokens"
        with self._forgetting([row.slot for row in rows], what):
            for start in range(0, max((len(row.tokens) for row in rows), default=0), CALL_TOKENS_MAX):
                cuts = {n: _cut_out(row, start) for n, row in enumerate(rows) if start < len(row.tokens)}
                for group in self._groups(cuts):
                    for n, states in zip(group, self._called([cuts[n] for n in group]), strict=True):
                        found[n].append(states)
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in found]

    def _groups(self, rows: Mapping[int, Row]) -> Iterator[list[int]]:
        """Split rows into calls: of like length, so that little is padding; it depends on the rows' lengths alone."""
        together = self._store.together
        group: list[int] = []
        real = 0
        for n in sorted(rows, key=lambda n: len(rows[n].tokens)):
            tokens = len(rows[n].tokens)
            area, real = (len(group) + 1) * tokens, real + tokens
            if group and (not together or area > CALL_TOKENS_MAX or area - real > PADDING_TOKENS_MAX):
                yield group
                group, real = [], tokens
            group.append(n)
        if group:
            yield group

    def _called(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Run rows through the model in one call; return for each its outputs."""
        prompts = [self._prompts[row.slot] for row in rows]
        found = self._call(
            [
                Part(prompt.seat, prompt.position, row.tokens, row.outputs)
                for prompt, row in zip(prompts, rows, strict=True)
            ]
        )
        for prompt, row in zip(prompts, rows, strict=True):
            prompt.position += len(row.tokens)
        return found

    @contextmanager
    def _forgetting(self, slots: Sequence[int], what: str) -> Iterator[None]:
        """Whatever fails leaves half a pass behind: these prompts are held no more."""
        try:
            with self._failing(what):
                yield
        except BackendError:
            for slot in slots:
                prompt = self._prompts[slot]
                self._store.forget(prompt.seat)
                prompt.sections, prompt.position = [], 0
                if slot >= self.slots:
                    del self._prompts[slot]
            raise


def _cut_out(row: Row, start: int) -> Row:
    """Return the part of a row from token `start` on that goes through the model at once."""
    tokens = row.tokens[start : start + CALL_TOKENS_MAX]
    end, wanted = start + len(tokens), len(row.tokens) - row.outputs
    return Row(row.slot, tokens, max(0, end - max(start, wanted)))
