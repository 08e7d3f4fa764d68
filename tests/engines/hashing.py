"""A model in a few lines: logits are a hash of everything its slot holds. It counts what it reads, and fails on demand."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from sds.models.cache.prefix_cache import shared_sections
from sds.models.protocol import BackendError, ChatFrame, Row

VOCAB = 17
Logits = NDArray[np.float32]


class HashBackend:
    """`begun`: (slot, sections kept, sections read) of each `begin`; `passes`: the rows of each. `gate` holds passes up.

    Worn after `wear_max` tokens; a rest forgets everything, so that whoever was under way is told.
    """

    name, fingerprint = "hash", "0" * 64
    vocab_size, context_tokens_max, lookahead_tokens_max = VOCAB, 4096, 0

    def __init__(
        self, slots: int, *, pass_tokens_max: int = 512, wear_max: int = 1 << 30, rows_may_be_cut: bool = True
    ) -> None:
        self.rows_may_be_cut = rows_may_be_cut
        self.slots, self.pass_tokens_max, self._wear_max = slots, pass_tokens_max, wear_max
        self._read = 0
        self.begun: list[tuple[int, int, int]] = []
        self.passes: list[list[Row]] = []
        self.forks_open = self.rests = 0
        self.closed = False
        self.fails_at: set[int] = set()  # passes, by their number
        self.gate = threading.Event()
        self.gate.set()
        self.waits = threading.Event()  # a pass stands at the gate
        self._clear()

    def _clear(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._sections: dict[int, list[tuple[int, ...]]] = {}
        self.forks_open = 0

    def is_cached(self, sections: Sequence[Sequence[int]]) -> bool:
        wanted = [tuple(section) for section in sections]
        return any(shared_sections(wanted, own) == len(wanted) for own in self._sections.values())

    def prefill(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        wanted = [tuple(section) for section in sections]
        held = [(shared_sections(wanted, own), at) for at, own in self._sections.items()]
        kept = max(held, default=(0, 0))[0]
        self.begun.append((slot, kept, len(wanted) - kept))
        self._sections[slot] = wanted
        self._texts[slot] = [token for section in wanted for token in section]

    def run(self, rows: Sequence[Row]) -> list[Logits]:
        self.passes.append(list(rows))
        if not self.gate.is_set():
            self.waits.set()
            self.gate.wait(10)
        if len(self.passes) - 1 in self.fails_at:
            self._clear()
            raise BackendError("the model could not be run", hint="look at the memory")
        if len({row.slot for row in rows}) != len(rows):
            raise BackendError("two rows of one slot")
        return [self._row(row) for row in rows]

    def _row(self, row: Row) -> Logits:
        text = self._texts[row.slot]  # KeyError: whoever runs without having begun would decide on nothing
        text += row.tokens
        self._read += len(row.tokens)
        ends = range(len(text) - row.outputs + 1, len(text) + 1)
        return np.stack([hashed(text[:end]) for end in ends]) if row.outputs else np.empty((0, VOCAB), np.float32)

    @property
    def fragmented(self) -> bool:
        return self._read >= self._wear_max

    def defragment(self) -> None:
        self.rests += 1
        self._read = 0
        self._clear()

    def forward_one(self, tokens: Sequence[int], *, slot: int = 0) -> Logits:
        return self.run([Row(slot, tokens)])[0][0]

    def fork(self, slot: int) -> int:
        fork = next(n for n in range(self.slots, 999) if n not in self._texts)
        self._texts[fork] = self._texts[slot].copy()
        self.forks_open += 1
        return fork

    def drop(self, fork: int) -> None:
        if self._texts.pop(fork, None) is not None:
            self.forks_open -= 1

    def close(self) -> None:
        self.closed = True

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return [byte % VOCAB for byte in text]

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def frame(self) -> ChatFrame:
        raise NotImplementedError


def hashed(text: Sequence[int]) -> Logits:
    return np.random.default_rng(crc32(bytes(text))).standard_normal(VOCAB).astype(np.float32)


def writing(
    backend: HashBackend, slot: int, sections: Sequence[Sequence[int]], length: int, *, forks: int = 0
) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
    """Write `length` tokens, each the best; with `forks` the first is the best of as many continuations."""
    backend.prefill(sections[:-1], slot=slot)
    open_forks: list[int] = []
    try:
        (logits,) = yield [Row(slot, list(sections[-1]))]
        written = [int(logits[-1].argmax())]
        if forks:
            open_forks += [backend.fork(slot) for _ in range(forks)]
            scored = yield [Row(fork, [token]) for token, fork in enumerate(open_forks)]
            written = [int(np.argmax([row[-1].max() for row in scored]))]
            while open_forks:
                backend.drop(open_forks.pop())
        while len(written) < length:
            (logits,) = yield [Row(slot, written[-1:])]
            written.append(int(logits[-1].argmax()))
        return tuple(written)
    finally:
        for fork in open_forks:
            backend.drop(fork)
