"""A human's word about an order that nobody else can tell the end of (DIR 4.7).

Only for an order that is UNKNOWN, only after the executor has been asked once more, and its definite answer wins. Who
found it out, and why they say so, is in the ledger entry that settles the order.
"""

from __future__ import annotations

from sds.kernel.errors import UsageError
from sds.kernel.executor.protocol import Receipt
from sds.kernel.flow.answer import Answer, known_answer
from sds.kernel.flow.in_flight import orders_in_flight
from sds.kernel.flow.kernel import Kernel
from sds.kernel.human.cases import read_case
from sds.kernel.human.parsing import said, unacknowledged


def attest(
    kernel: Kernel, dfid: str, receipt: Receipt, *, who: str, reason: str, acknowledged: bool, now_ms: int
) -> Answer:
    """Settle an UNKNOWN order as a human found it outside: `settled` with its reference there, or `rejected`.

    Raises UsageError when there is no such order, when it is not acknowledged that this is final, or when the
    executor is certain that nothing was done and the human says that something was.
    """
    by = {"who": said("name", who), "reason": said("reason", reason)}
    case = read_case(kernel.store, kernel.contract, dfid)
    intent = next(
        (order for order in orders_in_flight(kernel.store, kernel.contract.gate, now_ms) if order.dfid == dfid), None
    )
    if intent is None or not case.unknown:
        raise UsageError(f"flow `{dfid}` has no order whose end is unknown", reason_code="FLOW_CLOSED", dfid=dfid)
    if receipt.status == "settled" and not (receipt.reference.strip() and receipt.reference.isprintable()):
        raise UsageError("what was carried out has a reference where it was carried out, in printable text", dfid=dfid)
    if not acknowledged:
        fate = "stays taken for good" if receipt.status == "settled" else "is given back and may be paid to others"
        raise unacknowledged(dfid, f"this is of HIGH impact: what the order holds {fate}, and that cannot be undone")
    kernel.dispatcher.attest(intent, receipt, by=by)
    return known_answer(kernel.store, dfid)
