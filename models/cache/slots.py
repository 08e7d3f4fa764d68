"""The slots of a backend: one prompt in each, and the forks of them. It does not know where keys and values lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

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
from sds.models.tokenizer.tokenizer import ModelTokenizer, Tokenizer


class HeldPrompt(Protocol):
    """What one slot holds: `position` tokens, `sections` first. `origin`: the slot that a fork descends from."""

    origin: int
    sections: list[tuple[int, ...]]
    position: int


P = TypeVar("P", bound=HeldPrompt)


class SlotBackend(ModelTokenizer, ABC, Generic[P]):
    """What of `Backend` is the same wherever a prompt's keys and values lie: checks, texts, and forks by number."""

    lookahead_tokens_max, rows_may_be_cut = 0, True
    name: str
    fingerprint: str
    context_tokens_max: int
    _path: Path  # of the weights, where others can share them
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
        """Return what a new fork holds: the same as `source`."""

    @abstractmethod
    def _dropped(self, prompt: P) -> None:
        """Give back the keys and values of a fork."""

    @abstractmethod
    def _free(self) -> None:
        """Give back the library's memory, once."""

    def frame(self) -> ChatFrame:
        self._ready()
        return super().frame()

    def forward_one(self, tokens: Sequence[int], *, slot: int = 0) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.run([Row(slot, tokens)])[0][0]
        return logits

    def fork(self, slot: int) -> int:
        """Return a new slot with what `slot` holds. A fork goes when its prompt does."""
        self._ready()
        source = self._prompt(slot)
        if len(self._prompts) - self.slots >= FORKS_MAX:
            raise BackendError(f"more than {FORKS_MAX} forks at once", hint="drop some, or score fewer alternatives")
        forked = self._forked(source)
        fork, self._next_fork = self._next_fork, self._next_fork + 1
        self._prompts[fork] = forked
        return fork

    def drop(self, fork: int) -> None:
        """Give a fork's slot back; one that went with its prompt, or after a failure, may be dropped again."""
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
        """Return the sections that a slot is to hold, its forks dropped. Raises BackendError for what it cannot hold."""
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
        """Return how many leading sections each slot holds of these."""
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
