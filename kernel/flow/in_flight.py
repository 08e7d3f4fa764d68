"""What has not ended: flows that somebody may still hold, and orders in flight, whose outcome nobody knows yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sds.kernel.contract.schema import Contract
from sds.kernel.decision.dim import amounts_minor
from sds.kernel.decision.safeguards import LiveState
from sds.kernel.envelope.envelope import DecisionEnvelope
from sds.kernel.envelope.proposal import parse_recorded
from sds.kernel.errors import StoreError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt, Settlement
from sds.kernel.flow import decision_record, states
from sds.kernel.registry import spend
from sds.kernel.storage.ledger import Head
from sds.kernel.storage.store import Reader, Row

# A human's order has a lease of its own: the lease of the flow that they decided about is long over.
UNFINISHED = (
    "SELECT f.dfid, f.state, e.status, COALESCE(h.decided_at_ms, f.created_at_ms),"
    " COALESCE(h.lease_until_ms, f.lease_until_ms) FROM decision_flows f"
    " LEFT JOIN execution_log e ON e.dfid = f.dfid LEFT JOIN human_decisions h ON h.dfid = f.dfid"
    " WHERE f.state IN ('ACTIVE', 'EXECUTING') AND f.gate = ?"
    " AND NOT EXISTS (SELECT 1 FROM sagas s WHERE s.dfid = f.dfid) AND (f.state = 'ACTIVE' OR e.status IN ('PENDING', 'UNKNOWN'))"
    " ORDER BY COALESCE(e.reserved_at_ms, f.created_at_ms)"
)

# Reads the order of a flow that is to be settled: one row for each resource that it holds or has held, at least one row. These
# are found by the flow: the index of what is held now still has what was held since the server last cleaned it. A count of
# each resource's rows, because PostgreSQL joins a table of moderate size by reading all of it.
ORDER = (
    "SELECT CASE WHEN r.status = 'live' THEN r.resource END, r.amount,"
    " (SELECT count(*) FROM resources x WHERE x.resource = r.resource), l.idx, l.entry_hash, e.status,"
    " n.dfid IS NOT NULL, COALESCE(h.contract_hash, f.contract_hash), b.failures FROM execution_log e"
    " LEFT JOIN decision_flows f ON f.dfid = e.dfid LEFT JOIN human_decisions h ON h.dfid = e.dfid"
    " LEFT JOIN order_lookups n ON n.dfid = e.dfid LEFT JOIN executor_breakers b ON b.gate = f.gate"
    " LEFT JOIN ledger l ON l.idx = (SELECT max(idx) FROM ledger)"
    " LEFT JOIN reservations r ON r.dfid = e.dfid WHERE e.dfid = ?"
)
_TIMES = (
    "SELECT e.reserved_at_ms, d.deadline_ms FROM execution_log e"
    " LEFT JOIN human_decisions h ON h.dfid = e.dfid LEFT JOIN flow_deadlines d ON d.dfid = e.dfid AND h.dfid IS NULL"
    " WHERE e.dfid = ?"
)
# Whether a human's word settled an order that has not been undone since.
_ATTESTED = (
    "SELECT 1 FROM ledger l WHERE l.dfid = ? AND l.kind = 'RESOLVED' AND json_type(l.body, '$.by') IS NOT NULL"
    " AND NOT EXISTS (SELECT 1 FROM saga_reversals r WHERE r.dfid = l.dfid AND r.status = 'REVERTED')"
)
_WORD = (
    "SELECT body FROM ledger WHERE dfid = ? AND kind = 'RESOLVED' AND json_type(body, '$.by') IS NOT NULL"
    " ORDER BY idx DESC LIMIT 1"
)
_ACCEPTED = (
    "SELECT json_extract(body, '$.reference') FROM ledger"
    " WHERE dfid = ? AND kind = 'UNKNOWN' AND json_type(body, '$.accepted') IS NOT NULL"
)


@dataclass(frozen=True, slots=True)
class StandingOrder:
    """An order as read by the transaction that settles it, and `head`, the ledger's last entry.

    `sent_again`: not only its first sender may have sent it. `contract_hash`: of the contract it was reserved under.
    `failures`: orders in a row that its executor did not answer. `holds`: (resource, amount, whether that is in the
    record).
    """

    status: str
    sent_again: bool
    contract_hash: str | None
    failures: int
    head: Head | None
    holds: list[tuple[str, int, bool]]


def standing_order(rows: list[Row]) -> StandingOrder | None:
    """Return what `ORDER` has read. None: there is no such order."""
    if not rows:
        return None
    idx, entry_hash, status, sent_again, contract_hash, failures = rows[0][3:]
    holds = [(name, amount, bool(there)) for name, amount, there, *_ in rows if name is not None]
    head = Head(idx, entry_hash) if idx else None
    return StandingOrder(status, bool(sent_again), contract_hash, failures or 0, head, holds)


@dataclass(frozen=True, slots=True)
class UnfinishedFlow:
    """A flow that has not ended. `held`: its holder may still be alive."""

    dfid: str
    state: str
    held: bool


def unfinished_flows(record: Reader, gate: str, now_ms: int) -> list[UnfinishedFlow]:
    """Return a gate's unfinished flows, oldest first, without sagas. An order that is recorded as UNKNOWN has no holder."""
    return [
        UnfinishedFlow(dfid, state, status != "UNKNOWN" and states.is_held(begun_ms, until_ms, now_ms))
        for dfid, state, status, begun_ms, until_ms in record.rows(UNFINISHED, (gate,))
    ]


def reference_of(record: Reader, dfid: str) -> str:
    """Return the outside's id of what a flow's order did; "" where there is none."""
    return str(record.value("SELECT external_receipt FROM execution_log WHERE dfid = ?", (dfid,)) or "")


def accepted_as(record: Reader, dfid: str) -> str | None:
    """Return the outside's id of an order that it has called `pending`, "" where it gave none; None: it has not."""
    found = record.row(_ACCEPTED, (dfid,))
    return None if found is None else str(found[0])


def is_void_announced(record: Reader, dfid: str) -> bool:
    """Tell whether it is recorded that a flow's order was about to be voided."""
    return record.value("SELECT 1 FROM ledger WHERE dfid = ? AND kind = 'VOIDING'", (dfid,)) is not None


def is_contradicted(record: Reader, dfid: str, was: str, said: str) -> bool:
    """Tell whether the executor's own answer `said` contradicts the status `was` of an order.

    Of two answers of the executor the first holds, unless it was FAILED: a slow `pending` may be older than `rejected`. A
    human's word holds only until the executor says otherwise. An order that was undone stays undone.
    """
    if (was, said) == ("FAILED", "settled"):
        return True
    against_humans = (("SUCCESS", "rejected"), ("FAILED", "pending"))
    return (was, said) in against_humans and record.value(_ATTESTED, (dfid,)) is not None


def attestation(record: Reader, dfid: str) -> tuple[Mapping[str, str], str] | None:
    """Return the human whose word settled an order last, with their reason, and the status that it got; None: nobody's did."""
    body = record.value(_WORD, (dfid,))
    return (said["by"], said["status"]) if body and (said := json.loads(body)) else None


def refusal(refused: Receipt, known: Receipt, *, accepted: bool) -> Receipt:
    """Return a sender's answer that its order was refused or not sent, or what the look-up `known` makes of it: `unknown` where
    the order was carried out, `pending` where it is accepted. `accepted`: the record says so; then only a look-up can confirm
    the refusal, which may be the answer to a second sending of the same key.
    """
    if known.status == "settled":
        status: Settlement = "unknown"
    elif known.status == "pending" or (accepted and known.status != "rejected"):
        status = "pending"
    else:
        return refused
    return replace(
        known, status=status, detail=f"the executor answered {refused.status}, but its look-up says {known.status}"
    )


def times_ms(record: Reader, dfid: str) -> tuple[int, int | None]:
    """Return when a flow's order was reserved, by the clock inside that transaction, and until when it may be sent; None: no
    deadline was set, or a human has decided the case since.

    Raises StoreError where the record has lost it since: a standby took over that had not heard of it. It is not sent.
    """
    found = record.row(_TIMES, (dfid,))
    if found is None:
        raise StoreError("the record has lost an order that was just reserved; the order was not sent", dfid=dfid)
    return int(found[0]), found[1]


def orders_in_flight(record: Reader, gate: str, now_ms: int) -> list[ExecutionIntent]:
    """Return every order whose outcome nobody knows and whose sender is gone, oldest first."""
    gone = [flow.dfid for flow in unfinished_flows(record, gate, now_ms) if flow.state == "EXECUTING" and not flow.held]
    return [order for dfid in gone if (order := decision_record.read_order(record, dfid)) is not None]


def is_reservable(
    record: Reader,
    contract: Contract,
    order: ExecutionIntent,
    proposal: bytes,
    live: LiveState,
    envelope: DecisionEnvelope,
    now_ms: int,
) -> bool:
    """Tell whether an order in flight would be reserved again now: same state, same amounts, inside the envelope in force,
    and counted against the same spend limits. `live`: read as if the order had taken nothing.
    """
    parsed = parse_recorded(proposal)
    if live.version != order.state_version or isinstance(parsed, str):
        return False
    if not spend.still_counted(record, contract, order.dfid, live.situation.fields, now_ms):
        return False
    kind = envelope.kind(parsed.action)
    if kind is None or envelope.objections(parsed):
        return False
    return dict(order.params) == dict(amounts_minor(parsed, kind))
