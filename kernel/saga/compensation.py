"""Undoes an order that was carried out: once, under its own key, and recorded before anything is sent.

What the order drew and spent is given back when the executor has said that it is undone, and never before.
"""

from __future__ import annotations

from collections.abc import Callable

from sds.kernel.errors import StoreError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.executor.wholeness import RECORD_BEHIND
from sds.kernel.flow import decision_record
from sds.kernel.flow.kernel import Kernel
from sds.kernel.registry import reservations
from sds.kernel.saga import state as saga
from sds.kernel.saga.kernels import stopped
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Reader

_ACCEPTED = "SELECT 1 FROM ledger WHERE dfid = ? AND kind = 'REVERSAL' AND json_type(body, '$.accepted') IS NOT NULL"
_STATUS = {"settled": "REVERTED", "rejected": "REFUSED", "pending": "PENDING"}  # any other: UNKNOWN


def reverse(kernel: Kernel, parent: str, dfid: str, *, now_ms: int) -> str:
    """Undo the order of one step. Return REVERTED, REFUSED, UNKNOWN, PENDING while the outside has accepted that and not done
    it yet, or the code of why it may not be undone now.

    A reversal that was begun before is looked up first; one that is settled is not asked for again. Once the saga has
    ended, a human must act, and nothing is sent any more.
    """
    order = decision_record.read_order(kernel.store, dfid)
    if order is None:
        raise StoreError(f"the order of flow `{dfid}` is not in the record", dfid=dfid)
    with kernel.store.transaction():
        known = kernel.store.value("SELECT status FROM saga_reversals WHERE dfid = ?", (dfid,))
        if known in ("REVERTED", "REFUSED"):
            return str(known)
        if kernel.store.value("SELECT phase FROM sagas WHERE dfid = ?", (parent,)) != "DIRTY":
            return saga.MOVED_ON
        if not kernel.whole.holds:  # another record than the one that was found whole
            return RECORD_BEHIND
        if known is None:
            if kernel.store.value("SELECT status FROM execution_log WHERE dfid = ?", (dfid,)) != "SUCCESS":
                return saga.MOVED_ON  # it was contradicted since
            if (code := stopped(kernel, parent)) is not None:
                return code
            _begin(kernel, parent, order, now_ms)
    return settle(kernel, parent, order, kernel.dispatcher.revert(order, sent_before=known is not None), now_ms)


def under_way(store: Reader, parent: str) -> str | None:
    """Return the step of a saga whose reversal has begun and not ended; None: there is none."""
    found: str | None = store.value("SELECT dfid FROM saga_reversals WHERE saga = ? AND status = 'PENDING'", (parent,))
    return found


def look_again(kernel: Kernel, *, now_ms: int, is_due: Callable[[str], bool]) -> list[tuple[str, Exception]]:
    """Look up every due reversal whose outcome is unknown and whose saga has ended. Nothing is sent. Return those that
    could not be looked up, with the error: they do not stop the others.
    """
    failed = list[tuple[str, Exception]]()
    rows = kernel.store.rows(
        "SELECT r.dfid, r.saga FROM saga_reversals r JOIN sagas s ON s.dfid = r.saga"
        " JOIN decision_flows f ON f.dfid = s.dfid"
        " WHERE f.gate = ? AND s.phase = 'ENDED' AND r.status IN ('PENDING', 'UNKNOWN')",
        (kernel.contract.gate,),
    )
    for dfid, parent in rows:
        try:
            order = decision_record.read_order(kernel.store, dfid)
            if order is not None and is_due(dfid):
                settle(kernel, parent, order, kernel.dispatcher.reverted(order), now_ms)
        except Exception as error:  # noqa: BLE001  a fault of one must not stop the others
            failed.append((dfid, error))
    return failed


def _begin(kernel: Kernel, parent: str, order: ExecutionIntent, now_ms: int) -> None:
    kernel.store.insert(
        "saga_reversals", dfid=order.dfid, saga=parent, idempotency_key=order.idempotency_key, status="PENDING"
    )
    body = {"status": "PENDING", "saga": parent, "idempotency_key": order.idempotency_key, "reference": ""}
    ledger.append(kernel.store, now_ms, "REVERSAL", order.dfid, body)


def settle(kernel: Kernel, parent: str, order: ExecutionIntent, receipt: Receipt, now_ms: int) -> str:
    """Record what became of a reversal, or that it was accepted; return its status. A settled one stays as it is; nothing is
    given back twice. One that is UNKNOWN stays that until its end is known, and one that was accepted stays PENDING where a
    look-up gets no answer: it is looked up again. Raises StoreError for one that the record does not have.
    """
    store, status = kernel.store, _STATUS.get(receipt.status, "UNKNOWN")
    with store.transaction():
        was = store.value("SELECT status FROM saga_reversals WHERE dfid = ?", (order.dfid,))
        if was is None:  # lost since it began: a standby took over that had not heard of it
            raise StoreError(f"the reversal of flow `{order.dfid}` is not in the record", dfid=order.dfid)
        accepted = was == "PENDING" and store.value(_ACCEPTED, (order.dfid,)) is not None
        stays = {"UNKNOWN": ("unknown", "absent", "pending"), "PENDING": ("unknown", "pending") if accepted else ()}
        if was in ("REVERTED", "REFUSED") or receipt.status in stays[was]:
            return str(was)
        store.run(
            "UPDATE saga_reversals SET status = ?, reference = ? WHERE dfid = ?",
            (status, receipt.reference or None, order.dfid),
        )
        if status == "REVERTED":
            reservations.release(store, order.dfid, kept=reservations.left_drawn(store, order.dfid))
        body: dict[str, object] = {"status": status, "saga": parent, "idempotency_key": order.idempotency_key}
        body |= {"accepted": True} if status == "PENDING" else {}
        ledger.append(
            store, now_ms, "REVERSAL", order.dfid, body | {"reference": receipt.reference, "detail": receipt.detail}
        )
    return status
