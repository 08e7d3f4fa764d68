"""Whether the record knows all that was ordered in its name: asked before the first order after the record is opened.

A record that was put back from a backup, or begun anew, knows less than the outside: what it would pay may be paid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from sds.kernel.errors import WorldError
from sds.kernel.executor.breaker import EXECUTOR_DOWN
from sds.kernel.executor.statement import CLOCKS_APART_MS, Statement, known_keys
from sds.kernel.locks import acquired
from sds.kernel.storage.store import Generation, Reader

RECORD_BEHIND = "RECORD_BEHIND"
LEDGER_ALTERED, KEY_LOST = "LEDGER_ALTERED", "KEY_LOST"  # why a host stops a record (`Wholeness.stopped`)
PAUSE_MS_MIN, PAUSE_MS_MAX = 1_000, 30_000  # the pause after an unreadable statement; each further one doubles it
DOUBLINGS_MAX = 5  # enough to reach PAUSE_MS_MAX
SERVER_REPLACED = "the record's server was replaced: orders of the one before may still be sent for {} ms"

# The order with the latest time, and whether the clock was set back since: only then it may not be the last order.
_LATEST_ORDER = (
    "SELECT l.at_ms, EXISTS (SELECT 1 FROM clock_steps s WHERE s.idx > l.idx) FROM execution_log e"
    " CROSS JOIN decision_flows f ON f.dfid = e.dfid CROSS JOIN ledger l ON l.dfid = e.dfid AND l.kind = 'RESERVED'"
    " WHERE f.gate = ? ORDER BY e.reserved_at_ms DESC LIMIT 1"
)
_LAST_ORDER = (
    "SELECT l.at_ms FROM ledger l JOIN decision_flows f ON f.dfid = l.dfid"
    " WHERE l.kind = 'RESERVED' AND f.gate = ? ORDER BY l.idx DESC LIMIT 1"
)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why nothing may be ordered yet."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """`times` statements in a row could not be read. Until `due_ms` nobody asks for another."""

    doubt: Doubt
    times: int
    due_ms: int

    def holds(self, now_ms: int) -> bool:
        """Tell whether it is too early to ask again. A clock that was set back does not lengthen the pause."""
        return self.due_ms - PAUSE_MS_MAX <= now_ms < self.due_ms


class Wholeness:
    """The answer for one open record and one executor. A yes is remembered while the record stays the same one
    (`generation`). A no is asked again each time. When nobody can tell, the answer holds for a pause.

    `statement`: lists the executor's orders (`Dispatcher.statement`); None: it cannot. `sent_within_ms`: how long after its
    reservation an order may still arrive outside. Threads may share this object: one asks and the others wait for its
    answer, unless the last statement could not be read.

    `stopped`: set by a host that finds the record altered or its key lost, and None again once it is as it was. Meanwhile nothing
    is ordered, looked up for recovery or taken back, by whom ever: each asks here.
    """

    def __init__(
        self,
        record: Reader,
        gate: str,
        statement: Statement | None,
        *,
        now_ms: Callable[[], int],
        sent_within_ms: int = 0,
    ) -> None:
        self._record, self._gate, self._statement = record, gate, statement
        self._now_ms, self._sent_within_ms = now_ms, sent_within_ms
        self._lock = threading.RLock()
        self._whole: Generation | None = None  # the record that was found whole; None: none yet, or it is behind
        self._before: Generation | None = None  # the last record that was found whole
        self._replaced: tuple[Generation, int] | None = None  # the record in its place, and when it was first seen
        self._unreadable: Unreadable | None = None
        self.stopped: Doubt | None = None

    @property
    def holds(self) -> bool:
        """Tell whether the record that the caller's transaction writes is the one that `doubt` found whole, and not `stopped`."""
        return self.stopped is None and (self._statement is None or self._whole == self._record.generation)

    def refuse_stopped(self) -> None:
        if (why := self.stopped) is not None:
            raise WorldError(why.message, reason_code=why.code)

    def doubt(self) -> Doubt | None:
        """Return why nothing may be ordered yet; None: the record is whole, or its executor cannot tell.

        It asks the executor, so it must not be called inside a transaction.
        """
        if self.stopped is not None:
            return self.stopped
        if self._statement is None or self._whole == (generation := self._record.generation):
            return None
        last = self._unreadable
        with acquired(self._lock, threading.TIMEOUT_MAX if last is None else 0) as free:
            if last is not None and not free:  # another thread asks again: no need to wait for it
                return last.doubt
            if self._whole == generation:
                return None
            if (last := self._unreadable) is not None and last.holds(self._now_ms()):
                return last.doubt
            doubt = self._on_its_way(generation) or self._compare(self._statement)
            self._whole = None if doubt else generation
            self._before = self._whole or self._before
        return doubt

    def _on_its_way(self, generation: Generation) -> Doubt | None:
        """Return why it is too early to compare: an order that a lost server had reserved may still be on its way."""
        if self._before is None or not generation.replaced(self._before):
            return None
        now_ms = self._now_ms()
        if self._replaced is None or self._replaced[0] != generation or now_ms < self._replaced[1]:
            self._replaced = generation, now_ms
        left_ms = self._replaced[1] + self._sent_within_ms - now_ms
        return Doubt(RECORD_BEHIND, SERVER_REPLACED.format(left_ms)) if left_ms > 0 else None

    def _compare(self, statement: Statement) -> Doubt | None:
        """Look the statement's keys up in the record; return why orders may be missing there, or why nobody can tell."""
        now_ms = self._now_ms()
        try:
            lines = statement(self._since_ms(now_ms), now_ms + CLOCKS_APART_MS)
        except WorldError as error:
            times = self._unreadable.times if self._unreadable else 0
            pause_ms = min(PAUSE_MS_MIN << min(times, DOUBLINGS_MAX), PAUSE_MS_MAX)
            self._unreadable = Unreadable(Doubt(EXECUTOR_DOWN, str(error)), times + 1, self._now_ms() + pause_ms)
            return self._unreadable.doubt
        self._unreadable = None
        keys = {line.key for line in lines}
        unknown = len(keys - known_keys(self._record, keys))
        if not unknown:
            return None
        orders = f"{unknown} order{'' if unknown == 1 else 's'}"
        why = (
            f"the outside has {orders} that this record does not know: the record was restored from a backup, or"
            " another program orders there (sds reconcile --adopt)"
        )
        return Doubt(RECORD_BEHIND, why)

    def _since_ms(self, now_ms: int) -> int:
        """Return from when on the statement is needed: a record that was cut off knows everything up to its last order.

        What operators wrote since does not count, and neither does a clock that was ahead.
        """
        last_ms, set_back = self._record.row(_LATEST_ORDER, (self._gate,)) or (None, False)
        if set_back:
            last_ms = self._record.value(_LAST_ORDER, (self._gate,))
        return 0 if last_ms is None else max(0, min(int(last_ms), now_ms) - CLOCKS_APART_MS)
