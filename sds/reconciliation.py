"""Compares a gate's record with its executor's statement, once or on a schedule, and adopts orders that the record lacks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sds.kernel.errors import SdsError, UsageError
from sds.kernel.executor.statement import CLOCKS_APART_MS, Comparison, compare
from sds.kernel.flow.dispatch import Log, no_log
from sds.kernel.flow.kernel import Kernel
from sds.kernel.human.statement_cases import open_cases
from sds.kernel.operations import adoption

EVERY_S_MIN = 1.0
WHOLE_EVERY_MS = 24 * 3_600_000
STOP_S = 5.0


def reconcile(
    kernel: Kernel, *, since_ms: int = 0, until_ms: int | None = None, now_ms: Callable[[], int], log: Log = no_log
) -> Comparison:
    """Compare the orders of a time span with the executor's statement, and open a case for each new difference.

    Raises UsageError where the executor offers no statement, WorldError where it cannot be read.
    """
    found = _compared(kernel, since_ms, until_ms, now_ms())
    opened = open_cases(kernel.store, kernel.contract, found.differences, now_ms=now_ms())
    facts = {"orders": found.orders, "lines": found.lines, "in_the_air": found.in_flight}
    log("reconcile.compared", {**facts, "differences": len(found.differences), "cases": len(opened)})
    for dfid in opened:
        log("statement.differs", {"dfid": dfid})
    return found


def _compared(kernel: Kernel, since_ms: int, until_ms: int | None, now_ms: int) -> Comparison:
    until_ms = now_ms + CLOCKS_APART_MS if until_ms is None else until_ms
    gate, statement = kernel.contract.gate, kernel.dispatcher.statement
    return compare(kernel.store, gate, statement, since_ms=since_ms, until_ms=until_ms)


def adopt(
    kernel: Kernel,
    *,
    since_ms: int = 0,
    until_ms: int | None = None,
    who: str,
    reason: str,
    now_ms: Callable[[], int],
) -> tuple[str, ...]:
    """Take over every order of a time span that the outside has and the record does not know; return their flows."""
    found = _compared(kernel, since_ms, until_ms, now_ms())
    return adoption.adopt(kernel, found.differences, who=who, reason=reason, now_ms=now_ms())


class Schedule:
    """Compares every `every_s` seconds in a thread of its own: everything at first and once a day, for an order may be
    reversed weeks later, and what is newer than the last time in between.

    A failure is logged, and the next comparison tries again.
    """

    def __init__(self, kernel: Kernel, *, every_s: float, now_ms: Callable[[], int], log: Log) -> None:
        if not isinstance(every_s, int | float) or not EVERY_S_MIN <= every_s <= threading.TIMEOUT_MAX:
            hint = f"give a number of seconds, at least {EVERY_S_MIN}"
            raise UsageError(f"`{every_s}` is not a time between two comparisons", hint=hint)
        if not kernel.dispatcher.executor.lists:
            raise UsageError(
                "this executor offers no statement", hint="add `statement(since_ms, until_ms)` to the executor"
            )
        self._kernel, self._every_s, self._now_ms, self._log = kernel, every_s, now_ms, log
        self._closed = threading.Event()
        self._compared_ms = self._whole_ms = 0
        self._worker = threading.Thread(target=self._work, name="sds-reconcile", daemon=True)  # an executor may hang
        self._worker.start()

    def close(self) -> None:
        """Compare no more; wait at most STOP_S seconds for a comparison under way."""
        self._closed.set()
        self._worker.join(STOP_S)

    def _work(self) -> None:
        while not self._closed.is_set():
            self._compare()
            self._closed.wait(self._every_s)

    def _compare(self) -> None:
        began_ms = self._now_ms()
        try:
            whole = not 0 <= began_ms - self._whole_ms < WHOLE_EVERY_MS  # below 0: the clock was set back
            if whole:
                self._whole_ms = began_ms  # if it fails, short ones follow until tomorrow
            since_ms = 0 if whole else max(0, self._compared_ms - CLOCKS_APART_MS)
            reconcile(self._kernel, since_ms=since_ms, now_ms=self._now_ms, log=self._log)
            self._compared_ms = began_ms
        except SdsError as error:
            self._log("statement.unreadable", {"reason": error.reason_code})
        except Exception as error:  # noqa: BLE001  a clock or a log may fail; the next comparison may succeed
            self._log("statement.unreadable", {"reason": type(error).__name__})
