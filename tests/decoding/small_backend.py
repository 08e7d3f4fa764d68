"""A model whose logits are a hash of the tokens so far: any number of slots and forks, in microseconds, exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sds.decoding.decoder import Deciding, Decoded, Mode, as_model_error, deciding
from sds.decoding.errors import BACKEND_FAILED
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.grammars.tokens.matcher import TokenMatcher
from sds.kernel.envelope.envelope import DecisionEnvelope
from sds.kernel.errors import ModelError
from sds.models.protocol import PLAIN_FRAME, Backend, BackendError, ChatFrame, Row
from tests.model_fixtures import CONTEXT_REF

PIECES = (
    *(bytes([byte]) for byte in range(256)),
    *b'CO MPENS ATE DEN REF UND VOU CHER CREW WEATHER _SEV PAY _LA TER GOOD REVIEW {" ": ":" "," ":{ }, action'.split(),
    *b"params reason code _ref rationale amount HUMAN ESC CAN TION LONG DELAY".split(),
)
_BY_PIECE = {piece: token for token, piece in enumerate(PIECES)}
_LONGEST = max(map(len, PIECES))


def _rng(seed: int, tokens: Sequence[int], *more: int) -> np.random.Generator:
    named = hashlib.sha256(repr((seed, list(map(int, tokens)), more)).encode()).digest()
    return np.random.default_rng(int.from_bytes(named[:8], "big"))


@lru_cache(1 << 14)  # a decision is made several times: alone, in company, with and without reading ahead
def _normal(seed: int, tokens: tuple[int, ...], size: int) -> NDArray[np.float32]:
    return _rng(seed, tokens).standard_normal(size, np.float32)


class HashBackend:
    """Spells greedily, the longest piece first. `flatness` shrinks the logits: small ones make ties near."""

    name, fingerprint, context_tokens_max, pass_tokens_max = "hash", "0" * 64, 10_000, 512
    vocab_size, rows_may_be_cut = len(PIECES), True

    def __init__(
        self, seed: int = 0, *, slots: int = 1, spread: float = 4.0, forks_max: int = 63, lookahead_tokens_max: int = 0
    ) -> None:
        self.lookahead_tokens_max = lookahead_tokens_max
        self.slots, self._seed, self._spread, self._forks_max = slots, seed, spread, forks_max
        self.held: dict[int, list[int]] = {slot: [] for slot in range(slots)}
        self.passes: list[list[Row]] = []
        self.forks_held_max = 0

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        found, at = [], 0
        while at < len(text):
            size = next(n for n in range(_LONGEST, 0, -1) if text[at : at + n] in _BY_PIECE)
            found.append(_BY_PIECE[text[at : at + size]])
            at += len(PIECES[found[-1]])
        return found

    def piece(self, token: int) -> bytes:
        return PIECES[token]

    def frame(self) -> ChatFrame:
        return PLAIN_FRAME

    def is_cached(self, sections: Sequence[Sequence[int]]) -> bool:
        return False

    def prefill(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        self.held[slot] = [token for section in sections for token in section]

    def forward_one(self, tokens: Sequence[int], *, slot: int = 0) -> NDArray[np.float32]:
        return self.run([Row(slot, tokens)])[0][-1]

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        self.passes.append(list(rows))
        if len({row.slot for row in rows}) < len(rows) or not all(row.tokens for row in rows):
            raise BackendError("a row is empty, or its slot stands twice")
        return [self._append(row, rows) for row in rows]

    def _append(self, row: Row, rows: Sequence[Row]) -> NDArray[np.float32]:
        start = len(self.held[row.slot])
        self.held[row.slot] += row.tokens
        ends = range(start + len(row.tokens) - row.outputs + 1, start + len(row.tokens) + 1)
        return np.array([self.logits(self.held[row.slot][:end], rows) for end in ends], np.float32)

    def logits(self, tokens: Sequence[int], rows: Sequence[Row]) -> NDArray[np.float32]:
        return _normal(self._seed, tuple(tokens), self.vocab_size) * np.float32(self._spread)

    def fork(self, slot: int) -> int:
        taken = len(self.held) - self.slots
        if taken >= self._forks_max:
            raise BackendError("no more forks")
        new = next(fork for fork in range(self.slots, self.slots + self._forks_max) if fork not in self.held)
        self.held[new] = list(self.held[slot])
        self.forks_held_max = max(self.forks_held_max, taken + 1)
        return new

    def drop(self, fork: int) -> None:
        if fork < self.slots or self.held.pop(fork, None) is None:
            raise BackendError("there is no such fork")

    @property
    def forks_held(self) -> int:
        return len(self.held) - self.slots

    @property
    def fragmented(self) -> bool:
        return False

    def defragment(self) -> None:
        pass

    def close(self) -> None:
        pass


class Disturbed(HashBackend):
    """Adds noise to the logits of a row that has company: at most `noise_logp_max` to any log-probability."""

    def __init__(self, seed: int, *, noise_logp_max: float, **options: Any) -> None:
        super().__init__(seed, **options)
        self._noise = noise_logp_max

    def logits(self, tokens: Sequence[int], rows: Sequence[Row]) -> NDArray[np.float32]:
        plain = super().logits(tokens, rows)
        if len(rows) < 2:
            return plain
        noise = _rng(self._seed, tokens, len(self.passes)).uniform(-self._noise, self._noise, self.vocab_size) / 2
        return (plain + 0.999 * noise).astype(np.float32)  # the rounding of the sum stays within the last thousandth


_COMPILER = GrammarCompiler(HashBackend())


def matcher_of(backend: Backend, envelope: DecisionEnvelope) -> TokenMatcher:
    """Return a matcher of an envelope. Backends of hashes have one vocabulary: a shape is compiled once for all of them."""
    compiler = _COMPILER if getattr(type(backend), "piece", None) is HashBackend.piece else GrammarCompiler(backend)
    return compiler.matcher(envelope, CONTEXT_REF)


def decode(
    backend: Backend,
    sections: Sequence[Sequence[int]],
    matcher: TokenMatcher,
    *,
    tokens_max: int,
    mode: Mode = "greedy",
) -> Decoded:
    """Decide once, alone, in slot 0; raises ModelError as `deciding` does, and for whatever fails in a pass."""
    run = deciding(backend, 0, sections, matcher, tokens_max=tokens_max, mode=mode)
    advance: Callable[[], list[Row]] = partial(next, run)
    with closing(run):
        while True:
            try:
                rows = advance()
            except StopIteration as end:
                decoded: Decoded = end.value
                return decoded
            with as_model_error(BACKEND_FAILED, "the model"):
                advance = partial(run.send, backend.run(rows))


def together(backend: HashBackend, decisions: Sequence[Deciding]) -> list[Decoded | ModelError]:
    """Run decisions in common passes, every one that still goes on in each, until all have ended."""
    ends: dict[int, Decoded | ModelError] = {}
    wanted: dict[int, list[Row]] = {}

    def advance(index: int, found: list[NDArray[np.float32]] | None) -> None:
        try:
            wanted[index] = next(decisions[index]) if found is None else decisions[index].send(found)
        except StopIteration as end:
            ends[index] = end.value
        except ModelError as error:
            ends[index] = error

    for index in range(len(decisions)):
        advance(index, None)
    while wanted:
        riding, wanted = wanted, {}
        found = iter(backend.run([row for rows in riding.values() for row in rows]))
        for index, rows in riding.items():
            advance(index, [next(found) for _ in rows])
    return [ends[index] for index in range(len(decisions))]
