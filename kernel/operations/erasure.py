"""Erasing a case: the key that its texts lie under is destroyed, and what the ledger says of it stays and verifies.

What goes: evidence, prompts, proposals, rationales. What stays: what was decided, ordered and paid, when, by whom, under
which contract and on which state; ids, the key of the event, and how long each text was. A saga is one case with its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from sds.kernel.errors import StoreError, UsageError
from sds.kernel.flow import undecided
from sds.kernel.flow.intake import saga_child
from sds.kernel.flow.states import ERASED
from sds.kernel.human.parsing import said
from sds.kernel.saga import state as saga
from sds.kernel.storage import ledger, vault
from sds.kernel.storage.store import Reader, Store

_CHAIN = "SELECT event_id, state, tag, trigger_event, parent_dfid FROM decision_flows WHERE dfid = ?"
_MENDS = {
    "ESCALATED": "end it first: sds escalations resolve {dfid} --abort --reason TEXT",
    "EXECUTING": "sds recover learns what became of its order",
    "ACTIVE": "wait for it; sds recover ends what nobody holds any more",
}


@dataclass(frozen=True, slots=True)
class Erased:
    """What was done. `events`: the event, and the steps of its saga. `in_clear`: flows that an older version wrote, whose
    texts stay. `overwritten`: whether what held the key is overwritten on disk, too; while others read, it is not yet.
    """

    dfid: str
    events: tuple[str, ...]
    in_clear: tuple[str, ...]
    overwritten: bool


@dataclass(frozen=True, slots=True)
class _Flow:
    dfid: str
    event_id: str
    state: str
    tag: str | None
    trigger: str


def erase(store: Store, gate: str, event_id: str, *, who: str, reason: str, now_ms: int) -> Erased:
    """Destroy the key of a case, in one transaction with its ERASED entry. Nothing brings it back.

    Raises UsageError when there is no such case, it is not at its end, or its texts lie under no key; ErasedError.
    """
    who, reason = said("name", who), said("reason", reason)
    with store.transaction():
        flows = _flows(store, gate, event_id)
        for flow in flows:
            _refuse_open(flow)
        events = tuple(dict.fromkeys(flow.event_id for flow in flows))
        in_clear = tuple(flow.dfid for flow in flows if not vault.fingerprint_in(flow.trigger))
        vault.destroy(store, gate, events, who=who, reason=reason, now_ms=now_ms)
        tag = _ended(store, flows[0])
        body = {"gate": gate, "event_id": event_id, "events": events, "who": who, "reason": reason, "tag": tag}
        ledger.append(store, now_ms, "ERASED", flows[0].dfid, body)
    overwritten = False
    with suppress(StoreError):  # it is erased, whatever becomes of the log
        overwritten = store.truncate_log()
    return Erased(flows[0].dfid, events, in_clear, overwritten)


def _ended(store: Store, flow: _Flow) -> str | None:
    """Return the tag of a flow whose case is erased: what nobody has decided is over now, for good.

    An order that was recorded as failed and was carried out all the same stays marked: that is still a human's.
    """
    if flow.tag == "DIRTY" or not undecided.is_undecided(flow.state, flow.tag):
        return flow.tag
    store.run("UPDATE decision_flows SET tag = ? WHERE dfid = ?", (ERASED, flow.dfid))
    return ERASED


def _flows(store: Reader, gate: str, event_id: str) -> list[_Flow]:
    """Return the flows of a case, the last of the event first. Raises UsageError when there are none, or of a step."""
    own = list(_chain(store, gate, event_id))
    if not own:
        raise UsageError(f"there is no event `{event_id}` of gate `{gate}` in the record", hint="sds flows")
    child = saga_child(own[0].trigger)
    if child is not None:
        of = store.value("SELECT event_id FROM decision_flows WHERE dfid = ?", (child[0],))
        raise UsageError(f"event `{event_id}` is a step of a saga", hint=f"erase the whole of it: --event {of}")
    return [*own, *(step for flow in own for step in _steps(store, gate, flow.dfid))]


def _chain(store: Reader, gate: str, event_id: str) -> Iterator[_Flow]:
    """Yield the flows of one event, the last first: each is the child of the one before."""
    dfid = store.value("SELECT dfid FROM events WHERE gate = ? AND event_id = ?", (gate, event_id))
    seen = set[str]()
    while dfid not in seen and (found := store.row(_CHAIN, (dfid,))) is not None and found[0] == event_id:
        seen.add(dfid)
        yield _Flow(dfid, *found[:4])
        dfid = found[4]


def _steps(store: Reader, gate: str, dfid: str) -> Iterator[_Flow]:
    for event_id in saga.children(store, dfid):
        flows = list(_chain(store, gate, event_id))
        if flows and (saga_child(flows[0].trigger) or ("",))[0] == dfid:  # an outsider may have taken the name
            yield from flows


def _refuse_open(flow: _Flow) -> None:
    """Raise UsageError unless a flow is at its end; a step that was escalated waits as its saga does."""
    if flow.state == "ESCALATED" and saga_child(flow.trigger):
        return
    if flow.state not in ("CLOSED", "ABORTED"):
        hint = _MENDS.get(flow.state, _MENDS["ACTIVE"]).format(dfid=flow.dfid)
        raise UsageError(
            f"the case of event `{flow.event_id}` is not at its end: it is {flow.state}", hint=hint, dfid=flow.dfid
        )
