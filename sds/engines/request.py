"""A request to the model, from its arrival to its outcome, and its stay in a slot. Knows only rows and tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from sds.decoding.errors import DEADLINE_EXCEEDED
from sds.engines.queueing import CANCELLED, QueueTimeoutError, waited_away
from sds.kernel.errors import ModelError, SdsError
from sds.models.protocol import Backend, Row

if TYPE_CHECKING:
    from numpy.typing import NDArray

WAIT_S_MAX = 1.0  # the longest sleep of a caller before it looks at the clock again
WAIT_S_MIN = 0.001

T = TypeVar("T")
Sections = Sequence[Sequence[int]]
Passes = Generator[list[Row], "list[NDArray[np.float32]]", T]
MakePasses = Callable[[Backend, int], Passes[T]]


class Request(Generic[T]):
    """A generator of passes to be run in some slot, made by `make(backend, slot)`, and its outcome.

    Worker, clock and caller may each end it; the first outcome counts. `deadline_ms`: absolute, on the clock of
    `now_ms`. `sections`: the prompt; the generator begins with all but the last. `background`: it runs only in slots
    that no other request wants, and is made anew after it gave one up. `forget`: called when its caller stops waiting.
    """

    def __init__(
        self,
        make: MakePasses[T],
        sections: Sections,
        deadline_ms: int,
        *,
        now_ms: Callable[[], int],
        forget: Callable[[Request[Any]], None],
        background: bool = False,
    ) -> None:
        self.make, self.deadline_ms, self.background = make, deadline_ms, background
        self.shared = [tuple(section) for section in sections[:-1]]
        self.rows: list[tuple[int, int]] = []  # for each pass its own tokens in it, and the rows of all
        self.restarts = 0
        self.outcome: tuple[T] | SdsError | None = None
        self.admitted_ms: int | None = None  # when it first got a slot
        self._now_ms, self._forget = now_ms, forget
        self._asked_ms, self._asked_s = now_ms(), monotonic()
        self._ended, self._lock = threading.Event(), threading.Lock()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self, outcome: tuple[T] | SdsError) -> None:
        with self._lock:
            if self.outcome is None:
                self.outcome = outcome
                self._ended.set()

    def expired(self, now_ms: int) -> bool:
        """End it when its deadline has passed. Return whether it has ended in any way."""
        if now_ms > self.deadline_ms:
            late = f"the decision is {now_ms - self.deadline_ms} ms past its deadline"
            if self.admitted_ms is None or waited_away(self._asked_ms, self.admitted_ms, self.deadline_ms):
                self.end(QueueTimeoutError(late))
            else:
                self.end(ModelError(late, reason_code=DEADLINE_EXCEEDED))
        return self.ended

    def cancel(self) -> None:
        """End it unless it has ended; its slot is free after the pass that runs now."""
        if not self.ended:
            self.end(ModelError(CANCELLED.message, reason_code=CANCELLED.code))
        self._forget(self)

    def result(self) -> T:
        """Wait for the outcome, at most until the deadline. Raises ModelError. An interrupted wait cancels the request."""
        try:
            while not self.expired(now_ms := self._waiting_ms()):
                self._ended.wait(min(WAIT_S_MAX, max(WAIT_S_MIN, (self.deadline_ms - now_ms) / 1000)))
        finally:
            self.cancel()
        if isinstance(self.outcome, tuple):
            return self.outcome[0]
        assert self.outcome is not None  # noqa: S101  it has ended
        raise self.outcome

    def _waiting_ms(self) -> int:
        """Return the time by the clock; where that stands still or is set back, by how long it waits, a look later."""
        return max(self._now_ms(), self._asked_ms + int((monotonic() - self._asked_s - WAIT_S_MAX) * 1000))


@dataclass(eq=False)
class Running:
    """A request in a slot.

    `reads`: whether shared sections must be read before its first pass. `rows`: the rows, or rests of rows, still to be read
    of this step. `logits`: for each row of the step, those of the parts read so far. `passes_skipped`: in a row, up to now.
    """

    request: Request[Any]
    slot: int
    passes: Passes[Any]
    reads: bool
    rows: list[Row] = field(default_factory=list)
    logits: list[list[NDArray[np.float32]]] = field(default_factory=list)
    begun: bool = False
    passes_skipped: int = 0

    def advance(self) -> None:
        """Send the generator the logits of its last step, and get the rows of the next. Raises what the generator raises."""
        rows = self.passes.send(self._answer()) if self.begun else next(self.passes)
        self.rows, self.logits = rows, [[] for _ in rows]

    @property
    def partly_read(self) -> bool:
        return any(self.logits)

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    def fitting(self, tokens_max: int) -> list[Row]:
        """Return the rows that fit into so many tokens, in order; the last may be cut."""
        fitting = list[Row]()
        for row in self.rows:
            if tokens_max <= 0:
                break
            fitting.append(_first_tokens(row, tokens_max))
            tokens_max -= len(row.tokens)
        return fitting

    def receive(self, parts: list[Row], logits: list[NDArray[np.float32]]) -> bool:
        """Keep the logits of the parts that were read. Return whether all of the step is read."""
        first = len(self.logits) - len(self.rows)
        for n, of_row in enumerate(logits):
            self.logits[first + n].append(of_row)
        left = [_remainder(row, part) for row, part in zip(self.rows, parts, strict=False)]
        self.rows = [row for row in left if row] + self.rows[len(parts) :]
        return not self.rows

    def _answer(self) -> list[NDArray[np.float32]]:
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in self.logits]


def _first_tokens(row: Row, tokens: int) -> Row:
    """Return the first `tokens` tokens of a row, with the outputs among them."""
    later = max(0, len(row.tokens) - tokens)
    return Row(row.slot, row.tokens[:tokens], max(0, row.outputs - later)) if later else row


def _remainder(row: Row, part: Row) -> Row | None:
    """Return the row after its beginning `part`; None where nothing is left."""
    left = row.tokens[len(part.tokens) :]
    return Row(row.slot, left, row.outputs - part.outputs) if left else None
