"""What people do at a gate besides deciding: its waiting cases, its agent, its halt. Routes and console call the same.

Plain functions over an open gate; they know nothing of HTTP. `who` is whose key it is. Every act is an entry of the
ledger with who and why, written by the functions that the commands call. They block: never call them on an event loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal

from sds.escalations import Choice, HumanDecision, choices, described, summary, waits
from sds.gate import Gate
from sds.host.clock import when
from sds.kernel.audit.agent_history import AgentRecord, agent_record
from sds.kernel.contract.human_terms import human_contract
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import passages
from sds.kernel.envelope.envelope import format_literal
from sds.kernel.errors import NOT_AS_WRITTEN, UsageError, WorldError
from sds.kernel.flow.intake import event_fields
from sds.kernel.flow.states import Answer
from sds.kernel.human import cases
from sds.kernel.human.cases import Case
from sds.kernel.human.review import CaseView
from sds.kernel.registry import registry
from sds.kernel.registry.registry import Status
from sds.kernel.storage.store import Reader
from sds.kernel.storage.vault import Texts

Move = Literal["suspend", "reactivate", "retire"]
MOVES: Mapping[Move, Status] = {"suspend": "SUSPENDED", "reactivate": "ACTIVE", "retire": "RETIRED"}


def gate_of(gates: Iterable[Gate], dfid: str) -> Gate | None:
    """Return the gate whose record has a flow; None where none of them has."""
    sql = "SELECT 1 FROM decision_flows WHERE dfid = ?"
    asked = gates if can_be_held(dfid) else ()
    return next((gate for gate in asked if gate.kernel.store.value(sql, (dfid,)) is not None), None)


def can_be_held(name: str) -> bool:
    """Tell whether a record of either kind can hold a name, and be asked for it: no text of PostgreSQL has a NUL."""
    return "\0" not in name


def has_agent(gate: Gate, agent_id: str) -> bool:
    """Tell whether a gate's record knows an agent."""
    sql = "SELECT 1 FROM agents WHERE agent_id = ?"
    return can_be_held(agent_id) and gate.kernel.store.value(sql, (agent_id,)) is not None


def waiting(gate: Gate, *, limit: int, now_ms: int) -> list[dict[str, Any]]:
    """Return what waits for a human at a gate, oldest first, without its texts: age, impact, reason, proposal."""
    terms = human_contract(gate.contract)
    return [_listed(gate, terms, case, now_ms) for case in cases.waiting(gate.kernel.store, terms, limit=limit)]


def _listed(gate: Gate, terms: Contract, case: Case, now_ms: int) -> dict[str, Any]:
    return {"gate": gate.contract.gate, **summary(terms, case), "age_ms": max(0, now_ms - case.since_ms)}


def case(gate: Gate, dfid: str, *, now_ms: int) -> dict[str, Any]:
    """Return one case with all that a human must know to decide it, its texts among that. Records nothing.

    `evidence`: the untrusted text in parts, those that look like an injection marked; `packet`: what the model read;
    `choices`: what may be decided now. Raises UsageError where there is no such flow.
    """
    terms, store = human_contract(gate.contract), gate.kernel.store
    found = cases.read_case(store, terms, dfid)
    look = gate.look(dfid)
    return {
        **_listed(gate, terms, found, now_ms),
        **described(terms, found, look),
        "waits": waits(found),
        "unknown": found.unknown,
        "evidence": _evidence(store, found),
        "packet": _packet(store, dfid),
        "changed": _changed(found, look),
        "choices": [_choice(each) for each in choices(terms, found, look)],
    }


def _evidence(store: Reader, found: Case) -> dict[str, Any]:
    """Return the untrusted text of a case in parts: `patterns` names what a part looks like."""
    fields = event_fields(store, found.dfid)
    name = (fields.evidence if fields else None) or ""
    text = str(found.trigger.get(name, ""))
    parts, at = list[dict[str, Any]](), 0
    for begin, end, patterns in passages(text):
        parts += [{"text": text[at:begin], "patterns": []}] if begin > at else []
        parts.append({"text": text[begin:end], "patterns": list(patterns)})
        at = end
    return {"field": name, "parts": [*parts, *([{"text": text[at:], "patterns": []}] if text[at:] else [])]}


def _packet(store: Reader, dfid: str) -> list[str]:
    """Return the texts that the model read; none where it was never asked."""
    prompt = store.value("SELECT prompt FROM context_snapshots WHERE dfid = ?", (dfid,))
    try:
        return list(Texts(store, dfid, shown=True).prompt(prompt)) if prompt else []
    except NOT_AS_WRITTEN:
        return []


def _changed(found: Case, look: CaseView) -> list[dict[str, Any]]:
    """Return every field that is not as the agent read it; `beyond`: it moved further than its tolerance."""
    then, now = found.fields, look.packet.snapshot.fields
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


def decide(gate: Gate, dfid: str, decided: HumanDecision) -> Answer:
    """Carry out what a human decided about a case, exactly once, or refuse it: see `sds.escalations.resolve`.

    A gate that closes waits for it; once it is closing it is refused, DRAINING, before anything is done.
    """
    return gate.resolve(dfid, **{field.name: getattr(decided, field.name) for field in fields(decided)})


def agents(gate: Gate) -> list[dict[str, Any]]:
    """Return the agents of a gate's record, their state and their contract."""
    return [{"gate": gate.contract.gate, **asdict(agent)} for agent in registry.agents(gate.kernel.store)]


def agent(gate: Gate, agent_id: str, *, now_ms: int) -> dict[str, Any]:
    """Return what the record knows of an agent: where it stands since when and why, its contracts, its history.

    Raises UsageError, reason code NOT_FOUND, where there is none of this name.
    """
    return asdict(_agent(gate, agent_id, now_ms))


def _agent(gate: Gate, agent_id: str, now_ms: int) -> AgentRecord:
    found = agent_record(gate.kernel.store, agent_id, now_ms=now_ms)
    if found is None:
        raise UsageError(f"there is no agent `{agent_id}`", reason_code="NOT_FOUND", hint="GET /v1/agents")
    return found


def move_agent(gate: Gate, agent_id: str, move: Move, *, who: str, reason: str, now_ms: int) -> dict[str, Any]:
    """Suspend, reactivate or retire an agent; return what is known of it then. Raises UsageError where it is so already,
    TransitionError where an operator may not do that. A gate that closes waits for it.
    """
    status = MOVES[move]
    with gate.acting() as kernel:
        if _agent(gate, agent_id, now_ms).agent.status == status:
            raise UsageError(f"agent `{agent_id}` is {status} already", reason_code="TRANSITION_FORBIDDEN")
        registry.transition(kernel.store, agent_id, status, by="operator", who=who, reason=reason, now_ms=now_ms)
        return agent(gate, agent_id, now_ms=now_ms)


def halt_state(gate: Gate) -> dict[str, Any]:
    """Return whether a gate is halted, and since when, by whom and why it is or was."""
    store = gate.kernel.store
    row = store.row(
        "SELECT at_ms, body FROM ledger WHERE dfid = '' AND kind IN ('HALT', 'RESUME') ORDER BY idx DESC LIMIT 1"
    )
    facts: dict[str, Any] = {"gate": gate.contract.gate, "halted": store.halted}
    if row is None:
        return facts
    body = json.loads(row[1])
    return facts | {"since": when(row[0]), "by": body["by"], "reason": body["reason"]}


def set_halted(gate: Gate, halted: bool, *, who: str, reason: str, now_ms: int) -> dict[str, Any]:
    """Halt or resume a gate; return its state then, and `changed`: whether it was not so before. UsageError: no reason.

    A gate that closes waits for it.
    """
    if not reason.strip():
        raise UsageError("a reason is needed, for the record")
    with gate.acting() as kernel:
        changed = registry.set_halted(kernel.store, halted, by=who, reason=reason, now_ms=now_ms)
        return halt_state(gate) | {"changed": changed}


def set_all_halted(gates: Sequence[Gate], halted: bool, *, who: str, reason: str, now_ms: int) -> list[dict[str, Any]]:
    """Do what `set_halted` does at each gate; what one of several refuses is said with it, and the next is gone on with."""
    done = list[dict[str, Any]]()
    for gate in gates:
        try:
            done.append(set_halted(gate, halted, who=who, reason=reason, now_ms=now_ms))
        except (WorldError, UsageError) as error:
            if len(gates) == 1 or not reason.strip():
                raise
            closed = isinstance(error, UsageError)  # all that is wrong with the next where nothing was with the last
            done.append({"gate": gate.contract.gate, "error": "DRAINING" if closed else error.reason_code})
    return done
