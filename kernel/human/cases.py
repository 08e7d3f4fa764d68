"""The cases that wait for a human, as the record holds them: one of them, their list in pages, and the heads of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sds.kernel.contract.human_terms import Impact, human_contract, impact
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import ESCALATE
from sds.kernel.envelope.proposal import Proposal, parse_recorded
from sds.kernel.envelope.state import Fields
from sds.kernel.errors import NOT_AS_WRITTEN, StoreError, UsageError, reading, unreadable
from sds.kernel.flow.decision_record import SEALED, seal
from sds.kernel.flow.intake import Event, event_in
from sds.kernel.flow.states import numbers_of
from sds.kernel.human.statement_cases import difference_in
from sds.kernel.registry.contract_versions import event_fields, registered_contract
from sds.kernel.storage.store import Reader
from sds.kernel.storage.vault import PROPOSAL, TRIGGER, Texts

# SETTLED and REJECTED are about an order whose end is UNKNOWN, the others about an escalated flow
Decision = Literal["OVERRIDE", "MODIFY", "RETURN", "ABORT", "SETTLED", "REJECTED"]

WAITING_MAX = 10_000
Place = tuple[int, str]  # of a case in the list: since when it waits, in milliseconds since 1970, and its flow
BEFORE_ALL: Place = (-1, "")
_EVENT = "SELECT event_id, trigger_event FROM decision_flows WHERE dfid = ?"


@dataclass(frozen=True, slots=True)
class Case:
    """A flow as a human finds it. `since_ms`: when it began to wait. `fields`: the state as the agent saw it. `said`: the
    agent's proposal as recorded. `ordered` and `execution`: the kind and status of its order, if it has one. `numbers`:
    those of the order, else of the proposal, in minor units. `damaged`: nothing more of it could be read.
    """

    dfid: str
    event_id: str
    agent_id: str
    state: str
    since_ms: int
    trigger: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    snapshot_id: str = ""
    fields: Fields = field(default_factory=dict)
    said: bytes = b""
    numbers: Mapping[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    reason_code: str | None = None
    confidence: float | None = None
    alternatives: tuple[Mapping[str, Any], ...] = ()
    ordered: str | None = None
    execution: str | None = None
    resolved: str | None = None
    tag: str | None = None
    damaged: bool = False

    @property
    def proposal(self) -> Proposal | None:
        """The agent's proposal; None when it escalated, or said nothing that can be read."""
        parsed = parse_recorded(self.said)
        return parsed if isinstance(parsed, Proposal) and parsed.action != ESCALATE else None

    @property
    def action(self) -> str | None:
        """The kind that was ordered, else the kind that is proposed."""
        return self.ordered or (self.proposal.action if self.proposal else None)

    @property
    def of_saga(self) -> bool:
        """Whether it is a saga or a child of one: nobody can carry out by itself what is still due of a saga."""
        return "saga" in self.trigger

    @property
    def difference(self) -> Mapping[str, Any] | None:
        """The difference between record and outside that this case is about; None for any other case."""
        return difference_in(self.trigger)

    @property
    def can_be_carried_out(self) -> bool:
        """Whether a human may have it carried out here. If not, they end the case, and act where it happened."""
        return not self.of_saga and self.difference is None

    @property
    def unknown(self) -> bool:
        return self.execution == "UNKNOWN"

    def impact(self, terms: Contract) -> Impact | None:
        """Return the impact of what is proposed. An order whose end is not known is always HIGH."""
        if self.unknown:
            return "HIGH"
        return impact(terms, self.action, self.numbers) if self.action else None


_SINCE = (
    "COALESCE(CASE WHEN f.state = 'EXECUTING' THEN e.executed_at_ms ELSE COALESCE(v.evaluated_at_ms, d.at_ms) END,"
    " f.created_at_ms)"
)
_MORE = """
f.trigger_event, s.snapshot_id, s.body, p.proposal, COALESCE(e.params, p.params), v.reasons,
COALESCE(v.reason_code, d.body ->> '$.reason_code'), p.confidence,
p.alternatives, e.kind, e.status, h.decision || ' by ' || h.who, f.tag"""
_FROM = """
FROM decision_flows f
LEFT JOIN context_snapshots s ON s.dfid = f.dfid
LEFT JOIN policy_proposals p ON p.dfid = f.dfid
LEFT JOIN dim_validations v ON v.dfid = f.dfid
LEFT JOIN execution_log e ON e.dfid = f.dfid
LEFT JOIN human_decisions h ON h.dfid = f.dfid
LEFT JOIN ledger d ON d.dfid = f.dfid AND d.kind = 'DECIDED'
WHERE f.gate = ?
"""
_CASE = f"SELECT f.dfid, f.event_id, f.agent_id, f.state, {_SINCE}, {_MORE} {_FROM} AND f.dfid = ?"

# An escalated part of a saga is not listed: its saga waits. Where the word does not occur, no JSON is parsed.
_OF_SAGA = "CASE WHEN json_valid(f.trigger_event) THEN json_type(f.trigger_event, '$.saga') END"
_ESCALATED = f"f.state = 'ESCALATED' AND (f.trigger_event NOT LIKE '%\"saga\"%' OR COALESCE({_OF_SAGA}, '') <> 'array')"

# The second condition follows from the first, but without it SQLite does not use the index of unfinished flows.
_UNKNOWN = "f.state = 'EXECUTING' AND f.state IN ('ACTIVE', 'EXECUTING') AND e.status = 'UNKNOWN'"

# Since when a flow waits stands in other rows than that it waits: all that wait are read for a page, but of each only these.
_DECIDED_MS = "(SELECT d.at_ms FROM ledger d WHERE d.dfid = f.dfid AND d.kind = 'DECIDED')"
_PLACES = """
SELECT {since} AS since_ms, f.dfid FROM decision_flows f {join} WHERE f.gate = ? AND {where}
AND ({since}, f.dfid) > (?, ?) ORDER BY 1, 2 LIMIT ?
"""
_HEADS = """
SELECT f.dfid, f.event_id, f.agent_id, f.state, w.since_ms,
       COALESCE(v.reason_code, CASE WHEN json_valid(d.body) THEN d.body ->> '$.reason_code' END),
       COALESCE(NULLIF(e.kind, ''), p.policy_kind), COALESCE(e.params, p.params)
FROM ({places}) w CROSS JOIN decision_flows f ON f.dfid = w.dfid
LEFT JOIN policy_proposals p ON p.dfid = f.dfid
LEFT JOIN dim_validations v ON v.dfid = f.dfid
LEFT JOIN execution_log e ON e.dfid = f.dfid
LEFT JOIN ledger d ON d.dfid = f.dfid AND d.kind = 'DECIDED'
ORDER BY 5, 1
"""


def _page(since: str, join: str, where: str) -> str:
    placed = f"CAST(COALESCE({since}, f.created_at_ms) AS BIGINT)"  # a number, whatever a damaged column holds
    return _HEADS.format(places=_PLACES.format(since=placed, join=join, where=where))


PAGES = (
    _page(f"v.evaluated_at_ms, {_DECIDED_MS}", "LEFT JOIN dim_validations v ON v.dfid = f.dfid", _ESCALATED),
    _page("e.executed_at_ms", "JOIN execution_log e ON e.dfid = f.dfid", _UNKNOWN),
)
_COUNT = (
    "SELECT (SELECT count(*) FROM decision_flows WHERE state = 'ESCALATED' AND gate = ?) + (SELECT count(*)"
    f" FROM decision_flows f JOIN execution_log e ON e.dfid = f.dfid WHERE {_UNKNOWN} AND f.gate = ?)"
)


def count_waiting(store: Reader, gate: str) -> int:
    """Return how many cases of a gate wait for a human. Every escalated part of a saga counts."""
    return int(store.value(_COUNT, (gate, gate)))


def waiting(store: Reader, contract: Contract, *, limit: int = WAITING_MAX, after: Place = BEFORE_ALL) -> list[Case]:
    """Return the cases that wait for a human, oldest first: escalated flows, and orders whose end nobody knows.

    `after`: the place of the last case of the page before. A page has fewer than `limit` cases only where the list ends.
    A case whose rows cannot be read is listed as `damaged`, and hides no other.
    """
    found = list[Case]()
    while True:
        asked = limit - len(found)
        page = heads(store, contract, limit=asked, after=after)
        found += [case for head in page if (case := case_of(store, contract, head)) is not None]
        if len(page) < asked or len(found) == limit:
            return found
        after = page[-1].since_ms, page[-1].dfid


@dataclass(frozen=True, slots=True)
class CaseHead:
    """Of a case that waits, what a list is sorted and filtered by. `action`: the kind that was ordered, else proposed."""

    dfid: str
    event_id: str
    agent_id: str
    state: str
    since_ms: int
    reason: str
    action: str | None
    numbers: Mapping[str, int]

    def impact(self, terms: Contract) -> Impact | None:
        """Return the impact of what is proposed, as `Case.impact` does."""
        if self.state == "EXECUTING":
            return "HIGH"
        return impact(terms, self.action, self.numbers) if self.action else None


def heads(store: Reader, contract: Contract, *, limit: int = WAITING_MAX, after: Place = BEFORE_ALL) -> list[CaseHead]:
    """Return the heads of the cases that wait, oldest first, in two statements however many there are. `after`: as for
    `waiting`.
    """
    rows = [row for page in PAGES for row in store.rows(page, (contract.gate, *after, limit))]
    return [_head(*row) for row in sorted(rows, key=lambda row: (row[4], row[0]))[:limit]]


def case_of(store: Reader, contract: Contract, head: CaseHead) -> Case | None:
    """Return the case of a head, `damaged` when its rows cannot be read; None: it waits no longer. It keeps the place that
    it was found at, also where recovery asked about its order meanwhile.
    """
    where = _UNKNOWN if head.state == "EXECUTING" else _ESCALATED
    try:
        row = store.row(f"{_CASE} AND {where}", (contract.gate, head.dfid))
        if row is None:
            return None
        if type((found := _case(store, row)).since_ms) is int:
            return replace(found, since_ms=head.since_ms)
    except StoreError:
        pass
    return Case(head.dfid, head.event_id, head.agent_id, head.state, head.since_ms, damaged=True)


def _head(
    dfid: str, event_id: str, agent_id: str, state: str, since_ms: int, code: str | None, kind: str | None, said: str
) -> CaseHead:
    try:
        numbers = numbers_of(said)
    except NOT_AS_WRITTEN:  # its row in the list says so
        kind, numbers = None, {}
    reason = "UNKNOWN" if state == "EXECUTING" else code or ""
    return CaseHead(dfid, event_id, agent_id, state, since_ms, reason, None if kind == ESCALATE else kind, numbers)


def read_case(store: Reader, contract: Contract, dfid: str) -> Case:
    """Return one flow of this gate. Raises UsageError when there is none, StoreError when it cannot be read."""
    row = store.row(_CASE, (contract.gate, dfid))
    if row is None:
        raise UsageError(f"there is no flow `{dfid}` of gate `{contract.gate}`", hint="sds escalations list")
    return _case(store, row)


def registered_terms(store: Reader, gate: str) -> Contract:
    """Return the terms a human decides under by the contract registered last. Raises UsageError when there is none."""
    contract = registered_contract(store, gate)
    if contract is None:
        raise UsageError(f"no contract is registered for gate `{gate}`")
    return human_contract(contract)


def _case(store: Reader, row: tuple[Any, ...]) -> Case:
    with reading(unreadable(row[0])):
        (dfid, event_id, agent_id, state, since_ms, trigger, snapshot_id, body, said, params) = row[:10]
        reasons, reason_code, confidence, alternatives, ordered, execution, resolved, tag = row[10:]
        texts = Texts(store, dfid, shown=True)
        event, snapshot = texts.fields(TRIGGER, _object(trigger)), _object(body or "{}")
        about = difference_in(event)
        measured = json.loads(alternatives or "[]")
        return Case(
            dfid=dfid,
            event_id=event_id,
            agent_id=agent_id,
            state=state,
            since_ms=since_ms,
            trigger=event,
            key=_text(snapshot.get("key") or (str(about["resource_key"]) if about else _key(store, dfid, event))),
            snapshot_id=snapshot_id or "",
            fields=dict(snapshot.get("fields", {})),
            said=texts.data(PROPOSAL, said or b""),
            numbers=numbers_of(params),
            reasons=_difference_words(about) if about else _reasons(reasons),
            reason_code=reason_code,
            confidence=confidence,
            # a text says why there are none
            alternatives=tuple(map(dict, measured)) if isinstance(measured, list) else (),
            ordered=ordered,
            execution=execution,
            resolved=resolved,
            tag=tag,
        )


def _reasons(text: str | None) -> tuple[str, ...]:
    return tuple(f"{code}: {line}" for _, code, line in json.loads(text or "[]"))


def _difference_words(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key of a difference and who ordered it, and then both sides, as one line each."""
    ordered = f"flow {about['dfid']}" if about["dfid"] else "an unknown flow"
    named = f"{about['code']}: key {about['key']}, ordered by {ordered}"
    return named, f"the record: {about['here']}", f"the outside: {about['outside']}"


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError("not an object")
    return found


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise TypeError("not a text")
    return found


def _key(store: Reader, dfid: str, event: Mapping[str, Any]) -> str:
    """Return the key of a flow without a snapshot; "" when no contract's form fits its trigger."""
    fields = event_fields(store, dfid)
    return str(event[fields.key]) if fields else ""


def event_of(store: Reader, dfid: str) -> Event | None:
    """Return the event of a flow, by the form its trigger has; None: it has that of no registered contract. Raises
    ErasedError: its text was erased.
    """
    spec, row = event_fields(store, dfid), store.row(_EVENT, (dfid,))
    return None if spec is None or row is None else event_in(Texts(store, dfid), spec, *row)


def refuse_unless_waiting(case: Case) -> None:
    """Raise UsageError unless the flow is escalated and nobody has resolved it."""
    if case.resolved:
        message = f"flow `{case.dfid}` is resolved already: {case.resolved}"
        raise UsageError(message, reason_code="FLOW_CLOSED", hint=f"sds audit {case.dfid}", dfid=case.dfid)
    if case.state != "ESCALATED":
        message = f"flow `{case.dfid}` is {case.state}, not ESCALATED"
        raise UsageError(message, reason_code="FLOW_CLOSED", hint="sds escalations list", dfid=case.dfid)


def refuse_altered(store: Reader, dfid: str) -> None:
    """Raise StoreError when the rows that a human decides on are not those that the ledger sealed."""
    sql = "SELECT CASE WHEN json_valid(body) THEN body -> '$.rows' END FROM ledger WHERE dfid = ? AND kind = 'DECIDED'"
    sealed, now = json.loads(store.value(sql, (dfid,)) or "{}"), seal(store, dfid, SEALED)
    if any(sealed.get(name) != now[name] for name in SEALED):
        raise StoreError(f"the record of flow `{dfid}` was altered", hint="sds ledger verify", dfid=dfid)
