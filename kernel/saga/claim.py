"""Begins a saga: one for each event, with a flow for the saga itself and the row of its steps."""

from __future__ import annotations

import json
from dataclasses import replace

from sds.kernel.canonical import canonical
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import SagaSpec
from sds.kernel.errors import UsageError
from sds.kernel.flow import decision_record, undecided
from sds.kernel.flow.commit import ALREADY_ORDERED
from sds.kernel.flow.intake import Event, begin, refuse_another, write_event
from sds.kernel.flow.states import ADOPTED
from sds.kernel.saga.state import spec_of
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Reader, Store

STEP_ADOPTED = "a step of this saga was already carried out outside: a new start would carry it out again"
_STEP_ADOPTED = f"SELECT 1 FROM decision_flows WHERE parent_dfid = ? AND state = 'CLOSED' AND tag = '{ADOPTED}'"


def claim(
    store: Store, contract: Contract, name: str, event: Event, *, now_ms: int, deadline_ms: int | None = None
) -> str:
    """Return the dfid of the event's saga: a new one, or the one that is known.

    A saga that ended before anything was done, for a reason that says nothing about the case, is begun afresh as any
    flow is; one of which a step was carried out all the same is a human's (UsageError). `deadline_ms`: kept with what is
    begun; past it no step is sent. Raises EventError when the event is known with another body, as an ordinary decision or
    another saga.
    """
    trigger = _saga_trigger(event, name)
    with store.transaction():
        known = store.row(
            "SELECT e.body_hash, f.dfid, f.state, f.tag, f.restarts FROM events e"
            " JOIN decision_flows f ON f.dfid = e.dfid WHERE e.gate = ? AND e.event_id = ?",
            (contract.gate, event.id),
        )
        last, restarts = None, 0
        if known is not None:
            fingerprint, last, state, tag, before = known
            refuse_another(store, trigger, fingerprint, dfid=last)
            if state != "ABORTED" or not undecided.has_restart(store, last, tag, contract.retry.restarts_max):
                if state == "ACTIVE":  # its next step is taken only under a contract that still has it
                    spec_of(contract, name)
                return _begun(store, last)
            restarts = before + 1
        spec = spec_of(contract, name)
        if last is not None and store.value(_STEP_ADOPTED, (last,)) is not None:
            dfid = undecided.hand_over(store, last, ALREADY_ORDERED, STEP_ADOPTED, now_ms=now_ms)
        else:
            dfid = write_event(store, contract.gate, trigger, restarts)
            begin(
                store, contract, trigger, dfid, parent=last, restarts=restarts, now_ms=now_ms, deadline_ms=deadline_ms
            )
            _begin_steps(store, dfid, name, spec, now_ms)
    return _begun(store, dfid)


def _begun(store: Reader, dfid: str) -> str:
    """Return the flow of a saga that was begun. Raises UsageError for one that is a human's instead."""
    if store.value("SELECT 1 FROM sagas WHERE dfid = ?", (dfid,)) is None:
        hint = f"sds escalations show {dfid}"
        raise UsageError(STEP_ADOPTED, reason_code=ALREADY_ORDERED, hint=hint, dfid=dfid)
    return dfid


def _saga_trigger(event: Event, name: str) -> Event:
    """Return an event as the trigger of a saga: as a decision, or as another saga, it would have another body."""
    body, original = (
        canonical({**json.loads(text), "saga": name}).decode() if text else "" for text in (event.body, event.original)
    )
    return replace(event, body=body, original=original)


def _begin_steps(store: Store, dfid: str, name: str, spec: SagaSpec, now_ms: int) -> None:
    """Write the row of a saga and its first SAGA entry, in the caller's transaction."""
    steps, menu = canonical(spec.steps).decode(), canonical(spec.compensation).decode()
    store.insert("sagas", dfid=dfid, name=name, steps=steps, menu=menu, phase="STEPS")
    rows = decision_record.seal(store, dfid, decision_record.SAGA)
    ledger.append(store, now_ms, "SAGA", dfid, {"phase": "STEPS", "name": name, "steps": spec.steps, "rows": rows})
