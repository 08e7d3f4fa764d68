"""The orders of a gate for whoever keeps the books: one for each, with its amount, who decided it, and what became of it.

Reads only. What an order spends is its amount; an order of a kind that spends nothing has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from typing import Any, Literal

from sds.kernel.envelope.envelope import format_literal
from sds.kernel.errors import NOT_AS_WRITTEN, reading, unreadable
from sds.kernel.executor.statement import CLOCKS_APART_MS, KEYS_AT_ONCE, Statement, StatementLine, known_keys
from sds.kernel.registry.counter_scale import spends_at
from sds.kernel.storage.store import Reader, Row

Status = Literal["PAID", "CARRIED_OUT", "TAKEN_BACK", "REFUSED", "OPEN", "CONTRADICTED", "UNKNOWN_TO_RECORD"]

_STATUS: Mapping[str, Status] = {
    "SUCCESS": "PAID",
    "FAILED": "REFUSED",
    "PENDING": "OPEN",
    "UNKNOWN": "OPEN",
    "DIRTY": "CONTRADICTED",
}
# Where the word does not occur, no JSON is parsed: a list of everything asks every order.
_BY = "CASE WHEN instr(w.body, '\"by\"') > 0 THEN CASE WHEN json_valid(w.body) THEN w.body ->> '$.by' END END"
_WORD = (
    f"SELECT {_BY} FROM ledger w WHERE w.dfid = e.dfid AND w.kind IN ('SETTLED', 'RESOLVED', 'CONTRADICTED')"
    f" AND {_BY} IS NOT NULL ORDER BY w.idx DESC LIMIT 1"
)
_END = "COALESCE(e.executed_at_ms, e.reserved_at_ms)"
_AT = f"CASE WHEN e.status IN ('PENDING', 'UNKNOWN') THEN e.reserved_at_ms ELSE {_END} END"
_FROM = "execution_log e CROSS JOIN decision_flows f ON f.dfid = e.dfid"
_ORDERS = f"""
SELECT e.dfid, f.event_id, e.kind, e.params, e.resource_key, e.idempotency_key, e.external_receipt, e.status, r.status,
       e.reserved_at_ms, {_AT}, f.agent_id, COALESCE(h.contract_hash, f.contract_hash), l.kind, l.body,
       h.decision, h.who, h.reason, ({_WORD})
FROM {_FROM}
LEFT JOIN human_decisions h ON h.dfid = e.dfid AND h.decision IN ('OVERRIDE', 'MODIFY')
LEFT JOIN saga_reversals r ON r.dfid = e.dfid
LEFT JOIN ledger l ON l.dfid = e.dfid AND l.kind IN ('RESERVED', 'ADOPTED')
WHERE f.gate = ?"""
# The first condition on `at` follows from the second, but without it SQLite reads the index from its beginning.
_PAGE = " AND {at} >= ? AND ({at}, e.dfid) > (?, ?) AND ({at}, e.dfid) < (?, ?) ORDER BY {at}, e.dfid LIMIT ?"
# Orders that are open are found by their flows: an index of theirs would cost every decision that reserves. Of those that
# have ended the index `orders_by_end` is read from where the page begins.
_OPEN = _ORDERS.replace(_FROM, "decision_flows f CROSS JOIN execution_log e ON e.dfid = f.dfid")
PAGES = (
    f"{_OPEN} AND f.state IN ('ACTIVE', 'EXECUTING') AND e.status IN ('PENDING', 'UNKNOWN')"
    + _PAGE.format(at="e.reserved_at_ms"),
    f"{_ORDERS} AND e.status NOT IN ('PENDING', 'UNKNOWN')" + _PAGE.format(at=_END),
)
_CASES = (
    "SELECT f.event_id, f.state, l.body FROM decision_flows f JOIN ledger l ON l.dfid = f.dfid AND l.kind = 'DECIDED'"
    " WHERE f.gate = ? AND f.event_id >= 'statement/' AND f.event_id < 'statement0' ORDER BY l.idx"
)


@dataclass(frozen=True, slots=True)
class BookedOrder:
    """One order. `at_ms`: when its end was recorded; of one that is open, when it was ordered. `amount_minor`: what it
    spends, at `decimals`; None: nothing. `decision`: AGENT, OVERRIDE, MODIFY or ADOPTED. `settled_by`: the human by whose
    word its end was recorded. `difference`: of a case about what the outside says, its code and state.

    `line`: the outside's own line about it, if its statement was asked for and has one.
    """

    dfid: str
    event_id: str
    kind: str
    amount_minor: int | None
    decimals: int
    numbers: Mapping[str, int]
    resource_key: str
    key: str
    reference: str
    status: Status
    ordered_at_ms: int
    at_ms: int
    agent_id: str
    contract_version: str
    decision: str
    decided_by: str
    reason: str
    settled_by: str
    difference: str
    line: StatementLine | None = None

    @property
    def outside_minor(self) -> int:
        """What the outside says that moved, and stands. Of what moved in another currency, nothing: it is no sum of this one."""
        ours = self.line is not None and self.line.outcome == "settled" and not self.line.other_currency
        return (self.line.amount_minor or 0) if self.line and ours else 0

    @property
    def agrees(self) -> bool:
        """Whether what moved here is what moved there. What is open here is not judged."""
        if self.status in ("OPEN", "CONTRADICTED"):
            return True
        listed = self.line is not None and self.line.outcome == "settled"
        if (self.status in ("PAID", "CARRIED_OUT")) != listed:
            return False
        same = self.amount_minor is None or self.line is None or self.line.amount_minor in (None, self.amount_minor)
        return not listed or (same and not (self.line and self.line.other_currency))

    def as_data(self, zone: tzinfo) -> dict[str, Any]:
        """Return the order as the record has it, as JSON data: times of the zone in ISO 8601, the amount with its decimals."""
        return {
            "at": local_time(self.at_ms, zone),
            "ordered_at": local_time(self.ordered_at_ms, zone),
            "status": self.status,
            "amount": None if self.amount_minor is None else format_literal(self.amount_minor, self.decimals),
            "kind": self.kind,
            "account": self.resource_key,
            "event_id": self.event_id,
            "dfid": self.dfid,
            "decision": self.decision,
            "decided_by": self.decided_by,
            "reason": self.reason,
            "agent": self.agent_id,
            "contract": self.contract_version,
            "settled_by": self.settled_by,
            "reference": self.reference,
            "key": self.key,
            "case": self.difference,
        }


def local_time(at_ms: int, zone: tzinfo) -> str:
    """Return a time, in milliseconds since 1970, as ISO 8601 has it in a zone."""
    return datetime.fromtimestamp(at_ms / 1000, zone).isoformat(timespec="milliseconds")


def orders(record: Reader, gate: str, since_ms: int, until_ms: int) -> list[BookedOrder]:
    """Return the orders of a gate whose time lies in a period, the oldest first. Raises StoreError for one that cannot be read."""
    rows = record.rows(f"{_ORDERS} AND {_AT} BETWEEN ? AND ? ORDER BY {_AT}, e.dfid", (gate, since_ms, until_ms))
    return _booked(record, gate, rows)


def orders_page(
    record: Reader, gate: str, since_ms: int, until_ms: int, *, after: tuple[int, str], limit: int
) -> list[BookedOrder]:
    """Return the next `limit` orders of a period, as `orders` sorts them, behind the one with the time and dfid `after`.

    An order that ends after its page was read comes again, at a later time.
    """
    begin = max(after, (since_ms, ""))
    given = (gate, begin[0], *begin, until_ms + 1, "", limit)
    # An order that ends between the two reads is among the ended.
    rows = {row[0]: row for page in PAGES for row in record.rows(page, given)}
    return _booked(record, gate, sorted(rows.values(), key=_place)[:limit])


def _place(row: Row) -> tuple[int, str]:
    return row[10], row[0]


def with_statement(
    record: Reader, gate: str, statement: Statement, *, since_ms: int, until_ms: int
) -> list[BookedOrder]:
    """Return the orders of a period as `orders` does, each with the outside's line, by the outside's time where it has one.
    An order that only the outside has is UNKNOWN_TO_RECORD.

    The record is read first, as in `compare`. The statement reaches back to the oldest of these orders: one whose end was
    learned days later belongs to the outside's time alone. Raises WorldError where the statement cannot be read.
    """
    known = {order.key: order for order in orders(record, gate, since_ms, until_ms)}
    began_ms = min((order.ordered_at_ms for order in known.values()), default=since_ms)
    listed: dict[str, list[StatementLine]] = {}
    for line in statement(max(0, min(since_ms, began_ms) - CLOCKS_APART_MS), until_ms + CLOCKS_APART_MS):
        listed.setdefault(line.key, []).append(line)
    others_of_gate = list(_of_keys(record, gate, [key for key in listed if key not in known]))
    known |= {order.key: order for order in _booked(record, gate, others_of_gate)}
    joined = [_beside(order, next(iter(listed.get(order.key, ())), None)) for order in known.values()]
    decimals = _decimals_now(record, gate)
    others = known_keys(record, [key for key in listed if key not in known])  # orders of another gate of this record
    for key, lines in listed.items():  # a second line about one key is nobody's
        joined += [_only_outside(line, decimals) for line in lines[key in known :] if key not in others]
    within = [order for order in joined if since_ms <= order.at_ms <= until_ms]
    return sorted(within, key=lambda order: (order.at_ms, order.dfid))


def _beside(order: BookedOrder, line: StatementLine | None) -> BookedOrder:
    return order if line is None else replace(order, line=line, at_ms=line.at_ms)


def _of_keys(record: Reader, gate: str, keys: list[str]) -> Iterator[Row]:
    for start in range(0, len(keys), KEYS_AT_ONCE):
        some = tuple(keys[start : start + KEYS_AT_ONCE])
        marks = ", ".join("?" * len(some))
        yield from record.rows(f"{_ORDERS} AND e.idempotency_key IN ({marks})", (gate, *some))


def _decimals_now(record: Reader, gate: str) -> int:
    """Return the decimals in which the contract that was registered last spends; 0 where it spends nothing."""
    terms = record.value("SELECT body FROM contracts WHERE gate = ? ORDER BY registered_at_ms DESC LIMIT 1", (gate,))
    return _decimals(json.loads(terms), "") or 0 if terms else 0


def _only_outside(line: StatementLine, decimals: int) -> BookedOrder:
    return BookedOrder(
        dfid=line.dfid,
        event_id="",
        kind=line.kind,
        amount_minor=None,
        decimals=decimals,
        numbers=line.params,
        resource_key=line.resource_key,
        key=line.key,
        reference=line.reference,
        status="UNKNOWN_TO_RECORD",
        ordered_at_ms=line.at_ms,
        at_ms=line.at_ms,
        agent_id="",
        contract_version="",
        decision="",
        decided_by="",
        reason="",
        settled_by="",
        difference="",
        line=line,
    )


def _difference_cases(record: Reader, gate: str) -> Mapping[str, str]:
    """Return the latest case about each key: its code, and the state of the case."""
    cases: dict[str, str] = {}
    for event_id, state, body in record.rows(_CASES, (gate,)):
        try:
            code = json.loads(body)["statement"]["code"]
        except NOT_AS_WRITTEN:
            code = "RECORD_DAMAGED"
        cases[event_id.removeprefix("statement/")] = f"{code} {'open' if state == 'ESCALATED' else 'closed'}"
    return cases


def _booked(record: Reader, gate: str, rows: Iterable[Row]) -> list[BookedOrder]:
    cases, contracts = _difference_cases(record, gate), _Contracts(record)
    return [_order(row, cases, contracts) for row in rows]


class _Contracts(dict[str | None, tuple[str, Mapping[str, Any] | None]]):
    """The version and terms of each contract by its hash, read once however many orders it has."""

    def __init__(self, record: Reader) -> None:
        super().__init__()
        self._record = record

    def __missing__(self, named: str | None) -> tuple[str, Mapping[str, Any] | None]:
        row = self._record.row("SELECT version, body FROM contracts WHERE hash = ?", (named,))
        self[named] = found = (row[0], json.loads(row[1])) if row else ("", None)
        return found


def _order(row: Row, cases: Mapping[str, str], contracts: _Contracts) -> BookedOrder:
    dfid, event_id, kind, params, resource_key, key, reference, status, reversal, ordered_at_ms, at_ms = row[:11]
    agent_id, contract_hash, entry, body, decision, who, why, word = row[11:]
    with reading(unreadable(dfid)):
        reserved = dict(json.loads(body)) if body else {}
        version, terms = contracts[contract_hash]
        decimals = _decimals(terms, kind) if terms else None
        done: Status = "CARRIED_OUT" if status == "SUCCESS" and decimals is None else _STATUS[status]
        acted = reserved.get("by") or {"who": who or agent_id, "reason": why or ""}
        return BookedOrder(
            dfid=dfid,
            event_id=event_id,
            kind=kind,
            amount_minor=None if decimals is None else _spent(reserved, status),
            decimals=decimals or 0,
            numbers=dict(json.loads(params)),
            resource_key=resource_key,
            key=key,
            reference=reference or "",
            status="TAKEN_BACK" if reversal == "REVERTED" else done,
            ordered_at_ms=ordered_at_ms,
            at_ms=at_ms,
            agent_id=agent_id,
            contract_version=version,
            decision="ADOPTED" if entry == "ADOPTED" else decision or "AGENT",
            decided_by=acted["who"],
            reason=acted["reason"],
            settled_by=json.loads(word)["who"] if word else "",
            difference=cases.get(key, ""),
        )


def _spent(reserved: Mapping[str, Any], status: str) -> int:
    """Return what an order spends by the entry that reserved it or took it over.

    An older version of this program took over what moved without counting it against limits, where nobody knew what for.
    """
    line: Mapping[str, Any] = reserved.get("line") or {}
    moved = line.get("amount_minor") if status == "SUCCESS" else None
    return int(reserved.get("needs", [None, 0])[1] or moved or 0)


def _decimals(terms: Mapping[str, Any], kind: str) -> int | None:
    """Return the decimals in which a kind spends under a registered contract; None: it spends nothing. Of an order whose
    kind the record does not know, those of the others: all kinds spend at one scale.
    """
    of_humans = terms.get("human", {}).get("kinds", {})
    known = of_humans.get(kind) or terms["kinds"].get(kind)
    if known is not None:
        return spends_at(known)
    scales = [
        scale for each in (*terms["kinds"].values(), *of_humans.values()) if (scale := spends_at(each)) is not None
    ]
    return scales[0] if scales else None
