"""Decides a gate's queue, and measures the result.

It counts decisions outside the envelope, differences between the record and the executor's statement, agreement with
the definition's expectation, and latencies. A chaos of the definition may act between a proposal and its execution.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from sds.definitions.definition import Chaos, GateDefinition, QueuedCase
from sds.engines.breaker import FAILURES_MAX
from sds.engines.protocol import Engine
from sds.gate import Gate
from sds.host.clock import now_ms
from sds.host.paths import has_record, is_of_older_version, open_record, public_keys_of, refuse_lost
from sds.kernel.audit import verify
from sds.kernel.audit.agent_history import agent_record
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.envelope import ESCALATE
from sds.kernel.envelope.state import StateSource
from sds.kernel.errors import ExecutorError, UsageError, WorldError
from sds.kernel.executor.statement import CLOCKS_APART_MS, StatementLine
from sds.kernel.executor.wholeness import RECORD_BEHIND
from sds.kernel.flow.states import Answer
from sds.kernel.flow.undecided import settled_events
from sds.kernel.registry import registry
from sds.kernel.registry.authority import authority_now
from sds.kernel.storage.store import Store

FAULTS_SHOWN = 10
DRIFTED = "STATE_DRIFT_DETECTED"
HINTS = {"SUSPENDED": "sds agents reactivate {} --reason ...", "ESCALATED": "sds escalations list"}

Stopped = tuple[str, str]  # the reason, and a hint


@dataclass(frozen=True, slots=True)
class Decided:
    """One decided case: its answer, its time in milliseconds, and the expected kind, if there is one."""

    case: QueuedCase
    answer: Answer
    ms: float
    expected: str | None


@dataclass
class Watch:
    """Watches each proposal before its execution: checks it against its envelope, then lets chaos act."""

    kinds: Sequence[str] = ()  # of the contract, in the order of its authority
    chaos: Chaos | None = None
    out_of_envelope: int = 0
    first_permitted: dict[str, str] = field(default_factory=dict)  # dfid -> the first of `kinds` that was permitted
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reasoned(self, packet: DecisionPacket, data: bytes) -> None:
        with self.lock:
            self.out_of_envelope += not packet.envelope.contains(data)
            permitted = packet.envelope.names
            self.first_permitted[packet.dfid] = next((name for name in self.kinds if name in permitted), ESCALATE)
            if self.chaos is not None:
                self.chaos.reasoned(packet, data)


def run(
    gate: GateDefinition,
    folder: Path,
    *,
    limit: int,
    engine: Engine,
    on_decided: Callable[[Answer], None],
    chaos: str | None = None,
    parallel: int = 1,
) -> dict[str, Any]:
    """Decide the next undecided cases, `limit` at most and `parallel` at once; return the report, in the queue's order.

    `on_decided` is called in this thread. Raises UsageError when there is no case.
    """
    with watched(gate, folder, engine, chaos, limit) as (opened, source, watch):
        cases = undecided_cases(gate, opened, folder)
        queue, decided = _Queue(gate, opened, source), []
        for each in queue.worked_through(cases[:limit], parallel):
            decided.append(each)
            on_decided(each.answer)
        ours = [each for each in decided if not _decided_elsewhere(each.answer, watch)]
        refuse_in_doubt(opened, gate)  # the record may have been replaced meanwhile
        payments = payments_of(opened, gate)
        report = _report(gate, opened, folder, ours, watch, payments)
        report |= {"decided_elsewhere": len(decided) - len(ours), "stopped": queue.stopped}
        answers = [each.answer for each in ours]
        return report | (watch.chaos.report(answers, payments, opened.store) if watch.chaos else {})


@contextmanager
def watched(
    gate: GateDefinition, folder: Path, engine: Engine, chaos: str | None, limit: int
) -> Iterator[tuple[Gate, StateSource, Watch]]:
    """Open a gate whose proposals are watched, for a block. Raises as `refuse_stopped` does."""
    contract = gate.load_contract()
    with gate.opened(folder) as (source, executor):
        watch = Watch(contract.authority, gate.demo.chaos[chaos](folder, executor, limit) if chaos else None)
        engine = watch.chaos.engine(engine) if watch.chaos else engine
        with Gate(contract, source, executor, folder=folder, engine=engine, on_reasoned=watch.reasoned) as opened:
            refuse_stopped(opened, gate)
            yield opened, source, watch


def undecided_cases(gate: GateDefinition, opened: Gate, folder: Path) -> list[QueuedCase]:
    """Return the undecided cases of the queue. Raises UsageError when there is none."""
    known, name = settled_events(opened.store, opened.contract), opened.contract.event.id
    cases = [case for case in gate.cases(folder) if case.event.get(name) not in known]
    if not cases:
        raise UsageError(f"the queue has no {gate.demo.case} left", hint=f"sds run {gate.argument} --reset")
    return cases


class _Queue:
    """The cases of one run, decided until the gate is stopped; `stopped` then says why. Other threads finish their
    current case.
    """

    def __init__(self, gate: GateDefinition, opened: Gate, source: StateSource) -> None:
        self._gate, self._opened, self._source = gate, opened, source
        self.stopped: Stopped | None = None

    def worked_through(self, cases: list[QueuedCase], parallel: int) -> Iterator[Decided]:
        if parallel == 1:
            yield from filter(None, map(self._decide, cases))
            return
        with ThreadPoolExecutor(parallel) as pool:
            asked = [pool.submit(self._decide, case) for case in cases]
            try:
                yield from filter(None, (future.result() for future in asked))
            finally:  # an interrupt waits only for decisions under way
                pool.shutdown(cancel_futures=True)

    def _decide(self, case: QueuedCase) -> Decided | None:
        self.stopped = self.stopped or _stopped(self._opened, self._gate)
        if self.stopped:
            return None
        expected = self._expected(case)
        began = perf_counter()
        answer = self._opened.decide(case.event)
        ms = (perf_counter() - began) * 1000
        return Decided(case, answer, ms, expected)

    def _expected(self, case: QueuedCase) -> str | None:
        if self._gate.expected is None:
            return None
        read = self._source.read(str(case.event.get(self._opened.contract.event.key)))
        return self._gate.expected(replace(case, fields=read.fields if read else None))


def _report(
    gate: GateDefinition,
    opened: Gate,
    folder: Path,
    decided: list[Decided],
    watch: Watch,
    payments: list[StatementLine],
) -> dict[str, Any]:
    answers = [each.answer for each in decided]
    waiting = sum(map(waits, answers))
    failed = [answer for answer in answers if _undecided(answer) and not waits(answer)]
    wrong = wrongly_paid(opened, gate, payments)
    alone = [each for each in decided if _action(each.answer) not in (None, ESCALATE)]
    dfids, lists = {answer.dfid for answer in answers}, opened.kernel.dispatcher.executor.lists
    return {
        "model": opened.engine.model,
        "decisions": len(decided),
        "decided_by_model": len(decided) - waiting - len(failed),
        "model_failed": dict(Counter(str(answer.reason_code) for answer in failed)),
        "waiting": waiting,
        "outcomes": dict(Counter(outcome(answer, gate) for answer in answers)),
        "out_of_envelope": watch.out_of_envelope,
        "double_payouts": len(wrong),
        "double_payout_faults": wrong[:FAULTS_SHOWN],
        "paid_minor": sum(payment.amount_minor or 0 for payment in payments if payment.dfid in dfids)
        if lists
        else None,
        "agreement": _share(decided, lambda each: _action(each.answer)),
        "agreement_decided": _share(alone, lambda each: _action(each.answer)),
        "decided_alone": len(alone),
        "otherwise": _disagreements(alone),
        "agreement_always_paying": _share(decided, lambda each: watch.first_permitted.get(each.answer.dfid)),
        "totals": dict(gate.demo.totals((each.case, _action(each.answer)) for each in decided))
        if gate.demo.totals
        else {},
        "latency_ms": percentiles([each.ms for each in decided if not _undecided(each.answer)]),
        "record_faults": list(verify.verify(opened.store, public=public_keys_of(folder)).faults),
    }


def _share(decided: list[Decided], chosen: Callable[[Decided], str | None]) -> float | None:
    """Return the share of cases where `chosen` is the expected kind; None where no case has one."""
    judged = [each for each in decided if each.expected is not None]
    return round(sum(chosen(each) == each.expected for each in judged) / len(judged), 4) if judged else None


def _disagreements(alone: list[Decided]) -> list[dict[str, str | None]]:
    """Return the first decisions made without a human that differ from the expected kind, each with its flow."""
    differ = [each for each in alone if each.expected is not None and _action(each.answer) != each.expected]
    return [
        {"dfid": each.answer.dfid, "decided": _action(each.answer), "expected": each.expected}
        for each in differ[:FAULTS_SHOWN]
    ]


def payments_of(opened: Gate, gate: GateDefinition) -> list[StatementLine]:
    """Return all orders that the executor has carried out; [] where it lists nothing.

    Raises WorldError, with a hint how to resolve orders, when it does not answer.
    """
    if not opened.kernel.dispatcher.executor.lists:
        return []
    try:
        lines = opened.kernel.dispatcher.statement(0, now_ms() + CLOCKS_APART_MS)
    except WorldError as error:
        unknown = opened.store.value("SELECT count(*) FROM execution_log WHERE status IN ('PENDING', 'UNKNOWN')")
        hint = f"once it answers: sds {f'recover{gate.option}' if unknown else f'reconcile {gate.argument}'}"
        raise WorldError(f"{error}: it is not known what was paid", hint=hint) from error
    return [line for line in lines if line.outcome != "rejected"]


def wrongly_paid(opened: Gate, gate: GateDefinition, payments: Iterable[StatementLine]) -> list[str]:
    """Return a line for every difference between record and statement, each of which has a case by now, and for every
    fault that the definition finds in the statement.
    """
    if not opened.kernel.dispatcher.executor.lists:
        return []
    return [*(difference.words for difference in opened.reconcile().differences), *gate.demo.faults(payments)]


def _decided_elsewhere(answer: Answer, watch: Watch) -> bool:
    """Return whether another process decided it meanwhile: there is a proposal, but none was made here."""
    return answer.action is not None and answer.dfid not in watch.first_permitted


def waits(answer: Answer) -> bool:
    """Return whether it is undecided and may be decided later. A flow that drift ended was decided, on outdated state."""
    return answer.retryable and answer.tag != DRIFTED


def _undecided(answer: Answer) -> bool:
    """Return whether no model decided it: it waits, or it went to a human without a proposal."""
    return waits(answer) or answer.action is None


def _action(answer: Answer) -> str | None:
    if _undecided(answer):  # nobody chose ESCALATE where there was no proposal
        return None
    return ESCALATE if answer.state == "ESCALATED" else answer.action if answer.outcome == "ACCEPTED" else None


def outcome(answer: Answer, gate: GateDefinition) -> str:
    """Return the word for a case's outcome in the table."""
    if waits(answer):
        return "waiting"
    if answer.state == "ESCALATED":
        return "escalated"
    if answer.execution in ("UNKNOWN", "DIRTY"):
        return "unknown"
    if answer.state == "CLOSED":
        return kind_outcome(gate, answer.action or "other")
    return "aborted_on_drift" if answer.tag == DRIFTED else "aborted"


def kind_outcome(gate: GateDefinition, kind: str) -> str:
    """Return the word for a decision of this kind that was carried out."""
    return gate.demo.outcomes.get(kind, kind.lower())


def outcome_rows(gate: GateDefinition) -> list[str]:
    """Return the outcomes that a table always shows, in order."""
    return [*(kind_outcome(gate, kind) for kind in gate.load_contract().authority), "escalated", "aborted_on_drift"]


def percentiles(values: list[float]) -> dict[str, float]:
    """Return p50, p95, p99 and max in milliseconds; {} for no values."""
    if not values:
        return {}
    p50, p95, p99 = (float(p) for p in np.percentile(values, [50, 95, 99]))
    return {"p50": round(p50, 2), "p95": round(p95, 2), "p99": round(p99, 2), "max": round(max(values), 2)}


def refuse_paused(gate: GateDefinition, folder: Path) -> None:
    """Raise UsageError where the gate is halted or its agent is not active, StoreError where nothing can be recorded.
    Called before a model is opened. A record of an older version is left as it is, and not asked.
    """
    if not has_record(folder):
        refuse_lost(folder)
        return
    if is_of_older_version(folder):
        return
    with closing(open_record(folder)) as store:
        agent_id = gate.load_contract().agent_id
        if registry.lookup(store, agent_id) is not None:
            _refuse(_paused(store, agent_id, gate))


def refuse_stopped(opened: Gate, gate: GateDefinition) -> None:
    """Raise UsageError while nothing can be decided, ExecutorError while nothing may be ordered."""
    _refuse(_stopped(opened, gate))
    refuse_in_doubt(opened, gate)


def refuse_in_doubt(opened: Gate, gate: GateDefinition) -> None:
    """Raise ExecutorError where the record lacks orders that the executor has, or nobody can tell."""
    if (doubt := opened.kernel.whole.doubt()) is not None:
        hint = gate.adoption if doubt.code == RECORD_BEHIND else ""
        raise ExecutorError(doubt.message, reason_code=doubt.code, hint=hint)


def _refuse(stopped: Stopped | None) -> None:
    if stopped:
        raise UsageError(stopped[0], hint=stopped[1])


def _stopped(opened: Gate, gate: GateDefinition) -> Stopped | None:
    """Return why nothing can be decided now, and a hint. Without this check every case would be tried in vain."""
    agent_id = opened.contract.agent_id
    if paused := _paused(opened.store, agent_id, gate):
        return paused
    if authority_now(opened.store, agent_id).contract_hash != opened.contract.hash:
        return f"agent `{agent_id}` is no longer under this contract", f"sds agents show {agent_id}{gate.option}"
    if opened.breaker.is_open:
        return f"the model failed {FAILURES_MAX} times in a row", "run sds doctor with the same options"
    return None


def _paused(store: Store, agent_id: str, gate: GateDefinition) -> Stopped | None:
    known = registry.lookup(store, agent_id)
    if known is None:
        return f"agent `{agent_id}` is not registered", f"sds agents list{gate.option}"
    if known.halted:
        return "the gate is halted", f"sds resume{gate.option} --reason ..."
    if not known.active:
        found = agent_record(store, agent_id, now_ms=now_ms())
        why = f": {found.moves[-1].reason}" if found and found.moves else ""
        hint = HINTS.get(known.status, "sds agents show {}").format(agent_id) + gate.option
        return f"agent `{agent_id}` is {known.status}, not ACTIVE{why}", hint
    return None
