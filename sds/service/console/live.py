"""Read the live page's figures: each gate's decisions of the last minutes, their times, its agents, whether it is halted.

The figures come from the record, so all processes show the same, but for `queued` and `deciding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sds.engines.protocol import language_model_of
from sds.gate import Gate
from sds.kernel.audit.agent_history import Halt, Move, last_halt, last_move, standing
from sds.kernel.executor import breaker
from sds.kernel.human import cases
from sds.kernel.registry import registry
from sds.kernel.registry.monitors import Standing
from sds.kernel.storage.store import Row as Record
from sds.service.console import words

MINUTES = 15
READ_MAX = 2_000  # decisions of one gate that are read
ENTRIES_MAX = 8_000  # entries at the ledger's end that are searched for them
SHOWN_MAX = 12  # decisions that are listed, newest first

_DECIDED = """
SELECT l.at_ms, l.dfid, f.created_at_ms, f.event_id, f.state, p.policy_kind, e.status, f.tag, v.outcome
FROM ledger l JOIN decision_flows f ON f.dfid = l.dfid
LEFT JOIN policy_proposals p ON p.dfid = l.dfid
LEFT JOIN dim_validations v ON v.dfid = l.dfid
LEFT JOIN execution_log e ON e.dfid = l.dfid
WHERE l.idx > (SELECT COALESCE(MAX(idx), 0) FROM ledger) - ? AND l.kind = 'DECIDED' AND l.at_ms >= ?
ORDER BY l.idx DESC LIMIT ?
"""


@dataclass(frozen=True, slots=True)
class DecidedFlow:
    """One decision. `took_ms`: from its flow's opening to its entry in the ledger; `became`: its order's status, or its tag."""

    at_ms: int
    took_ms: int
    dfid: str
    event_id: str
    state: str
    action: str
    became: str


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent. `since`: its last move, None where there was none."""

    agent_id: str
    status: str
    since: Move | None
    monitors: tuple[Standing, ...]


@dataclass(frozen=True, slots=True)
class GateNow:
    """One gate now. `minutes`: decisions in each of the last `MINUTES`, oldest first; `p50_ms`, `p99_ms`: None without any.
    `queued`, `deciding`, `model_down`, `language_model_down` (a policy's): in this process. `executor`: its state in words;
    `answers`: whether its breaker is closed. `whole`: whether all decisions of these minutes were read.
    """

    name: str
    halted: Halt | None
    agents: tuple[Agent, ...]
    waiting: int
    queued: int
    deciding: int
    decided: int
    escalated: int
    minutes: tuple[int, ...]
    p50_ms: int | None
    p99_ms: int | None
    executor: str
    answers: bool
    model_down: bool
    language_model_down: bool
    last: tuple[DecidedFlow, ...]
    whole: bool


def gate_now(name: str, gate: Gate, now_ms: int) -> GateNow:
    """Read one gate's figures. Raises StoreError where its record cannot be read."""
    store = gate.store
    rows = store.rows(_DECIDED, (ENTRIES_MAX, now_ms - MINUTES * 60_000, READ_MAX))
    flows = [_decided(row) for row in rows]
    took = sorted(each.took_ms for each in flows)
    minutes = [0] * MINUTES
    for each in flows:
        minutes[-1 - min(MINUTES - 1, max(0, now_ms - each.at_ms) // 60_000)] += 1
    state, model = breaker.read(store, gate.contract.gate), language_model_of(gate.engine)
    return GateNow(
        name=name,
        halted=_halt(gate),
        agents=tuple(_agents(gate, now_ms)),
        waiting=cases.count_waiting(store, gate.contract.gate),
        queued=gate.queued,
        deciding=gate.deciding,
        decided=len(flows),
        escalated=sum(row[8] == "ESCALATED" for row in rows),
        minutes=tuple(minutes),
        p50_ms=percentile(took, 50),
        p99_ms=percentile(took, 99),
        executor=state.text,
        answers=not state.is_open,
        model_down=gate.breaker.is_open,
        language_model_down=model is not None and model.breaker.is_open,
        last=tuple(flows[:SHOWN_MAX]),
        whole=len(flows) < READ_MAX,
    )


def percentile(ordered: Sequence[int], percent: int) -> int | None:
    """Return the nearest-rank percentile of sorted numbers; None of none."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None


def _decided(row: Record) -> DecidedFlow:
    at_ms, dfid, created_ms, event_id, state, action, status, tag, _ = row
    return DecidedFlow(
        at_ms=at_ms,
        took_ms=max(0, at_ms - created_ms),
        dfid=dfid,
        event_id=words.plain(event_id),
        state=state,
        action=action or "-",
        became=status or (tag if state == "ABORTED" else None) or "",
    )


def _halt(gate: Gate) -> Halt | None:
    """Return who halted the gate, when and why; None where it is not halted."""
    return (last_halt(gate.store) or Halt(0, "", "")) if gate.store.halted else None


def _agents(gate: Gate, now_ms: int) -> list[Agent]:
    mine = standing(gate.contract, gate.store, now_ms)
    return [
        Agent(
            each.agent_id,
            each.status,
            last_move(gate.store, each.agent_id),
            mine if each.agent_id == gate.contract.agent_id else (),
        )
        for each in registry.agents(gate.store)
    ]


def halted_ms(gate: Gate) -> int | None:
    """Return when a gate was halted, in milliseconds since 1970; None where it is not."""
    halt = _halt(gate)
    return halt.at_ms if halt else None


def stopped_ms(gate: Gate, agent_id: str) -> int | None:
    """Return when an agent was stopped, in milliseconds since 1970; None where it is active."""
    last = last_move(gate.store, agent_id)
    return last.at_ms if last and last.status != "ACTIVE" else None
