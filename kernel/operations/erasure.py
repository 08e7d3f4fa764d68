"""Erases a case: the key of its texts is destroyed, while the ledger's entries about it stay and still verify.

Erased: evidence, prompts, proposals, rationales. Kept: what was decided, ordered and paid, when, by whom, under which
contract and on which state; ids, the key of the event, and the length of each text. A saga is one case with its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from sds.kernel.errors import StoreError, UsageError
from sds.kernel.flow import undecided
from sds.kernel.flow.intake import saga_child
from sds.kernel.flow.states import ERASED
from sds.kernel.human.parsing import said
from sds.kernel.saga import state as saga
from sds.kernel.storage import ledger, vault
from sds.kernel.storage.store import Reader, Store

_CHAIN = "SELECT event_id, state, tag, trigger_event, parent_dfid FROM decision_flows WHERE dfid = ?"
# The last flow of an event; where an adopted one stands for it, the last of its own, which hold its texts.
_LAST = """
SELECT COALESCE((SELECT f.dfid FROM decision_flows f WHERE f.dfid = e.dfid AND f.event_id = e.event_id),
    (SELECT f.dfid FROM decision_flows f WHERE f.gate = e.gate AND f.event_id = e.event_id ORDER BY f.restarts DESC LIMIT 1))
FROM events e WHERE e.gate = ? AND e.event_id = ?
"""
_ERASURES = """
SELECT x.event_id, x.erased_at_ms, x.who, x.reason FROM erasures x
LEFT JOIN events e ON e.gate = x.gate AND e.event_id = x.event_id LEFT JOIN decision_flows f ON f.dfid = e.dfid
WHERE x.gate = ? AND COALESCE(CASE WHEN json_valid(f.trigger_event) THEN json_type(f.trigger_event, '$.saga') END, '') <> 'array'
ORDER BY x.erased_at_ms, x.event_id
"""
_MENDS = {
    "ESCALATED": "end the case first: sds escalations resolve {dfid} --abort --reason TEXT",
    "EXECUTING": "run `sds recover`: it asks the executor what became of the order",
    "ACTIVE": "wait until it ends; `sds recover` ends a flow whose process is gone",
}


@dataclass(frozen=True, slots=True)
class Erased:
    """What was erased. `events`: the event, and the steps of its saga. `in_clear`: flows of an older version, whose texts
    stay. `overwritten`: whether the key is overwritten on disk, too; it is not while others read.
    """

    dfid: str
    events: tuple[str, ...]
    in_clear: tuple[str, ...]
    overwritten: bool


@dataclass(frozen=True, slots=True)
class Erasure:
    """One case that was erased: its event, when in milliseconds since 1970, by whom and why."""

    event_id: str
    at_ms: int
    who: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Flow:
    dfid: str
    event_id: str
    state: str
    tag: str | None
    trigger: str


def erase(store: Store, gate: str, event_id: str, *, who: str, reason: str, now_ms: int) -> Erased:
    """Do what `destroy` does, and then `overwrite`."""
    done = destroy(store, gate, event_id, who=who, reason=reason, now_ms=now_ms)
    return replace(done, overwritten=overwrite(store))


def overwrite(store: Store) -> bool:
    """Overwrite on disk the keys that were destroyed. Return False while others read: `Store.remains` says what stays."""
    with suppress(StoreError):  # they are destroyed even if the log cannot be emptied
        return store.truncate_log()
    return False


def destroy(store: Store, gate: str, event_id: str, *, who: str, reason: str, now_ms: int) -> Erased:
    """Destroy the key of a case, in one transaction with its ERASED entry. Nothing brings it back. What held the key is
    not overwritten yet: see `overwrite`, which is enough after the last of several.

    Raises UsageError when there is no such case, it has not ended, or its texts lie under no key; ErasedError: it was
    erased.
    """
    who, reason = said("name", who), said("reason", reason)
    with store.transaction():
        flows = _flows(store, gate, event_id)
        for flow in flows:
            _refuse_open(flow)
        events = tuple(dict.fromkeys(flow.event_id for flow in flows))
        in_clear = tuple(flow.dfid for flow in flows if not vault.fingerprint_in(flow.trigger))
        vault.destroy(store, gate, events, who=who, reason=reason, now_ms=now_ms)
        tag = _mark_erased(store, flows[0])
        body = {"gate": gate, "event_id": event_id, "events": events, "who": who, "reason": reason, "tag": tag}
        ledger.append(store, now_ms, "ERASED", flows[0].dfid, body)
    return Erased(flows[0].dfid, events, in_clear, overwritten=False)


def erasures(store: Reader, gate: str) -> list[Erasure]:
    """Return what was erased of a gate, oldest first. A saga is listed once, without its steps."""
    return [Erasure(*row) for row in store.rows(_ERASURES, (gate,))]


def _mark_erased(store: Store, flow: _Flow) -> str | None:
    """Return the tag of a flow whose case is erased. An undecided case has ended for good now.

    A DIRTY flow keeps its tag: its order was recorded as failed but carried out, and a human must still look at it.
    """
    if flow.tag == "DIRTY" or not undecided.is_undecided(flow.state, flow.tag):
        return flow.tag
    store.run("UPDATE decision_flows SET tag = ? WHERE dfid = ?", (ERASED, flow.dfid))
    return ERASED


def _flows(store: Reader, gate: str, event_id: str) -> list[_Flow]:
    """Return the flows of a case, the last of its event first. Raises UsageError when there are none, or for a step."""
    own = list(_chain(store, gate, event_id))
    if not own:
        raise UsageError(f"there is no event `{event_id}` of gate `{gate}` in the record", hint="sds flows")
    child = saga_child(own[0].trigger)
    if child is not None:
        of = store.value("SELECT event_id FROM decision_flows WHERE dfid = ?", (child[0],))
        raise UsageError(f"event `{event_id}` is a step of a saga", hint=f"erase the whole saga: --event {of}")
    return [*own, *(step for flow in own for step in _steps(store, gate, flow.dfid))]


def _chain(store: Reader, gate: str, event_id: str) -> Iterator[_Flow]:
    """Yield the flows of one event, the last first. Each is the child of the one before it."""
    dfid = store.value(_LAST, (gate, event_id))
    seen = set[str]()
    while dfid not in seen and (found := store.row(_CHAIN, (dfid,))) is not None and found[0] == event_id:
        seen.add(dfid)
        yield _Flow(dfid, *found[:4])
        dfid = found[4]


def _steps(store: Reader, gate: str, dfid: str) -> Iterator[_Flow]:
    for event_id in saga.children(store, dfid):
        flows = list(_chain(store, gate, event_id))
        if flows and (saga_child(flows[0].trigger) or ("",))[0] == dfid:  # an outside event may have the same id
            yield from flows


def _refuse_open(flow: _Flow) -> None:
    """Raise UsageError unless a flow has ended. An escalated step of a saga passes: its saga waits, not the step."""
    if flow.state == "ESCALATED" and saga_child(flow.trigger):
        return
    if flow.state not in ("CLOSED", "ABORTED"):
        hint = _MENDS.get(flow.state, _MENDS["ACTIVE"]).format(dfid=flow.dfid)
        raise UsageError(
            f"the case of event `{flow.event_id}` has not ended: its flow is {flow.state}", hint=hint, dfid=flow.dfid
        )
