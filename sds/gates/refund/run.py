"""Working through the queue of claims, and measuring what came of it.

`--chaos drift` moves every second ticket between reasoning and execution, through a connection of its own, as the
airline's other clerks might. What is counted then: how many of the moved tickets would have been paid, how many
were, and how many of those left alone were, without which a kernel that pays nothing would look as good.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, Literal

import numpy as np

from sds.engines.protocol import Engine
from sds.gate import Gate
from sds.gates.refund.adjudication import expected_action
from sds.gates.refund.gate import QueuedClaim, airline_path, ensure_world, load_refund_contract, open_refund, read_queue
from sds.gates.refund.source import TicketSource
from sds.gates.refund.world.airline import move_ticket
from sds.host.paths import decisions_path, now_ms, open_record, public_keys_of, refuse_lost
from sds.kernel.audit import verify
from sds.kernel.audit.agent_history import agent_record
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.kernel.errors import UsageError, WorldError
from sds.kernel.executor.statement import CLOCKS_APART_MS, StatementLine
from sds.kernel.flow.answer import Answer
from sds.kernel.flow.intake import settled_events
from sds.kernel.registry import registry
from sds.kernel.registry.authority import authority_now
from sds.kernel.storage.store import Reader, Store

MOVED_EVERY = 2  # of the proposals that would pay, and of the others
PAYS = frozenset({"COMPENSATE", "REFUND_TICKET", "VOUCHER"})
AT_MOST_ONCE = frozenset({"COMPENSATE", "VOUCHER"})  # for a ticket; several refunds are honest, up to its fare
FAULTS_SHOWN = 10
DRIFTED = "STATE_DRIFT_DETECTED"
FAILURES_MAX = 5  # of the model, one after the other: what comes next would fail, too, and each is a human's
HINTS = {"SUSPENDED": "sds agents reactivate {} --reason ...", "ESCALATED": "sds escalations list"}
THUMB = ("COMPENSATE", "REFUND_TICKET", "VOUCHER", "DENY", "ESCALATE")
OUTCOMES = {"COMPENSATE": "compensated", "REFUND_TICKET": "refunded", "VOUCHER": "vouchers", "DENY": "denied"}


Decided = tuple[Answer, float, str]  # the answer, its milliseconds, what the written rule says


@dataclass
class Watch:
    """What happens between reasoning and execution: every proposal is checked, and chaos moves some tickets."""

    airline: Path
    rng: Random | None
    out_of_envelope: int = 0
    met: Counter[bool] = field(default_factory=Counter)  # claims so far, by whether their first proposal would pay
    claims: dict[str, bool] = field(default_factory=dict)  # event id -> whether its ticket was moved
    would_pay: dict[str, bool] = field(default_factory=dict)  # dfid -> whether the last proposal would pay
    moved: set[str] = field(default_factory=set)  # dfids
    thumb: dict[str, str] = field(default_factory=dict)  # dfid -> what always paying would have decided
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reasoned(self, packet: DecisionPacket, data: bytes) -> None:
        with self.lock:
            self._reasoned(packet, data)

    def _reasoned(self, packet: DecisionPacket, data: bytes) -> None:
        self.out_of_envelope += not packet.envelope.contains(data)
        self.thumb[packet.dfid] = next(name for name in THUMB if name in packet.envelope.names)
        proposal = parse_proposal(data)
        would_pay = isinstance(proposal, Proposal) and proposal.action in PAYS
        self.would_pay[packet.dfid] = would_pay
        if packet.event_id not in self.claims and self.rng is not None:  # what starts anew after drift is let through
            self.claims[packet.event_id] = self._moved(packet, would_pay, self.rng)

    def _moved(self, packet: DecisionPacket, would_pay: bool, rng: Random) -> bool:
        turn = self.met[would_pay]
        self.met[would_pay] += 1
        if turn % MOVED_EVERY or move_ticket(self.airline, packet.key, rng) is None:
            return False
        self.moved.add(packet.dfid)
        return True


def run(
    folder: Path,
    *,
    limit: int,
    engine: Engine,
    chaos: Literal["drift"] | None,
    on_decided: Callable[[Answer], None],
    parallel: int = 1,
) -> dict[str, Any]:
    """Decide the next `limit` undecided claims, `parallel` of them at once; return the report, in the queue's order.

    `on_decided` is called in this thread. Raises UsageError when there are not so many claims.
    """
    ensure_world(folder)
    rng = Random(limit) if chaos else None  # noqa: S311  reproducible chaos, not a secret
    watch = Watch(airline_path(folder), rng)
    with open_refund(folder, engine=engine, on_reasoned=watch.reasoned) as gate:
        source = TicketSource(airline_path(folder))
        refuse_stopped(gate)
        known = settled_events(gate.store, gate.contract)
        claims = [c for c in read_queue(folder) if c.event["claim_id"] not in known]
        if len(claims) < limit:
            raise UsageError(f"only {len(claims)} claims are left in the queue", hint="sds run refund --reset")
        queue = _Queue(gate, source)
        decided: list[Decided] = []
        for found in queue.worked_through(claims[:limit], parallel):
            decided.append(found)
            on_decided(found[0])
        stopped = queue.stopped
        source.close()
        payments = payments_of(gate)
        wrong = wrongly_paid(gate, payments)
        ours = [one for one in decided if not _elsewhere(one[0], watch)]
        report = _report(
            gate.engine.model,
            ours,
            watch,
            payments,
            wrong,
            verify.verify(gate.store, public=public_keys_of(folder)).faults,
        )
        report["decided_elsewhere"] = len(decided) - len(ours)
        report["stopped"] = stopped
        return report | (_chaos_report(watch, gate.store, payments, ours) if chaos else {})


def payments_of(gate: Gate) -> list[StatementLine]:
    """Return all that the rail has paid. Raises WorldError, with how to learn what became of orders, when it is dead."""
    try:
        lines = gate.kernel.dispatcher.statement(0, now_ms() + CLOCKS_APART_MS)
    except WorldError as error:
        unknown = gate.store.value("SELECT count(*) FROM execution_log WHERE status IN ('PENDING', 'UNKNOWN')")
        hint = f"{unknown} orders are UNKNOWN: sds recover"
        raise WorldError(f"{error}: what was paid cannot be told", hint=hint) from error
    return [line for line in lines if line.outcome != "rejected"]


def wrongly_paid(gate: Gate, payments: Iterable[StatementLine]) -> list[str]:
    """Return one line for every difference between record and rail, each a case by now, and for every ticket that was paid
    twice what it may be paid once.
    """
    kinds = Counter((p.resource_key, p.kind) for p in payments if p.kind in AT_MOST_ONCE and p.outcome == "settled")
    twice = [f"ticket {ticket}: {kind} {count} times" for (ticket, kind), count in kinds.items() if count > 1]
    return [*(difference.words for difference in gate.reconcile().differences), *twice]


def _elsewhere(answer: Answer, watch: Watch) -> bool:
    """Whether another process decided it meanwhile: there is a proposal, and none was made here."""
    return answer.action is not None and answer.dfid not in watch.thumb


def _waits(answer: Answer) -> bool:
    """Whether nobody has decided it and it may be decided later; what drift ended was decided, on what no longer holds."""
    return answer.retryable and answer.tag != DRIFTED


def _undecided(answer: Answer) -> bool:
    """Whether no model decided it: it waits, or it is a human's for want of a proposal."""
    return _waits(answer) or answer.action is None


class _Queue:
    """The claims of one run, decided until the gate is stopped: `stopped` says why then. What other threads decide at
    that moment is decided to its end.
    """

    def __init__(self, gate: Gate, source: TicketSource) -> None:
        self._gate, self._source = gate, source
        self._failures = 0  # in a row
        self.stopped: tuple[str, str] | None = None

    def worked_through(self, claims: list[QueuedClaim], parallel: int) -> Iterator[Decided]:
        if parallel == 1:
            yield from filter(None, map(self._decide, claims))
            return
        with ThreadPoolExecutor(parallel) as pool:
            asked = [pool.submit(self._decide, claim) for claim in claims]
            try:
                for future in asked:
                    if (found := future.result()) is not None:
                        yield found
            finally:  # who interrupts waits for what is being decided, and for no more
                pool.shutdown(cancel_futures=True)

    def _decide(self, claim: QueuedClaim) -> Decided | None:
        self.stopped = self.stopped or _stopped(self._gate)
        if self.stopped:
            return None
        expected = _expected(self._source, claim)
        began = perf_counter()
        answer = self._gate.decide(claim.event)
        self._failures = self._failures + 1 if _undecided(answer) and not _waits(answer) else 0
        if self._failures >= FAILURES_MAX:
            why = f"the model failed {FAILURES_MAX} times in a row, the last time with {answer.reason_code}"
            self.stopped = self.stopped or (why, "sds doctor --model PATH")
        return answer, (perf_counter() - began) * 1000, expected


def refuse_paused(folder: Path) -> None:
    """Raise UsageError where somebody halted the gate or its agent is not active, StoreError where nothing can be recorded:
    what is known before a model is opened is said before.
    """
    if not decisions_path(folder).exists():
        refuse_lost(folder)
        return
    with closing(open_record(folder)) as store:
        agent_id = load_refund_contract().agent_id
        if registry.lookup(store, agent_id) is not None:
            _refuse(_paused(store, agent_id))


def refuse_stopped(gate: Gate) -> None:
    """Raise UsageError while nothing can be decided."""
    _refuse(_stopped(gate))


def _refuse(stopped: tuple[str, str] | None) -> None:
    if stopped:
        raise UsageError(stopped[0], hint=stopped[1])


def _stopped(gate: Gate) -> tuple[str, str] | None:
    """Return why nothing can be decided now, and how to mend it: the queue must not be used up as escalations."""
    agent_id = gate.contract.agent_id
    if paused := _paused(gate.store, agent_id):
        return paused
    if authority_now(gate.store, agent_id).contract_hash != gate.contract.hash:
        return f"agent `{agent_id}` is no longer under this contract", f"sds agents show {agent_id}"
    return None


def _paused(store: Store, agent_id: str) -> tuple[str, str] | None:
    known = registry.lookup(store, agent_id)
    if known is None:
        return f"agent `{agent_id}` is not registered", "sds agents list"
    if known.halted:
        return "the gate is halted", "sds resume --reason ..."
    if not known.active:
        found = agent_record(store, agent_id, now_ms=now_ms())
        why = f": {found.moves[-1].reason}" if found and found.moves else ""
        hint = HINTS.get(known.status, "sds agents show {}").format(agent_id)
        return f"agent `{agent_id}` is not active but {known.status}{why}", hint
    return None


def _expected(source: TicketSource, claim: QueuedClaim) -> str:
    read = source.read(claim.event["ticket_id"])
    return expected_action(read.fields if read else None, claim.cause)


def _report(
    model: str,
    decided: list[Decided],
    watch: Watch,
    payments: list[StatementLine],
    wrong: list[str],
    faults: Iterable[str],
) -> dict[str, Any]:
    answers = [answer for answer, _, _ in decided]
    waiting = sum(map(_waits, answers))
    failed = [answer for answer in answers if _undecided(answer) and not _waits(answer)]
    agreed = sum(_action(answer) == expected for answer, _, expected in decided)
    by_thumb = sum(watch.thumb.get(answer.dfid) == expected for answer, _, expected in decided)
    dfids = {answer.dfid for answer in answers}
    return {
        "model": model,
        "decisions": len(decided),
        "decided_by_model": len(decided) - waiting - len(failed),
        "model_failed": dict(Counter(str(answer.reason_code) for answer in failed)),
        "waiting": waiting,
        "outcomes": dict(Counter(outcome(answer) for answer in answers)),
        "out_of_envelope": watch.out_of_envelope,
        "double_payouts": len(wrong),
        "double_payout_faults": wrong[:FAULTS_SHOWN],
        "paid_minor": sum(payment.amount_minor or 0 for payment in payments if payment.dfid in dfids),
        "agreement": round(agreed / len(decided), 4) if decided else None,
        "agreement_always_paying": round(by_thumb / len(decided), 4) if decided else None,
        "latency_ms": percentiles([ms for answer, ms, _ in decided if not _undecided(answer)]),
        "record_faults": list(faults),
    }


def _chaos_report(
    watch: Watch, record: Reader, payments: list[StatementLine], decided: list[Decided]
) -> dict[str, int]:
    """Count by flow: of those moved, only what drift ended, or what was paid all the same, says anything.

    What was paid on a second look, after the ticket had moved, is neither: it is counted on its own.
    """
    drifted = {row[0] for row in record.rows("SELECT dfid FROM decision_flows WHERE tag = 'STATE_DRIFT_DETECTED'")}
    paid = {payment.dfid for payment in payments}
    would_have_paid = {dfid for dfid in watch.moved & (drifted | paid) if watch.would_pay[dfid]}
    return {
        "moved_tickets": len(watch.moved),
        "moved_tickets_that_would_have_paid": len(would_have_paid),
        "moved_tickets_paid": len(watch.moved & paid),
        "moved_tickets_paid_anew": sum(
            a.dfid in paid - watch.moved and watch.claims.get(a.event_id, False) for a, _, _ in decided
        ),
        "unmoved_paid": sum(a.dfid in paid and not watch.claims.get(a.event_id, False) for a, _, _ in decided),
    }


def _action(answer: Answer) -> str | None:
    if _undecided(answer):  # a human's for want of an answer: nobody chose that
        return None
    return "ESCALATE" if answer.state == "ESCALATED" else answer.action if answer.outcome == "ACCEPTED" else None


def outcome(answer: Answer) -> str:
    """Name what became of a claim, as the table shows it."""
    if _waits(answer):
        return "waiting"
    if answer.state == "ESCALATED":
        return "escalated"
    if answer.execution in ("UNKNOWN", "DIRTY"):
        return "unknown"
    if answer.state == "CLOSED":
        return OUTCOMES.get(answer.action or "", "other")
    return "aborted_on_drift" if answer.tag == DRIFTED else "aborted"


def percentiles(values: list[float]) -> dict[str, float]:
    """Return p50, p95, p99 and max in milliseconds; empty for no values."""
    if not values:
        return {}
    p50, p95, p99 = (float(p) for p in np.percentile(values, [50, 95, 99]))
    return {"p50": round(p50, 2), "p95": round(p95, 2), "p99": round(p99, 2), "max": round(max(values), 2)}
