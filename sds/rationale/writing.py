"""The rationale after the decision, from a model that is deciding other cases meanwhile.

The model reads what it read, what it decided, and says why: greedy, in the alphabet and length of a rationale. Where the
model has one cache, a decision that comes has the next pass, and the text goes on when nobody waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from sds.decoding.errors import LOGITS_INVALID, TOKEN_BUDGET_EXCEEDED
from sds.engines.queueing import FairPool, QueueTimeoutError
from sds.grammars.tokens.text import TextTokens
from sds.kernel.errors import ModelError
from sds.models.protocol import Backend, Row

if TYPE_CHECKING:
    from numpy.typing import NDArray

WAIT_S_MAX = 60.0
LATE = "there was no time for a rationale"
Explaining = Generator[list[Row], list["NDArray[np.float32]"], str]


def lead_of(data: bytes) -> bytes:
    """Return the decision as the model is shown it again, up to the text it is to write; its reference is a hash."""
    return data.rpartition(b',"context_ref":')[0] + b',"rationale":"'


def explaining(
    tokens: Sequence[int], text: TextTokens, chars_max: int, *, tokens_max: int, slot: int = 0
) -> Explaining:
    """Write one text after `tokens`: yield the row of the next pass, be sent its logits, return the text.

    The slot holds what comes before `tokens` already, and has room for `tokens_max` more. Raises ModelError when that
    is not enough, which no pass is to find out: it would fail for all in it; and when the model returns no logits.
    """
    written, left = "", tokens_max
    while True:
        left -= len(tokens)
        if left < 0:
            raise ModelError("there is no room for the whole rationale", reason_code=TOKEN_BUDGET_EXCEEDED)
        (logits,) = yield [Row(slot, tokens)]
        ids = text.allowed(chars_max - len(written))
        if logits.shape[-1] <= ids.max() or not np.isfinite(logits).all():
            raise ModelError("the model returned numbers that are no logits", reason_code=LOGITS_INVALID)
        token = int(ids[logits.reshape(-1, logits.shape[-1])[-1][ids].argmax()])
        added, ended = text.read(token)
        written += added
        if ended:
            return written
        tokens = [token]


class PriorityLock:
    """Who runs the next pass of a model with one cache: a decision, whenever one waits.

    `holder`: the writing whose text the cache holds; None once a decision has had it.
    """

    def __init__(self) -> None:
        self._cache, self._changed = FairPool(None), threading.Condition()
        self._wanted = 0
        self.holder: object | None = None

    @contextmanager
    def decision(self, wait_s: float = threading.TIMEOUT_MAX) -> Iterator[None]:
        """Wait for the cache. Raises NoTurnError when that takes longer."""
        with self._changed:
            self._wanted += 1
        try:
            with self._cache.lent(wait_s, "the model was not free in time"):
                self.holder = None
                yield
        finally:
            with self._changed:
                self._wanted -= 1
                self._changed.notify_all()

    @contextmanager
    def between(self, left_s: Callable[[], float]) -> Iterator[None]:
        """Wait until no decision does, and for the cache. Raises NoTurnError when no time is left for that."""
        with self._changed:
            free = (wait_s := left_s()) > 0 and self._changed.wait_for(
                lambda: not self._wanted, min(wait_s, WAIT_S_MAX)
            )
        if not free:
            raise QueueTimeoutError(LATE)
        with self._cache.lent(min(left_s(), WAIT_S_MAX), LATE):
            yield


def run_between(
    writing: Explaining,
    backend: Backend,
    prefix: Sequence[Sequence[int]],
    turns: PriorityLock,
    *,
    left_s: Callable[[], float],
    check: Callable[[], None],
) -> str:
    """Drive `explaining` after the sections `prefix`, one pass a turn; `check` is called before each, to stop it."""
    said = list[int]()
    (row,) = next(writing)
    while True:
        said += row.tokens
        with turns.between(left_s):
            check()
            if turns.holder is writing:
                logits = backend.forward_one(row.tokens)
            else:  # the first pass, or a decision or another writing has had the cache since
                turns.holder = writing
                backend.prefill(prefix)
                logits = backend.forward_one(said)
            try:  # in the same turn: it asks the tokenizer, which is for one thread
                (row,) = writing.send([logits])
            except StopIteration as ended:
                return str(ended.value)
