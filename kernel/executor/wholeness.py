"""Whether the record knows all that was ordered in its name: asked before the first order after it is opened.

A record that was put back from a backup, or begun anew, knows less than the outside. What it would pay may be paid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from sds.kernel.errors import WorldError
from sds.kernel.executor.breaker import EXECUTOR_DOWN
from sds.kernel.executor.statement import CLOCKS_APART_MS, Statement, known_keys
from sds.kernel.storage.store import Reader

RECORD_BEHIND = "RECORD_BEHIND"
_NOT_YET: object = object()  # no record's generation

_LAST_ORDER = (
    "SELECT l.at_ms FROM ledger l JOIN decision_flows f ON f.dfid = l.dfid"
    " WHERE l.kind = 'RESERVED' AND f.gate = ? ORDER BY l.idx DESC LIMIT 1"
)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why nothing may be ordered yet."""

    code: str
    message: str


class Wholeness:
    """Of one open record and one executor. That it is whole is remembered for as long as it is that record (`generation`),
    that it is not is asked again each time.

    `statement`: lists what the executor was ordered (`Dispatcher.statement`); None where it cannot. Safe in several
    threads: one asks, the others wait for its answer.
    """

    def __init__(self, record: Reader, gate: str, statement: Statement | None, *, now_ms: Callable[[], int]) -> None:
        self._record, self._gate, self._statement, self._now_ms = record, gate, statement, now_ms
        self._lock, self._whole = threading.Lock(), _NOT_YET

    def doubt(self) -> Doubt | None:
        """Return why nothing may be ordered yet, None when the record is whole or its executor cannot tell.

        It asks the executor: never inside a transaction.
        """
        if self._statement is None or self._whole == (generation := self._record.generation):
            return None
        with self._lock:
            if self._whole == generation:
                return None
            doubt = self._compare(self._statement)
            self._whole = _NOT_YET if doubt else generation
        return doubt

    def _compare(self, statement: Statement) -> Doubt | None:
        now_ms = self._now_ms()
        try:
            lines = statement(self._since_ms(now_ms), now_ms + CLOCKS_APART_MS)
        except WorldError as error:
            return Doubt(EXECUTOR_DOWN, str(error))
        keys = {line.key for line in lines}
        unknown = len(keys - known_keys(self._record, keys))
        if not unknown:
            return None
        orders = f"{unknown} order{'' if unknown == 1 else 's'}"
        why = (
            f"the outside has {orders} that this record does not know: it was restored from a backup, or something else"
            f" orders there (sds reconcile {self._gate} --adopt)"
        )
        return Doubt(RECORD_BEHIND, why)

    def _since_ms(self, now_ms: int) -> int:
        """Return from when on to look: a record that was cut off somewhere knows all up to its last order.

        What operators wrote since does not count, and neither does a clock that was ahead.
        """
        last_ms = self._record.value(_LAST_ORDER, (self._gate,))
        return 0 if last_ms is None else max(0, min(int(last_ms), now_ms) - CLOCKS_APART_MS)
