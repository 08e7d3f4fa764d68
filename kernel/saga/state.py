"""A saga in the record (DIR 4.8): one parent flow, a child flow for each step, and rows of its own.

    STEPS   the steps are decided one after the other; a step is done only when its order is settled SUCCESS. A step that the
            outside has accepted and not carried out yet is waited for, however long that takes
    DIRTY   a later step came to nothing, or nobody knows: the parent is tagged PARTIAL_SUCCESS_DIRTY, no further step
            begins, and one decision out of the contract's fixed menu is asked for
    ENDED   the parent has its one DECIDED entry

Any number of callers may drive one saga. What comes next is read from the record, and each move checks in its own
transaction whether it is still the next one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from sds.kernel.canonical import canonical, digest, flow_id
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import EventSpec, SagaSpec
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.flow import adopted, decision_record, intake, undecided
from sds.kernel.flow.in_flight import accepted_as
from sds.kernel.flow.intake import Event, event_in, masked, saga_child
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import DECIDED_TAGS, SAGA_DIRTY, Answer, State, known_answer, move_on, transition
from sds.kernel.registry.contract_versions import event_fields
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Reader, Store
from sds.kernel.storage.vault import Texts

DIRTY = SAGA_DIRTY
COMPENSATED = "COMPENSATED"
MOVED_ON = "SAGA_MOVED_ON"
STARTS_LOOKED_AT = 8  # of a saga that was begun afresh more often than this, an adopted step is not recognised
COMPENSATION = 0  # the number of the child that chooses from the menu; steps count from 1

Phase = Literal["STEPS", "DIRTY", "ENDED"]
Became = Literal["NOT_BEGUN", "OPEN", "RESTARTABLE", "NOTHING", "DONE", "ACCEPTED", "UNKNOWN", "DIRTY"]


@dataclass(frozen=True, slots=True)
class Child:
    """One step, or the compensation decision. `answer`: that of its latest flow; None before it has one."""

    number: int
    kind: str
    answer: Answer | None
    became: Became

    @property
    def dfid(self) -> str:
        return self.answer.dfid if self.answer else ""


@dataclass(frozen=True, slots=True)
class Saga:
    """One saga as the record has it at one moment. `fields`: its trigger's. `deadline_ms`: no step is taken after it."""

    dfid: str
    name: str
    event: Event
    fields: EventSpec
    prefix: str
    menu: tuple[str, ...]
    phase: Phase
    compensation: str | None
    steps: tuple[Child, ...]
    chooser: Child
    deadline_ms: int | None = None

    def late(self, now_ms: int) -> bool:
        """Tell whether the saga's deadline has passed, so that no further step may be taken."""
        return self.deadline_ms is not None and now_ms > self.deadline_ms

    @property
    def next(self) -> Child | None:
        """The first step that is not done."""
        return next((child for child in self.steps if child.became != "DONE"), None)

    @property
    def done(self) -> tuple[Child, ...]:
        return tuple(child for child in self.steps if child.became == "DONE")

    @property
    def unclear(self) -> tuple[Child, ...]:
        """The steps that may have had their effect: only the executor or a human can tell."""
        return tuple(child for child in self.steps if child.became in ("ACCEPTED", "UNKNOWN", "DIRTY"))

    @property
    def accepted(self) -> bool:
        """Whether the outside has accepted a step and not carried it out or refused it yet."""
        return any(child.became == "ACCEPTED" for child in self.steps)

    @property
    def open_child(self) -> bool:
        return self.accepted or any(child.became == "OPEN" for child in (*self.steps, self.chooser))

    @property
    def choice(self) -> str | None:
        """What was chosen from the menu, if the kernel has accepted the choice."""
        said = self.chooser.answer
        return said.action if said is not None and said.state == "CLOSED" and said.outcome == "ACCEPTED" else None

    def standing(self) -> dict[str, str]:
        """Return what became of each step. The menu is derived from this."""
        return {f"step.{child.number}": f"{child.kind} {child.became}" for child in self.steps}


def spec_of(contract: Contract, name: str) -> SagaSpec:
    """Return a saga of the contract. Raises UsageError when it has none of this name."""
    if name not in contract.sagas:
        hint = f"sagas are: {', '.join(contract.sagas)}" if contract.sagas else "the contract has no section `sagas`"
        raise UsageError(f"there is no saga `{name}`", hint=hint)
    return contract.sagas[name]


def load(store: Reader, contract: Contract, dfid: str) -> Saga:
    """Return a saga with its children as they stand; an adopted order stands for a step that nobody has begun since, or that
    came to nothing here. Raises StoreError when the record has no saga under this dfid.
    """
    row = store.row(
        "SELECT s.name, s.steps, s.menu, s.phase, s.compensation, f.event_id, f.trigger_event,"
        " f.restarts, d.deadline_ms FROM sagas s JOIN decision_flows f ON f.dfid = s.dfid"
        " LEFT JOIN flow_deadlines d ON d.dfid = s.dfid WHERE s.dfid = ?",
        (dfid,),
    )
    if row is None:
        raise StoreError(f"saga `{dfid}` is not in the record", dfid=dfid)
    name, steps, menu, phase, compensation, event_id, body, restarts, deadline_ms = row
    prefix = _prefix(event_id, restarts)
    kinds, fields = enumerate(json.loads(steps), start=1), event_fields(store, dfid)
    if fields is None:
        raise StoreError(f"the trigger of saga `{dfid}` fits no registered contract", dfid=dfid)
    found = Saga(
        dfid,
        name,
        event_in(Texts(store, dfid, shown=True), fields, event_id, body),
        fields,
        prefix,
        tuple(json.loads(menu)),
        phase,
        compensation,
        tuple(_child(store, contract, prefix, dfid, number, kind) for number, kind in kinds),
        _child(store, contract, prefix, dfid, COMPENSATION, "COMPENSATION"),
        deadline_ms,
    )
    if not adopted.any_in(store, contract.gate):
        return found
    return replace(found, steps=tuple(_adopted_step(store, contract, found, child) for child in found.steps))


def _adopted_step(store: Reader, contract: Contract, saga: Saga, child: Child) -> Child:
    if child.became not in ("NOT_BEGUN", "RESTARTABLE"):
        return child
    event = child_event(saga, child.number)
    flow = adopted.flow_of_event(store, contract.gate, event.id, digest(event.body))
    if flow is None or not flow.settled:
        return child
    said = known_answer(store, flow.dfid)
    return replace(child, answer=said, became=_became(store, contract, said))


def is_adopted_elsewhere(store: Reader, contract: Contract, saga: Saga) -> bool:
    """Tell whether the saga was carried out when it was begun another time, and its orders were adopted since: a record that
    was restored may be at an earlier beginning.
    """
    if saga.done or not adopted.any_in(store, contract.gate):
        return False
    event, body_hash = saga.event, digest(saga.event.body)
    for restarts in range(STARTS_LOOKED_AT):
        dfid, prefix = flow_id(contract.gate, event.id, body_hash, restarts), _prefix(event.id, restarts)
        first = child_event(replace(saga, dfid=dfid, prefix=prefix), 1)
        flow = adopted.flow_of_event(store, contract.gate, first.id, digest(first.body))
        if prefix != saga.prefix and flow is not None and flow.settled:
            return True
    return False


def _child(store: Reader, contract: Contract, prefix: str, saga: str, number: int, kind: str) -> Child:
    """Return one child of a saga as its latest flow stands."""
    row = store.row(
        "SELECT f.dfid, f.trigger_event FROM events e JOIN decision_flows f ON f.dfid = e.dfid"
        " WHERE e.gate = ? AND e.event_id = ?",
        (contract.gate, child_id(prefix, number)),
    )
    # an outside event may have this id; an adopted flow, though, can only stand for the event that has it
    if row is None or (saga_child(row[1]) != (saga, number) and not adopted.is_adopted(row[1])):
        return Child(number, kind, None, "NOT_BEGUN")
    found = known_answer(store, row[0])
    return Child(number, kind, found, _became(store, contract, found))


def _became(store: Reader, contract: Contract, found: Answer) -> Became:
    """Return what became of a child, by the answer of its latest flow."""
    if found.execution == "SUCCESS" and found.state == "CLOSED":
        return "DONE"
    if found.execution == "DIRTY":
        return "DIRTY"
    if found.execution == "UNKNOWN":
        return "UNKNOWN" if accepted_as(store, found.dfid) is None else "ACCEPTED"
    if found.pending:
        return "OPEN"
    restarts = found.state == "ABORTED" and intake.child_restarts(store, contract, found.dfid, found.tag)
    return "RESTARTABLE" if restarts else "NOTHING"


def child_id(prefix: str, number: int) -> str:
    return f"{prefix}/{number or 'compensation'}"


def children(store: Reader, dfid: str) -> list[str]:
    """Return the ids of all events that a saga's steps and its compensation can have; [] for a flow that is no saga."""
    found = store.row(
        "SELECT s.steps, f.event_id, f.restarts FROM sagas s JOIN decision_flows f ON f.dfid = s.dfid WHERE s.dfid = ?",
        (dfid,),
    )
    if found is None:
        return []
    steps, event_id, restarts = found
    return [child_id(_prefix(event_id, restarts), number) for number in range(len(json.loads(steps)) + 1)]


def _prefix(event_id: str, restarts: int) -> str:
    return f"{event_id}/r{restarts}" if restarts else str(event_id)


def child_event(saga: Saga, number: int) -> Event:
    """Return the trigger of a child. No outsider can send it, because an event has no field `saga`.

    The customer's text takes no part in the choice of a compensation.
    """
    spec, name = saga.fields, child_id(saga.prefix, number)
    said = json.loads(saga.event.original or saga.event.body)
    evidence = said[spec.evidence] if spec.evidence and number != COMPENSATION else ""
    body: dict[str, object] = {spec.id: name, spec.key: saga.event.key, "saga": [saga.dfid, number]}
    body |= {spec.evidence: evidence} if spec.evidence else {}
    return masked(Event(name, saga.event.key, evidence, canonical(body).decode(), spec.evidence or ""))


def check_phase(store: Reader, dfid: str, phase: Phase) -> None:
    """Raise UsageError unless the saga is in this phase, inside the caller's transaction."""
    if store.value("SELECT phase FROM sagas WHERE dfid = ?", (dfid,)) != phase:
        raise UsageError(f"the saga is no longer in phase {phase}", reason_code=MOVED_ON, dfid=dfid)


def check_steps(store: Reader, contract: Contract, saga: Saga) -> None:
    """Raise UsageError where no step of the saga may be decided, inside the caller's transaction."""
    check_phase(store, saga.dfid, "STEPS")
    if is_adopted_elsewhere(store, contract, saga):
        raise UsageError(
            "the saga was carried out when it was begun another time", reason_code=MOVED_ON, dfid=saga.dfid
        )


def close_steps(kernel: Kernel, dfid: str, code: str, *, stopped: bool, now_ms: int) -> None:
    """End the steps: all are done, nothing was done, or the saga is dirty. Changes nothing while a child is open, or in
    another record than the one that was found whole: a step may have been carried out that it does not know.

    `code`: why no further step is taken, unless the next step has ended and its own end says why. `stopped`: authority was
    withdrawn; the case is not the reason.
    """
    store, contract = kernel.store, kernel.contract
    with store.transaction():
        saga = load(store, contract, dfid)
        if saga.phase != "STEPS" or saga.open_child or not kernel.whole.holds:
            return
        failed = saga.next
        if failed is not None and failed.answer is not None and failed.became != "RESTARTABLE" and not stopped:
            code = _failure_code(failed.answer)
        if failed is None:
            end(store, saga, "CLOSED", None, now_ms=now_ms)
        elif saga.done or saga.unclear:
            _mark_dirty(store, saga, failed, code, now_ms)
        else:
            end(store, saga, *_nothing_done(store, contract, saga, failed, code, stopped), now_ms=now_ms)


def _nothing_done(
    store: Reader, contract: Contract, saga: Saga, failed: Child, code: str, stopped: bool
) -> tuple[State, str]:
    """Return the state and tag of a parent whose steps did nothing: those of the step that came to nothing.

    When nobody has decided the case, it may begin afresh or a human must decide.
    """
    said = failed.answer
    if stopped:
        return "ESCALATED", code
    tag = (said.tag if said is not None else None) or code
    if said is not None and said.state == "ESCALATED":
        return "ESCALATED", tag
    again = tag in DECIDED_TAGS or undecided.has_restart(store, saga.dfid, tag, contract.retry.restarts_max)
    return ("ABORTED" if again else "ESCALATED"), tag


def _failure_code(answer: Answer) -> str:
    """Return the code of why a step came to nothing."""
    if answer.execution in ("UNKNOWN", "DIRTY"):
        return f"STEP_{answer.execution}"
    return answer.tag or answer.reason_code or ("STEP_DENIED" if answer.state == "CLOSED" else "STEP_FAILED")


def _mark_dirty(store: Store, saga: Saga, failed: Child, code: str, now_ms: int) -> None:
    move_on(store, "sagas", saga.dfid, "DIRTY", was=("STEPS",))
    store.run("UPDATE decision_flows SET tag = ? WHERE dfid = ?", (DIRTY, saga.dfid))
    body = {"phase": "DIRTY", "tag": DIRTY, "failed_step": failed.number, "reason_code": code, **_children(saga)}
    ledger.append(store, now_ms, "SAGA", saga.dfid, body)


def _children(saga: Saga) -> dict[str, object]:
    return {"children": [[child.number, child.kind, child.dfid, child.became] for child in saga.steps]}


def end(
    store: Store, saga: Saga, state: State, tag: str | None, *, compensation: str | None = None, now_ms: int
) -> None:
    """Write the parent's end and its one DECIDED entry, inside the caller's transaction."""
    passed: tuple[State, ...] = ("ACCEPTED",) if state == "CLOSED" else ()
    transition("ACTIVE", "VALIDATING", *passed, state)
    move_on(store, "decision_flows", saga.dfid, state, was=("ACTIVE",), tag=tag)
    move_on(store, "sagas", saga.dfid, "ENDED", was=(saga.phase,), compensation=compensation)
    body = {
        "outcome": "ACCEPTED" if state == "CLOSED" else state,
        "state": state,
        "tag": tag,
        "reason_code": tag,
        "saga": saga.name,
        "compensation": compensation,
        **_children(saga),
        "rows": decision_record.seal(store, saga.dfid, decision_record.SEALED),
    }
    ledger.append(store, now_ms, "DECIDED", saga.dfid, body)


@dataclass(frozen=True, slots=True)
class SagaAnswer:
    """What became of a saga. `compensation`: what was done about a partial success. `chosen`: the decision that chose it.

    `reversals`: a step's dfid -> REVERTED, REFUSED, UNKNOWN, or PENDING while it is being undone.
    """

    answer: Answer
    name: str
    phase: Phase
    steps: tuple[Answer | None, ...]
    compensation: str | None
    chosen: Answer | None
    reversals: Mapping[str, str]


def saga_answer(store: Reader, contract: Contract, dfid: str) -> SagaAnswer:
    """Read a saga's answer from the record. Raises StoreError when it is not there."""
    saga, parent = load(store, contract, dfid), known_answer(store, dfid)
    steps = tuple(child.answer for child in saga.steps)
    begun = tuple(step.dfid for step in steps if step is not None)
    first = "(SELECT MIN(idx) FROM ledger WHERE ledger.dfid = saga_reversals.dfid AND kind = 'REVERSAL')"
    sql = f"SELECT dfid, status FROM saga_reversals WHERE dfid IN ({', '.join('?' * len(begun))}) ORDER BY {first}"
    reversals: dict[str, str] = dict(store.rows(sql, begun))
    return SagaAnswer(parent, saga.name, saga.phase, steps, saga.compensation, saga.chooser.answer, reversals)
