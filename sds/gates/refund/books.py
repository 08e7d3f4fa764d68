"""The rail's books against the record: what was paid once, what was paid wrongly, what one side knows alone.

The rail keeps its own file in its own process, so what the two agree on is not one program's word for itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from sds.gates.refund.rail_store import Payment
from sds.kernel.canonical import canonical
from sds.kernel.store import Reader

AT_MOST_ONCE = ("COMPENSATE", "VOUCHER")
IN_THE_AIR = frozenset({"PENDING", "UNKNOWN"})  # the record does not say: what the rail did is not against it


def faults(payments: Iterable[Payment], record: Reader, fare_of: Callable[[str], int | None]) -> Iterator[str]:
    """Yield one line for every payment that should not be, or is not, at the rail or in the record.

    Several refunds of one ticket are honest as long as they are together no more than its fare; what was taken back
    whole is as if it had not been paid.
    """
    paid = list(payments)
    yield from _unagreed(paid, record)
    event_of: dict[str, str] = dict(record.rows("SELECT dfid, event_id FROM decision_flows"))
    yield from _unreversed(paid, record)
    paid = [payment for payment in paid if not payment.reversed_minor]
    events = Counter(event_of[p.dfid] for p in paid if p.dfid in event_of)
    yield from (f"event {event}: paid {count} times" for event, count in events.items() if count > 1)
    kinds = Counter((p.ticket_id, p.kind) for p in paid if p.kind in AT_MOST_ONCE)
    yield from (f"ticket {ticket}: {kind} {count} times" for (ticket, kind), count in kinds.items() if count > 1)
    yield from _over_the_fare(paid, fare_of)


def _unagreed(paid: list[Payment], record: Reader) -> Iterator[str]:
    rows = record.rows("SELECT idempotency_key, status, dfid, resource_key, kind, params FROM execution_log")
    orders = {row[0]: row[1:] for row in rows}
    at_the_rail = {payment.key for payment in paid}
    for payment in paid:
        status, *order = orders.get(payment.key, ("not there",))
        if status != "SUCCESS" and status not in IN_THE_AIR:
            yield f"key {payment.key[:12]}: paid at the rail, in the record it is {status}"
        elif order != [
            payment.dfid,
            payment.ticket_id,
            payment.kind,
            canonical({"amount": payment.amount_minor}).decode(),
        ]:
            yield f"key {payment.key[:12]}: the rail paid another order than the record has"
    for key, (status, *_) in orders.items():
        if status == "SUCCESS" and key not in at_the_rail:
            yield f"key {key[:12]}: SUCCESS in the record, not paid at the rail"


def _unreversed(paid: list[Payment], record: Reader) -> Iterator[str]:
    """What was taken back at the rail is what the record says, whole and from a payment."""
    known: dict[str, str] = dict(record.rows("SELECT idempotency_key, status FROM saga_reversals"))
    taken_back = {payment.key: payment for payment in paid if payment.reversed_minor}
    for key, payment in taken_back.items():
        status = known.get(key, "not there")
        if payment.reversed_minor != payment.amount_minor:
            yield f"key {key[:12]}: paid {payment.amount_minor}, taken back {payment.reversed_minor}"
        if status != "REVERTED" and status not in IN_THE_AIR:
            yield f"key {key[:12]}: taken back at the rail, in the record that is {status}"
    for key, status in known.items():
        if status == "REVERTED" and key not in taken_back:
            yield f"key {key[:12]}: REVERTED in the record, not taken back at the rail"


def _over_the_fare(paid: list[Payment], fare_of: Callable[[str], int | None]) -> Iterator[str]:
    refunded: defaultdict[str, int] = defaultdict(int)
    for payment in paid:
        if payment.kind == "REFUND_TICKET":
            refunded[payment.ticket_id] += payment.amount_minor
    for ticket, amount in refunded.items():
        fare = fare_of(ticket)
        if fare is None or amount > fare:
            yield f"ticket {ticket}: refunded {amount}, its fare is {fare if fare is not None else 'not known'}"
