"""The life of a decision flow (DIR 4.3): which state may follow which, as a pure table; its lease; and its answer.

While a flow's lease runs its holder may be at work on it, and others leave it alone. That an order has its effect at most
once does not depend on leases, and so on no clock. A holder whose lease was taken over finds its flow closed in the
transaction that would reserve. A reserved order has one key: recovery looks it up, and sends it again only under that key,
to an executor that honours it. Otherwise recovery voids the key, or leaves the order UNKNOWN.

An answer is always read from the record, never kept beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sds.kernel.errors import NOT_AS_WRITTEN, StoreError, TransitionError, unreadable
from sds.kernel.executor.breaker import EXECUTOR_DOWN
from sds.kernel.executor.wholeness import KEY_LOST, LEDGER_ALTERED, RECORD_BEHIND
from sds.kernel.storage.store import Reader, Store
from sds.kernel.storage.vault import Texts

State = Literal["CREATED", "ACTIVE", "VALIDATING", "ACCEPTED", "EXECUTING", "CLOSED", "ABORTED", "ESCALATED"]

_NEXT: dict[State, frozenset[State]] = {
    "CREATED": frozenset({"ACTIVE"}),
    "ACTIVE": frozenset({"VALIDATING", "ABORTED"}),
    "VALIDATING": frozenset({"ACCEPTED", "ABORTED", "ESCALATED", "ACTIVE"}),
    "ACCEPTED": frozenset({"EXECUTING", "ABORTED", "CLOSED"}),
    "EXECUTING": frozenset({"CLOSED", "ABORTED"}),
    "ESCALATED": frozenset({"ACCEPTED", "ABORTED"}),
    "CLOSED": frozenset(),
    "ABORTED": frozenset(),
}

FINAL: frozenset[State] = frozenset({"CLOSED", "ABORTED", "ESCALATED"})

EXECUTION_FAILED = "EXECUTION_FAILED"
# An event whose flow ended ABORTED under one of these may have a fresh flow: nobody has decided the case itself. After
# `retry.restarts_max` fresh flows a human must decide.
RESTARTABLE_TAGS = frozenset(
    {
        "STATE_DRIFT_DETECTED",
        "SPEND_LIMIT_EXCEEDED",
        "INTERRUPTED",
        "HALTED",
        "AGENT_SUSPENDED",
        "CONTRACT_REVOKED",
        EXECUTION_FAILED,
    }
)
# Under one of `WAITING_TAGS` any number of times: the load, another order or the outside was in the way, not the case.
NOT_DECIDED, NOT_SENT = "NOT_DECIDED", "NOT_SENT"
CONTENTION = "RESOURCE_CONTENTION"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"  # why a flow under a deadline ended NOT_DECIDED
ADOPTED = "ADOPTED"  # an order that the record did not know was taken over; ABORTED: it was rejected or taken back
_OF_THE_RECORD = (RECORD_BEHIND, LEDGER_ALTERED, KEY_LOST)
WAITING_TAGS = frozenset({ADOPTED, NOT_DECIDED, CONTENTION, EXECUTOR_DOWN, NOT_SENT, *_OF_THE_RECORD})
UNDECIDED_TAGS = RESTARTABLE_TAGS | WAITING_TAGS
# A flow that ended ABORTED under one of these is decided: by a human, by the choice from a saga's menu, by a step that
# was denied, or by the erasure of the case, which left no text to decide on.
ERASED = "ERASED"
SAGA_DIRTY = "PARTIAL_SUCCESS_DIRTY"
DIRTY = "DIRTY"  # the status and tag of an order whose recorded end the executor has contradicted
DECIDED_TAGS = frozenset({"HUMAN_ABORTED", "COMPENSATED", SAGA_DIRTY, "STEP_DENIED", ERASED})


def may_restart(tag: str | None, restarts: int, restarts_max: int) -> bool:
    """Tell whether a flow that ended for `tag` may have a fresh one. `restarts`: those that count against the limit."""
    return tag in WAITING_TAGS or (tag in RESTARTABLE_TAGS and restarts < restarts_max)


_MOVES = {"decision_flows": "state", "execution_log": "status", "sagas": "phase"}


def move_on(store: Store, table: str, dfid: str, to: str, *, was: Sequence[str], **beside: str | int | None) -> None:
    """Move the row of a flow, its order or its saga from one of the states `was` to `to`, and set the columns `beside`.

    Runs inside the caller's transaction. Raises StoreError where the row is in another state: the column becomes NULL,
    which its constraint forbids, and the transaction is rolled back. Like any `write`, it may raise only at a later
    statement or at the commit, since nobody waits for the number of rows.
    """
    column, others = _MOVES[table], "".join(f", {name} = ?" for name in beside)
    seen = ", ".join("?" * len(was))
    sql = f"UPDATE {table} SET {column} = CASE WHEN {column} IN ({seen}) THEN ? END{others} WHERE dfid = ?"
    store.write(sql, (*was, to, *beside.values(), dfid))


def transition(start: State, *path: State) -> State:
    """Follow `path` from `start`, one permitted step at a time. Raises TransitionError at the first that is forbidden."""
    for state in path:
        if state not in _NEXT[start]:
            raise TransitionError(f"a flow cannot go from {start} to {state}")
        start = state
    return start


def is_held(begun_ms: int, until_ms: int, now_ms: int) -> bool:
    """Tell whether a lease from `begun_ms` until `until_ms` (milliseconds since 1970) still runs.

    It is over after its end. It is also over if it begins further ahead than it is long: then the clock was ahead when the
    lease was written and has been set back since, and waiting would hold up what is reserved. A lease that begins less far
    ahead still runs: of two processes that share a record, one may have read its clock a little earlier.
    """
    return begun_ms - (until_ms - begun_ms) <= now_ms <= until_ms


@dataclass(frozen=True, slots=True)
class Answer:
    """The decision as it stands. `params` are in minor units. `execution` is None when nothing is to be executed.

    `justification`: the agent's reason code, with its rationale, be it from the proposal or written afterwards.
    `reason_code` and `reasons` are the kernel's. Once a human has resolved an escalation, `resolution` says how, and
    action, params and justification are the human's.
    """

    dfid: str
    gate: str
    event_id: str
    state: str
    outcome: str | None = None
    action: str | None = None
    params: Mapping[str, int] = field(default_factory=dict)
    justification: str | None = None
    reason_code: str | None = None
    reasons: tuple[str, ...] = ()
    tag: str | None = None
    execution: str | None = None
    reference: str | None = None
    confidence: float | None = None
    parent_dfid: str | None = None
    resolution: str | None = None
    resolved_by: str | None = None

    @property
    def pending(self) -> bool:
        """Whether somebody is still at work on it: no final state, and no UNKNOWN order, which only recovery can settle."""
        return self.state not in FINAL and self.execution != "UNKNOWN"

    @property
    def retryable(self) -> bool:
        """Whether nobody has decided it and the event may be sent again. `tag` says why it ended."""
        return self.state == "ABORTED" and self.tag in UNDECIDED_TAGS

    def as_data(self) -> dict[str, object]:
        """Return it as JSON data."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return {**columns, "params": dict(self.params), "pending": self.pending, "retryable": self.retryable}


_SQL = """
SELECT f.dfid, f.gate, f.event_id, f.state, v.outcome, COALESCE(h.policy_kind, p.policy_kind, NULLIF(e.kind, '')),
       COALESCE(h.params, p.params, e.params), COALESCE(h.justification, p.justification), v.reason_code, v.reasons,
       f.tag, e.status, e.external_receipt, p.confidence, f.parent_dfid, h.decision, h.who,
       CASE WHEN h.justification IS NULL THEN substr(p.proposal, 1, 6) END,
       CASE WHEN h.justification IS NULL THEN r.body END
FROM decision_flows f
LEFT JOIN policy_proposals p ON f.dfid = p.dfid
LEFT JOIN dim_validations v ON f.dfid = v.dfid
LEFT JOIN execution_log e ON f.dfid = e.dfid
LEFT JOIN human_decisions h ON f.dfid = h.dfid
LEFT JOIN ledger r ON f.dfid = r.dfid AND r.kind = 'RATIONALE'
WHERE f.dfid = ?
"""
_COLUMNS = tuple(Answer.__dataclass_fields__)


def answer(store: Reader, dfid: str) -> Answer | None:
    """Return a flow's answer, or None when there is no such flow. Raises StoreError when it cannot be read."""
    row = store.row(_SQL, (dfid,))
    if row is None:
        return None
    *columns, proposal, rationale = row
    found = dict(zip(_COLUMNS, columns, strict=True))
    try:
        found["justification"] = _justified(Texts(store, dfid, shown=True), found["justification"], proposal, rationale)
        found["params"] = numbers_of(found["params"])
        found["reasons"] = tuple(
            f"gate {gate}: {code}: {line}" for gate, code, line in json.loads(found["reasons"] or "[]")
        )
    except NOT_AS_WRITTEN as error:
        raise unreadable(dfid) from error
    return Answer(**found)


def _justified(texts: Texts, code: str | None, proposal: bytes | None, entry: str | None) -> str | None:
    """Return a reason code with its rationale: the one in the proposal, or the one in a RATIONALE entry."""
    if code is None:
        return None
    justification = texts.justification(code, proposal or b"")
    return f"{justification}: {texts.rationale(json.loads(entry))}" if entry else justification


def known_answer(store: Reader, dfid: str) -> Answer:
    """Return a flow's answer. Raises StoreError when the flow is not in the record or cannot be read."""
    found = answer(store, dfid)
    if found is None:
        raise StoreError(f"flow `{dfid}` is not in the record", dfid=dfid)
    return found


def numbers_of(text: str | None) -> dict[str, int]:
    """Return the numbers of a decision from the record's JSON. Raises ValueError or TypeError when it is not that."""
    found = json.loads(text or "{}")
    if not isinstance(found, dict) or not all(type(number) is int for number in found.values()):
        raise TypeError("not an object of numbers")
    return found
