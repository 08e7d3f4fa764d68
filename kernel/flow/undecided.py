"""Flows that ended although nobody has decided the case. Their event may have a fresh flow, or a human must decide.

    waits      ABORTED under a tag of `states.UNDECIDED_TAGS`: the event, sent again, gets a fresh flow
    a human's  ESCALATED, once the fresh flows that the contract permits are used up; charged to no agent

A flow has at most one order. When an order came to nothing and a human is to decide, a successor of its flow is written,
with the same snapshot and proposal. Everything here that writes runs inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterator

from sds.kernel.canonical import canonical, flow_id, one_line
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.dim import AFTER_THE_GATES
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.flow.decision_record import SEALED, seal
from sds.kernel.flow.states import (
    DECIDED_TAGS,
    DIRTY,
    NOT_DECIDED,
    RESTARTABLE_TAGS,
    State,
    may_restart,
    move_on,
    transition,
)
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Reader, Row, Store

REASON_CHARS_MAX = 300
INTERRUPTED = "INTERRUPTED"
RESTARTS_LOOKED_AT = 256  # the id of a flow with more restarts than this is not recognised
HAND_OVERS_LOOKED_AT = 3  # successors in a row: a human's order may be declined, too, which makes another successor

_SUCCESSOR = (
    "INSERT INTO decision_flows (dfid, restarts, created_at_ms, state, tag, lease_until_ms,"
    " agent_id, trigger_event, parent_dfid, gate, event_id, contract_hash)"
    " SELECT ?, ?, ?, ?, ?, ?, agent_id, trigger_event, dfid, gate, event_id, contract_hash"
    " FROM decision_flows WHERE dfid = ?"
)
_COPIED = ("context_snapshots", "policy_proposals")  # both begin with the dfid
_CHAIN = f"""
WITH RECURSIVE chain(dfid, parent, gate, event_id, tag) AS (
    SELECT dfid, parent_dfid, gate, event_id, NULLIF(tag, tag) FROM decision_flows WHERE dfid = ?
    UNION ALL
    SELECT f.dfid, f.parent_dfid, f.gate, f.event_id, f.tag FROM chain c
    JOIN decision_flows f ON f.dfid = c.parent AND f.gate = c.gate AND f.event_id = c.event_id
)
SELECT count(*) FROM chain WHERE tag IN ({", ".join(f"'{tag}'" for tag in sorted(RESTARTABLE_TAGS))})
"""

# The flow itself, and those before it of the same event, back to the last one that had an order.
_WITHOUT_ORDER = """
WITH RECURSIVE chain(dfid, parent, gate, event_id, back) AS (
    SELECT dfid, parent_dfid, gate, event_id, 0 FROM decision_flows WHERE dfid = ?
    UNION ALL
    SELECT f.dfid, f.parent_dfid, f.gate, f.event_id, c.back + 1 FROM chain c
    JOIN decision_flows f ON f.dfid = c.parent AND f.gate = c.gate AND f.event_id = c.event_id
    WHERE NOT EXISTS (SELECT 1 FROM execution_log e WHERE e.dfid = f.dfid)
)
SELECT dfid FROM chain ORDER BY back DESC LIMIT 1
"""

# Of a flow's case (the flow, those before it, and the steps of these): an order that the record has as failed, and that was carried
# out or may be. The executor has said so since (DIRTY), or its statement has (`human.statement_cases`). Counts, because
# PostgreSQL joins a table that was never analysed by reading all of it.
_SAID_OUTSIDE = """
SELECT count(*) FROM decision_flows s WHERE s.event_id = 'statement/' || e.idempotency_key
AND s.event_id >= 'statement/' AND s.event_id < 'statement0'
AND CASE WHEN json_valid(s.trigger_event) THEN s.trigger_event ->> '$.statement.code' END IN ('CARRIED_OUT_OUTSIDE', 'PENDING_OUTSIDE')
"""
_CONTRADICTED = f"(e.status = 'DIRTY' OR (e.status = 'FAILED' AND ({_SAID_OUTSIDE}) > 0))"
_CARRIED_OUT = f"""
WITH RECURSIVE chain(dfid, parent) AS (
    SELECT dfid, parent_dfid FROM decision_flows WHERE dfid = ?
    UNION ALL
    SELECT f.dfid, f.parent_dfid FROM chain c JOIN decision_flows f ON f.dfid = c.parent
)
SELECT 1 FROM chain c WHERE (SELECT count(*) FROM execution_log e WHERE e.dfid = c.dfid AND {_CONTRADICTED})
+ (SELECT count(*) FROM decision_flows f JOIN execution_log e ON e.dfid = f.dfid WHERE f.parent_dfid = c.dfid AND {_CONTRADICTED}) > 0
LIMIT 1
"""

_BEING_DECIDED = (
    "SELECT f.dfid FROM decision_flows f LEFT JOIN sagas s ON s.dfid = f.dfid"
    " WHERE f.gate = ? AND f.state = 'ACTIVE' AND s.dfid IS NULL ORDER BY f.created_at_ms, f.dfid"
)

# A condition on `decision_flows f`: it is the last flow of its event, and nobody has decided it or has been asked to, or
# its order has no answer yet.
WAITS = (
    "((f.state = 'ABORTED' AND (f.tag IS NULL OR f.tag NOT IN"
    f" ({', '.join(repr(tag) for tag in sorted(DECIDED_TAGS))}))) OR f.state = 'ACTIVE' OR (f.state = 'EXECUTING'"
    " AND EXISTS (SELECT 1 FROM execution_log o WHERE o.dfid = f.dfid AND o.status = 'PENDING')))"
    " AND EXISTS (SELECT 1 FROM events e WHERE e.gate = f.gate AND e.event_id = f.event_id AND e.dfid = f.dfid)"
)


def is_undecided(state: str, tag: str | None) -> bool:
    """Tell whether a flow has ended with nobody having decided its case and no human being asked to."""
    return state == "ABORTED" and tag not in DECIDED_TAGS


def has_restart(store: Reader, dfid: str, tag: str | None, restarts_max: int) -> bool:
    """Tell whether the event of a flow that ends for `tag` may have a fresh flow.

    Flows that only waited (`states.WAITING_TAGS`) do not count against the limit.
    """
    restarts = int(store.value("SELECT restarts FROM decision_flows WHERE dfid = ?", (dfid,)) or 0)
    if restarts >= restarts_max and tag in RESTARTABLE_TAGS:
        restarts = int(store.value(_CHAIN, (dfid,)))
    return may_restart(tag, restarts, restarts_max)


def named_by(store: Reader, dfid: str) -> str:
    """Return the flow whose id goes into the idempotency key of this flow's order: the first since the event's last order.

    So a new key is made only after an order came to nothing outside, however often a flow began here. A record copied in
    the middle of a decision and put back finds that flow interrupted; its fresh flow uses the key that was sent then.
    """
    return str(store.value(_WITHOUT_ORDER, (dfid,)) or dfid)


def was_carried_out(store: Reader, dfid: str) -> bool:
    """Tell whether an order of a flow's case was carried out, or may be, although the record has it as failed."""
    return store.value(_CARRIED_OUT, (dfid,)) is not None


def interrupt(store: Store, dfid: str, *, restarts_max: int, now_ms: int) -> State:
    """End an ACTIVE flow whose holder is gone; nothing was reserved for it. Return ABORTED, or ESCALATED: no fresh flow."""
    again = has_restart(store, dfid, INTERRUPTED, restarts_max)
    state = transition("ACTIVE", "ABORTED") if again else transition("ACTIVE", "VALIDATING", "ESCALATED")
    move_on(store, "decision_flows", dfid, state, was=("ACTIVE",), tag=INTERRUPTED)
    _write_end(store, dfid, state, INTERRUPTED, "the process that was deciding the flow is gone", now_ms)
    return state


def set_aside(store: Store, gate: str, why: str, *, now_ms: int) -> None:
    """End every ACTIVE flow of a gate except sagas, undecided: whoever is deciding one finds it ended and begins a new flow."""
    for (dfid,) in store.rows(_BEING_DECIDED, (gate,)):
        move_on(store, "decision_flows", dfid, transition("ACTIVE", "ABORTED"), was=("ACTIVE",), tag=NOT_DECIDED)
        _write_end(store, dfid, "ABORTED", NOT_DECIDED, why, now_ms)


def is_child(store: Reader, dfid: str) -> bool:
    """Tell whether a flow is a saga's step or its choice from the menu: then the saga decides what follows."""
    sql = "SELECT json_type(trigger_event, '$.saga') FROM decision_flows WHERE dfid = ? AND json_valid(trigger_event)"
    return bool(store.value(sql, (dfid,)) == "array")


def hand_over(store: Store, dfid: str, tag: str, why: str, *, now_ms: int) -> str:
    """Give the event of a flow that has ended a successor that waits for a human; return the successor's dfid."""
    flow = store.row("SELECT gate, event_id, restarts + 1 FROM decision_flows WHERE dfid = ?", (dfid,))
    if flow is None:
        raise StoreError(f"flow `{dfid}` is not in the record", dfid=dfid)
    gate, event_id, restarts = flow
    successor = flow_id(gate, event_id, dfid, restarts)
    state = transition("CREATED", "ACTIVE", "VALIDATING", "ESCALATED")
    store.run(_SUCCESSOR, (successor, restarts, now_ms, state, tag, now_ms, dfid))
    store.run(
        "UPDATE events SET dfid = ? WHERE gate = ? AND event_id = ? AND dfid = ?", (successor, gate, event_id, dfid)
    )
    for table in _COPIED:
        _copy(store, table, dfid, successor)
    _write_end(store, successor, "ESCALATED", tag, why, now_ms)
    return successor


def next_name(store: Reader, last: Row, body_hash: str, *, held: bool, restarts_max: int) -> str:
    """Return the id of the flow that an event would have now. `last`: its last flow, as (dfid, state, tag, restarts). That
    flow's id is returned unless it ended undecided or its holder is gone.
    """
    dfid, state, tag, restarts = last
    gone = state == "ACTIVE" and not held
    again = has_restart(store, dfid, INTERRUPTED if gone else tag, restarts_max)
    if not is_undecided(state, tag) and not (gone and again):
        return str(dfid)
    gate, event_id = store.rows("SELECT gate, event_id FROM decision_flows WHERE dfid = ?", (dfid,))[0]
    return flow_id(gate, event_id, body_hash if again else dfid, restarts + 1)


def is_named(dfid: str, gate: str, event_id: str, body_hash: str) -> bool:
    """Tell whether a flow's id is one that this event can give it."""
    return any(dfid == name for name, _ in names_of_flows(gate, event_id, body_hash))


def names_of_flows(gate: str, event_id: str, body_hash: str) -> Iterator[tuple[str, int]]:
    """Yield every id that a flow of an event may have, and its restarts. `hand_over` names by the flow before."""
    for restarts in range(RESTARTS_LOOKED_AT):
        name = flow_id(gate, event_id, body_hash, restarts)
        yield name, restarts
        for successor in range(1, HAND_OVERS_LOOKED_AT + 1):
            name = flow_id(gate, event_id, name, restarts + successor)
            yield name, restarts + successor


def why_handed_over(tag: str | None, flows: int) -> str:
    """Return why the event of a flow that ended undecided, the last of so many `flows`, is a human's now."""
    if tag == DIRTY:
        return "its order was recorded as failed, and was carried out all the same"
    return f"{flows} flows have ended without a decision"


def _copy(store: Store, table: str, dfid: str, successor: str) -> None:
    row: Row | None = store.row(f"SELECT * FROM {table} WHERE dfid = ?", (dfid,))
    if row is not None:
        marks = ", ".join("?" * len(row))
        store.run(f"INSERT INTO {table} VALUES ({marks})", (successor, *row[1:]))


def _write_end(store: Store, dfid: str, state: State, tag: str, why: str, now_ms: int) -> None:
    """Write why a flow ended without passing the five gates, and its one DECIDED entry."""
    attempts = int(store.value("SELECT count(*) FROM attempts WHERE dfid = ?", (dfid,)))
    store.insert(
        "dim_validations",
        dfid=dfid,
        outcome="ESCALATED" if state == "ESCALATED" else "REJECTED",
        gate_reached=AFTER_THE_GATES,
        reason_code=tag,
        reasons=canonical([[AFTER_THE_GATES, tag, one_line(why, REASON_CHARS_MAX)]]).decode(),
        attempt_number=attempts + 1,
        evaluated_at_ms=now_ms,
    )
    body = {"outcome": state, "state": state, "tag": tag, "reason_code": tag, "rows": seal(store, dfid, SEALED)}
    ledger.append(store, now_ms, "DECIDED", dfid, body)


def refuse_unless_undecided(store: Reader, dfid: str) -> None:
    """Raise UsageError unless nobody has decided the case of this flow and it may be decided anew."""
    row = store.row(
        "SELECT f.state, f.tag, e.dfid FROM decision_flows f LEFT JOIN events e"
        " ON e.gate = f.gate AND e.event_id = f.event_id WHERE f.dfid = ?",
        (dfid,),
    )
    if row is None:
        raise UsageError(f"there is no flow `{dfid}` in the record", hint="sds flows --undecided", dfid=dfid)
    state, tag, latest = row
    if latest not in (None, dfid):
        raise UsageError(f"flow `{dfid}` was replaced by `{latest}`", hint=f"sds audit {latest}", dfid=dfid)
    if state == "ESCALATED":
        raise UsageError(f"flow `{dfid}` waits for a human", hint=f"sds escalations show {dfid}", dfid=dfid)
    if not is_undecided(state, tag):
        raise UsageError(
            f"flow `{dfid}` is {state} and cannot be decided again", hint="sds flows --undecided", dfid=dfid
        )
    if is_child(store, dfid) or store.value("SELECT 1 FROM sagas WHERE dfid = ?", (dfid,)) is not None:
        raise UsageError(f"flow `{dfid}` belongs to a saga", hint="send the saga's event again", dfid=dfid)


def settled_events(store: Reader, contract: Contract) -> frozenset[str]:
    """Return the ids of a gate's events that need no more deciding; none whose flow ended undecided."""
    rows = store.rows(
        "SELECT e.event_id, f.state, f.tag FROM events e JOIN decision_flows f ON f.dfid = e.dfid WHERE e.gate = ?",
        (contract.gate,),
    )
    return frozenset(name for name, state, tag in rows if not is_undecided(state, tag))
