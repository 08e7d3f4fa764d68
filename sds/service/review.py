"""What people do at a gate: review waiting cases, move its agents, halt it. The routes and the console call these functions.

They take an open gate and know nothing of HTTP. `who` is the name of the caller's key. Every act is a ledger entry with
who and why, written by the same functions that the commands call. They block: do not call them on an event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from sds.escalations import Choice, choices, described, summary, waits
from sds.gate import Gate
from sds.host.clock import when
from sds.kernel.audit.agent_history import AgentRecord, agent_record, last_halt
from sds.kernel.canonical import one_line
from sds.kernel.contract.human_terms import human_contract
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import passages
from sds.kernel.envelope.envelope import format_literal
from sds.kernel.errors import NOT_AS_WRITTEN, SdsError, TransitionError, UsageError, WorldError
from sds.kernel.flow.states import Answer
from sds.kernel.human import cases
from sds.kernel.human.cases import BEFORE_ALL, Case, Place
from sds.kernel.human.parsing import said
from sds.kernel.human.review import CaseView, Resolution
from sds.kernel.registry import registry
from sds.kernel.registry.contract_versions import event_fields
from sds.kernel.registry.registry import Status
from sds.kernel.storage.store import Reader
from sds.kernel.storage.vault import Texts

Move = Literal["suspend", "reactivate", "retire"]
MOVES: Mapping[Move, Status] = {"suspend": "SUSPENDED", "reactivate": "ACTIVE", "retire": "RETIRED"}


def gate_of(gates: Iterable[Gate], dfid: str) -> Gate | None:
    """Return the gate whose record has this flow; None where none has."""
    sql = "SELECT 1 FROM decision_flows WHERE dfid = ?"
    asked = gates if can_be_held(dfid) else ()
    return next((gate for gate in asked if gate.kernel.store.value(sql, (dfid,)) is not None), None)


def can_be_held(name: str) -> bool:
    """Tell whether both kinds of record can hold and look up a name: PostgreSQL's texts have no NUL."""
    return "\0" not in name


def with_agent(gates: Iterable[Gate], agent_id: str) -> list[Gate]:
    """Return the gates at which an agent decides: each has a record of its own. Without any, those whose record knows it."""
    known = tuple(gates)
    deciding = [gate for gate in known if gate.contract.agent_id == agent_id]
    return deciding or [gate for gate in known if _is_recorded(gate, agent_id)]


def _is_recorded(gate: Gate, agent_id: str) -> bool:
    sql = "SELECT 1 FROM agents WHERE agent_id = ?"
    return can_be_held(agent_id) and gate.kernel.store.value(sql, (agent_id,)) is not None


def waiting(gate: Gate, *, limit: int, now_ms: int, after: Place = BEFORE_ALL) -> list[tuple[Place, dict[str, Any]]]:
    """Return the cases that wait for a human at a gate after a place of the list, oldest first, each with its own place and
    without texts: age, impact, reason, proposal.
    """
    terms = human_contract(gate.contract)
    found = cases.waiting(gate.kernel.store, terms, limit=limit, after=after)
    return [((case.since_ms, case.dfid), _listed(gate, terms, case, now_ms)) for case in found]


def count_waiting(gate: Gate) -> int:
    return cases.count_waiting(gate.kernel.store, gate.contract.gate)


def _listed(gate: Gate, terms: Contract, case: Case, now_ms: int) -> dict[str, Any]:
    return {"gate": gate.contract.gate, **summary(terms, case), "age_ms": max(0, now_ms - case.since_ms)}


def case(gate: Gate, dfid: str, *, now_ms: int) -> dict[str, Any]:
    """Return one case with all that a human needs to decide it, its texts included. Nothing is written.

    `evidence`: the untrusted text in parts, with those marked that look like an injection; `packet`: the texts that the model
    read; `choices`: the decisions that are possible now. Raises UsageError where there is no such flow.
    """
    terms, store = human_contract(gate.contract), gate.kernel.store
    case = cases.read_case(store, terms, dfid)
    look = gate.look(dfid)
    return {
        **_listed(gate, terms, case, now_ms),
        **described(terms, case, look),
        "waits": waits(case),
        "unknown": case.unknown,
        "evidence": _evidence(store, case),
        "packet": _packet(store, dfid),
        "changed": _changed(case, look),
        "choices": [_choice(each) for each in choices(terms, case, look)],
    }


def _evidence(store: Reader, case: Case) -> dict[str, Any]:
    """Return the untrusted text of a case in parts. `patterns`: the names of the injection patterns that a part matches."""
    fields = event_fields(store, case.dfid)
    name = (fields.evidence if fields else None) or ""
    text = str(case.trigger.get(name, ""))
    parts, at = list[dict[str, Any]](), 0
    for begin, end, patterns in passages(text):
        parts += [{"text": text[at:begin], "patterns": []}] if begin > at else []
        parts.append({"text": text[begin:end], "patterns": list(patterns)})
        at = end
    return {"field": name, "parts": [*parts, *([{"text": text[at:], "patterns": []}] if text[at:] else [])]}


def _packet(store: Reader, dfid: str) -> list[str]:
    """Return the texts that the model read; an empty list where it was not asked, or they cannot be read."""
    prompt = store.value("SELECT prompt FROM context_snapshots WHERE dfid = ?", (dfid,))
    try:
        return list(Texts(store, dfid, shown=True).prompt(prompt)) if prompt else []
    except NOT_AS_WRITTEN:
        return []


def _changed(case: Case, look: CaseView) -> list[dict[str, Any]]:
    """Return every field whose value differs from what the agent read. `beyond`: the change exceeds its tolerance."""
    then, now = case.fields, look.packet.snapshot.fields
    return [
        {"field": path, "then": then.get(path), "now": now.get(path), "beyond": path in look.moved}
        for path in sorted({*then, *now})
        if then.get(path) != now.get(path)
    ]


def _choice(each: Choice) -> dict[str, Any]:
    facts: dict[str, Any] = {"decision": each.decision, "acknowledge": each.acknowledge}
    if each.kind is None:
        return facts
    return facts | {
        "action": each.kind.kind,
        "params": [
            {
                "name": name,
                "lo": format_literal(bound.lo, bound.scale),
                "hi": format_literal(bound.hi, bound.scale),
                "step": format_literal(bound.step, bound.scale),
            }
            for name, bound in each.kind.params
        ],
        "fixed": [{"name": name, "value": format_literal(value, scale)} for name, value, scale in each.kind.fills],
        "reasons": list(each.kind.reasons),
        "impacts": list(dict.fromkeys(each.impacts or ())),
        "example": each.example(),
    }


def decide(gate: Gate, dfid: str, wanted: Resolution) -> Answer:
    """Carry out a human's decision about a case, exactly once, or refuse it: see `Gate.resolve`.

    A gate waits for this before it closes. A gate that is already closing refuses, DRAINING, before anything is done.
    """
    given = asdict(wanted)
    return gate.resolve(dfid, acknowledge=given.pop("acknowledged"), **given)


def agents(gate: Gate) -> list[dict[str, Any]]:
    """Return the agents of a gate's record, with their status and contract."""
    return [{"gate": gate.contract.gate, **asdict(agent)} for agent in registry.agents(gate.kernel.store)]


def agent(gates: Iterable[Gate], agent_id: str, *, now_ms: int) -> dict[str, Any]:
    """Return an agent's record: its status with time and reason, its contracts, its history. Of several gates that have it,
    the record of one where it is ACTIVE comes first. Raises UsageError, reason code NOT_FOUND, where no gate has it.
    """
    records = [_agent(gate, agent_id, now_ms) for gate in with_agent(gates, agent_id)]
    if not records:
        raise _no_agent(agent_id)
    return asdict(next((each for each in records if each.agent.active), records[0]))


def _agent(gate: Gate, agent_id: str, now_ms: int) -> AgentRecord:
    record = agent_record(gate.kernel.store, agent_id, now_ms=now_ms)
    if record is None:
        raise _no_agent(agent_id)
    return record


def _no_agent(agent_id: str) -> UsageError:
    hint = "GET /v1/agents lists them"
    return UsageError(f"there is no agent `{one_line(agent_id, 80)}`", reason_code="NOT_FOUND", hint=hint)


class SameStatusError(UsageError):
    """An agent has the status already that it would be given."""

    reason_code = "TRANSITION_FORBIDDEN"


def move_agent(gate: Gate, agent_id: str, move: Move, *, who: str, reason: str, now_ms: int) -> dict[str, Any]:
    """Suspend, reactivate or retire an agent at one gate; return its record after that. Raises SameStatusError, and
    TransitionError where an operator may not make that move. A gate waits for this before it closes.
    """
    status = MOVES[move]
    with gate.acting() as kernel:
        if _agent(gate, agent_id, now_ms).agent.status == status:
            raise SameStatusError(f"agent `{agent_id}` is {status} already")
        try:
            registry.transition(kernel.store, agent_id, status, by="operator", who=who, reason=reason, now_ms=now_ms)
        except TransitionError as error:
            if _agent(gate, agent_id, now_ms).agent.status != status:
                raise
            raise SameStatusError(f"agent `{agent_id}` is {status} already") from error  # somebody was faster
        return asdict(_agent(gate, agent_id, now_ms))


def move_agent_everywhere(
    gates: Iterable[Gate], others: Iterable[Gate], agent_id: str, move: Move, *, who: str, reason: str, now_ms: int
) -> dict[str, Any]:
    """Move an agent at all of these gates that have it; return its record at the first that it was moved at. `others`: the
    gates that the key of `who` may not operate.

    One gate that fails keeps no other from its move. Raises afterwards, naming every gate where the agent was not moved, and
    those of `others` where it was to be stopped and is not. The same call again moves what is left.
    """
    reason = said("reason", reason)
    moved, failed = dict[str, dict[str, Any]](), dict[str, SdsError]()
    for gate in (mine := with_agent(gates, agent_id)):
        try:
            moved[gate.contract.gate] = move_agent(gate, agent_id, move, who=who, reason=reason, now_ms=now_ms)
        except (UsageError, WorldError) as error:
            failed[gate.contract.gate] = error
    if not mine:
        raise _no_agent(agent_id)
    same = [name for name, error in failed.items() if isinstance(error, SameStatusError)]
    left = {name: error for name, error in failed.items() if name not in same}
    if move != "reactivate":
        forbidden = UsageError(f"the key of `{who}` is not for this gate", reason_code="GATE_FORBIDDEN")
        left |= {gate.contract.gate: forbidden for gate in others if _goes_on(gate, agent_id)}
    there = [*moved, *same]
    if len(left) > 1 or (left and there):
        raise _not_everywhere(agent_id, MOVES[move], left, there)
    if not moved:
        raise next(iter((left or failed).values()))
    return next(iter(moved.values()))


def _goes_on(gate: Gate, agent_id: str) -> bool:
    """Tell whether an agent decides at a gate, or may do so again without an operator. True where that cannot be read."""
    if gate.contract.agent_id != agent_id:
        return False
    try:
        known = registry.lookup(gate.kernel.store, agent_id)
    except SdsError:
        return True
    return known is None or known.status not in (MOVES["suspend"], MOVES["retire"])


def _not_everywhere(
    agent_id: str, status: Status, left: Mapping[str, SdsError], there: Iterable[str]
) -> UsageError | WorldError:
    first = next(iter(left.values()))
    kind = WorldError if isinstance(first, WorldError) else UsageError
    failing = ", ".join(f"`{name}` ({error})" for name, error in left.items())
    done = ", ".join(f"`{name}`" for name in there)
    message = f"agent `{agent_id}` is not {status} at {failing}" + (f"; it is at {done}" if done else "")
    return kind(message, reason_code=first.reason_code, hint=first.hint, retryable=first.retryable)


def halt_state(gate: Gate) -> dict[str, Any]:
    """Return whether a gate is halted, and when, by whom and why it was last halted or resumed."""
    store = gate.kernel.store
    facts, last = {"gate": gate.contract.gate, "halted": store.halted}, last_halt(store)
    return facts | ({"since": when(last.at_ms), "by": last.who, "reason": last.reason} if last else {})


def set_halted(gate: Gate, halted: bool, *, who: str, reason: str, now_ms: int) -> dict[str, Any]:
    """Halt or resume a gate; return its `halt_state` after that, with `changed`. Raises UsageError where there is no reason.

    A gate waits for this before it closes.
    """
    reason = said("reason", reason)
    with gate.acting() as kernel:
        changed = registry.set_halted(kernel.store, halted, by=who, reason=reason, now_ms=now_ms)
        return halt_state(gate) | {"changed": changed}


def set_all_halted(gates: Sequence[Gate], halted: bool, *, who: str, reason: str, now_ms: int) -> list[dict[str, Any]]:
    """Call `set_halted` for each gate. Of several, one that refuses is listed with its `error`, and the others go on."""
    done, reason = list[dict[str, Any]](), said("reason", reason)
    for gate in gates:
        try:
            done.append(set_halted(gate, halted, who=who, reason=reason, now_ms=now_ms))
        except (WorldError, UsageError) as error:
            if len(gates) == 1:
                raise
            closed = isinstance(error, UsageError)  # with a reason, only a closed gate raises it
            done.append({"gate": gate.contract.gate, "error": "DRAINING" if closed else error.reason_code})
    return done
