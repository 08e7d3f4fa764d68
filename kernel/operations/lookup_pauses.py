"""When to ask again about an order whose end nobody knows: at once, then after pauses that double up to an hour.

Meanwhile the order waits for a human, too (`human.cases.waiting`). The pauses are rows of the record, so that every process
of a gate keeps to them, also after a restart; the ledger does not prove them. A reversal uses the row of its step.
"""

from __future__ import annotations

from sds.kernel.storage.store import Reader, Store

PAUSE_MS_MIN = 5_000
PAUSE_MS_MAX = 3_600_000  # reached after an hour and a half
DOUBLINGS_MAX = 20  # enough to reach PAUSE_MS_MAX, and a limit to the numbers

_NOTED = "SELECT asked, due_at_ms FROM order_lookups WHERE dfid = ?"
_NOTE = (
    "INSERT INTO order_lookups (dfid, asked, due_at_ms) VALUES (?, ?, ?)"
    " ON CONFLICT (dfid) DO UPDATE SET asked = excluded.asked, due_at_ms = excluded.due_at_ms"
)
_ENDED = (
    "FROM order_lookups WHERE NOT EXISTS (SELECT 1 FROM execution_log e WHERE e.dfid = order_lookups.dfid"
    " AND e.status IN ('PENDING', 'UNKNOWN')) AND NOT EXISTS (SELECT 1 FROM saga_reversals r"
    " WHERE r.dfid = order_lookups.dfid AND r.status IN ('PENDING', 'UNKNOWN'))"
)


def is_due(store: Store, dfid: str, now_ms: int) -> bool:
    """Tell whether to ask about a flow's order now, and write that it was asked: of several processes one asks."""
    if _pauses(store, dfid, now_ms) is None:
        return False
    with store.transaction():
        asked = _pauses(store, dfid, now_ms)
        if asked is not None:
            pause_ms = min(PAUSE_MS_MIN << min(asked, DOUBLINGS_MAX), PAUSE_MS_MAX)
            store.run(_NOTE, (dfid, asked + 1, now_ms + pause_ms))
    return asked is not None


def _pauses(store: Reader, dfid: str, now_ms: int) -> int | None:
    """Return how often an order was asked about; None while it is not due. A clock that was set back delays no longer."""
    asked, due_at_ms = store.row(_NOTED, (dfid,)) or (0, 0)
    return None if now_ms < due_at_ms <= now_ms + PAUSE_MS_MAX else int(asked)


def forget_ended(store: Store) -> None:
    """Delete the pauses of orders and reversals whose end is known by now."""
    if store.value(f"SELECT 1 {_ENDED} LIMIT 1") is not None:
        with store.transaction():
            store.run(f"DELETE {_ENDED}")
