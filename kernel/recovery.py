"""After a crash: end what nobody holds any more, and learn what became of every order that was in the air."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from sds.kernel import human, intake, record, saga_drive
from sds.kernel.canonical import one_line
from sds.kernel.executor import ExecutionIntent
from sds.kernel.runtime import Kernel
from sds.kernel.saga_flows import mandated

ERROR_CHARS_MAX = 200

# A human's order has a lease of its own: that of the flow they decided about is long over.
_LEASE = "COALESCE((SELECT h.lease_until_ms FROM human_decisions h WHERE h.dfid = f.dfid), f.lease_until_ms)"


@dataclass(frozen=True, slots=True)
class Recovered:
    """How many flows were found interrupted, and what the orders in the air turned out to be.

    `leased`: flows left alone because their holder may still be alive; recover again when their lease is over.
    `sagas_dirty`: sagas of which something was done, and whose compensation a model must choose.
    `errors`: one line for each order that could not be recovered, and is as it was: its flow and what was raised.
    """

    interrupted: int = 0
    success: int = 0
    failed: int = 0
    unknown: int = 0
    leased: int = 0
    sagas_ended: int = 0
    sagas_dirty: int = 0
    errors: tuple[str, ...] = ()


def recover(kernel: Kernel, *, now_ms: int) -> Recovered:
    """Recover one gate. Flows whose holder may still be alive (lease not over) are left alone. Safe to repeat.

    One order that cannot be recovered does not keep the others from it.
    """
    interrupted = _interrupt_orphans(kernel, now_ms)
    counts: Counter[str] = Counter()
    errors: list[str] = []
    for intent in orders_in_the_air(kernel, now_ms):
        try:
            still_valid = partial(human.still_valid, mandated(kernel, intent.dfid))
            counts[kernel.dispatcher.resolve(intent, still_valid)] += 1
        except Exception as error:  # noqa: BLE001  whatever is wrong with one order, the next is looked up all the same
            kernel.log("recovery.failed", {"dfid": intent.dfid, "error": type(error).__name__})
            errors.append(one_line(f"{intent.dfid}: {type(error).__name__}: {error}", ERROR_CHARS_MAX))
    ended, dirty = saga_drive.recover(kernel, now_ms=now_ms)
    leased = kernel.store.value(
        "SELECT count(*) FROM decision_flows f LEFT JOIN execution_log e ON e.dfid = f.dfid WHERE f.gate = ?"
        " AND (f.state = 'ACTIVE' OR (f.state = 'EXECUTING' AND e.status = 'PENDING'))"
        f" AND {_LEASE} >= ?",
        (kernel.contract.gate, now_ms),
    )
    return Recovered(
        interrupted, counts["SUCCESS"], counts["FAILED"], counts["UNKNOWN"], leased, ended, dirty, tuple(errors)
    )


def _interrupt_orphans(kernel: Kernel, now_ms: int) -> int:
    store = kernel.store
    with store.transaction():
        orphans = store.rows(
            "SELECT dfid FROM decision_flows WHERE state = 'ACTIVE' AND gate = ? AND lease_until_ms < ?"
            " AND dfid NOT IN (SELECT dfid FROM sagas)",
            (kernel.contract.gate, now_ms),
        )
        for (dfid,) in orphans:
            intake.interrupt(store, dfid, now_ms=now_ms)
    return len(orphans)


def orders_in_the_air(kernel: Kernel, now_ms: int) -> list[ExecutionIntent]:
    """Return every order whose outcome nobody knows and whose sender is gone, oldest first."""
    rows = kernel.store.rows(
        "SELECT e.dfid FROM decision_flows f JOIN execution_log e ON e.dfid = f.dfid"
        " WHERE f.state = 'EXECUTING' AND f.gate = ?"
        f" AND (e.status = 'UNKNOWN' OR (e.status = 'PENDING' AND {_LEASE} < ?)) ORDER BY e.reserved_at_ms",
        (kernel.contract.gate, now_ms),
    )
    return [order for (dfid,) in rows if (order := record.read_order(kernel.store, dfid)) is not None]
