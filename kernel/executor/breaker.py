"""The circuit breaker of a gate's executor: after a few orders in a row that it did not answer, none is sent.

    closed  orders go out
    open    nothing new is reserved, and events wait; every `PROBE_MS` one order is let through, as a probe
    closed  again as soon as the executor gives any definite answer, to the probe or to recovery

The state is a row of the record, so that every process of a gate sees the same. The ledger does not prove it. Everything
here that writes runs inside the caller's transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from sds.kernel.storage.store import Reader, Store

EXECUTOR_DOWN = "EXECUTOR_DOWN"  # the tag of a flow that finds the breaker open: its event waits
FAILURES_MAX = 3
PROBE_MS = 5_000
_KEEP = (
    "INSERT INTO executor_breakers VALUES (?, ?, ?, ?) ON CONFLICT (gate) DO UPDATE"
    " SET failures = excluded.failures, opened_at_ms = excluded.opened_at_ms, probe_at_ms = excluded.probe_at_ms"
)


@dataclass(frozen=True, slots=True)
class Breaker:
    """One gate's breaker. `failures`: unanswered orders in a row. `opened_at_ms`: since when it is open, None while it is
    closed. `probe_at_ms`: when the next order may try.
    """

    failures: int = 0
    opened_at_ms: int | None = None
    probe_at_ms: int = 0

    @property
    def is_open(self) -> bool:
        return self.opened_at_ms is not None

    @property
    def text(self) -> str:
        """Its state in one line."""
        if self.opened_at_ms is not None:
            since = datetime.fromtimestamp(self.opened_at_ms / 1000, UTC).isoformat(timespec="seconds")
            return f"has not answered {self.failures} orders in a row: events wait since {since}, probes are sent"
        return f"did not answer the last {self.failures} orders" if self.failures else "answers"


def read(store: Reader, gate: str) -> Breaker:
    row = store.row("SELECT failures, opened_at_ms, probe_at_ms FROM executor_breakers WHERE gate = ?", (gate,))
    return Breaker(*row) if row else Breaker()


def lets_through(store: Store, gate: str, now: Breaker, now_ms: int) -> bool:
    """Tell whether an order may be reserved now. While the breaker is open, one order every `PROBE_MS` may: the probe.

    `now`: its state in this transaction. A clock that was set back delays the probe by at most `PROBE_MS`.
    """
    if not now.is_open:
        return True
    if now_ms < now.probe_at_ms <= now_ms + PROBE_MS:
        return False
    store.run("UPDATE executor_breakers SET probe_at_ms = ? WHERE gate = ?", (now_ms + PROBE_MS, gate))
    return True


def answered(store: Store, gate: str) -> bool:
    """Reset the breaker: the executor has answered. Return whether that closes it."""
    was = read(store, gate)
    if was.failures:
        store.run("DELETE FROM executor_breakers WHERE gate = ?", (gate,))
    return was.is_open


def unanswered(store: Store, gate: str, now_ms: int) -> bool:
    """Count an order that the executor did not answer. Return whether that opens the breaker."""
    was = read(store, gate)
    failures = was.failures + 1
    opens = not was.is_open and failures >= FAILURES_MAX
    since_ms = now_ms if opens else was.opened_at_ms
    probe_ms = now_ms + PROBE_MS if since_ms is not None else 0
    store.run(_KEEP, (gate, failures, since_ms, probe_ms))
    return opens
