"""Deciding claims in two steps, the refund and then a voucher, and measuring what came of it.

`fail_second`: the payment rail really declines every second step. What is counted then: how many claims were half
settled, what was chosen from the menu, what the rail took back, and whether anything of a compensated claim stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from sds.engines.protocol import Engine
from sds.gate import Gate
from sds.gates.refund.gate import ensure_world, open_refund, read_queue
from sds.gates.refund.rail.client import RailProcess
from sds.gates.refund.run import FAULTS_SHOWN, payments_of, percentiles, refuse_stopped, wrongly_paid
from sds.host.paths import public_keys_of
from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import UsageError
from sds.kernel.executor.statement import StatementLine
from sds.kernel.flow.intake import settled_events
from sds.kernel.saga.state import COMPENSATED, DIRTY, SagaAnswer, spec_of

SECOND, COMPENSATION = "/2", "/compensation"


@dataclass
class Watch:
    """What happens between reasoning and execution: every proposal is checked, and the second step is made to fail."""

    rails: list[RailProcess]
    fail_second: bool
    out_of_envelope: int = 0

    def reasoned(self, packet: DecisionPacket, data: bytes) -> None:
        self.out_of_envelope += not packet.envelope.contains(data)
        if self.fail_second and packet.event_id.endswith(SECOND):
            self.rails[0].misbehave(fail=1.0)
        elif self.fail_second:
            self.rails[0].misbehave()


def run(
    folder: Path,
    *,
    saga: str,
    limit: int,
    engine: Engine | None,
    fail_second: bool,
    on_decided: Callable[[SagaAnswer], None],
) -> dict[str, Any]:
    """Decide the next `limit` claims that the saga is for; return the report. Raises UsageError: not so many are left."""
    ensure_world(folder)
    rails: list[RailProcess] = []
    watch = Watch(rails, fail_second)
    with open_refund(folder, engine=engine, on_reasoned=watch.reasoned, with_rail=rails.append) as gate:
        first = spec_of(gate.contract, saga).steps[0]
        refuse_stopped(gate)
        claims = list(islice(_claims(gate, folder, first), limit))
        if len(claims) < limit:
            raise UsageError(f"only {len(claims)} claims for `{saga}` are left", hint="sds run refund --reset")
        decided: list[tuple[SagaAnswer, float]] = []
        for claim in claims:
            began = perf_counter()
            answer = gate.decide_saga(saga, claim)
            decided.append((answer, (perf_counter() - began) * 1000))
            on_decided(answer)
        payments = payments_of(gate)
        return _report(gate, folder, decided, payments, wrongly_paid(gate, payments)) | {
            "saga": saga,
            "out_of_envelope": watch.out_of_envelope,
        }


def _claims(gate: Gate, folder: Path, first: str) -> Iterator[dict[str, str]]:
    """Yield the undecided claims for which the first step is permitted now."""
    known = settled_events(gate.store, gate.contract)
    for claim in read_queue(folder):
        if claim.event["claim_id"] not in known and first in gate.preview(claim.event).envelope.names:
            yield claim.event


def _report(
    gate: Gate,
    folder: Path,
    decided: list[tuple[SagaAnswer, float]],
    payments: list[StatementLine],
    wrong: list[str],
) -> dict[str, Any]:
    answers = [answer for answer, _ in decided]
    ours = {step.dfid: answer for answer in answers for step in answer.steps if step is not None}
    paid = [payment for payment in payments if payment.dfid in ours]
    taken_back = [payment.amount_minor or 0 for payment in paid if payment.outcome == "reverted"]
    standing = [p for p in paid if p.outcome == "settled" and ours[p.dfid].answer.tag == COMPENSATED]
    return {
        "model": gate.engine.model,
        "decisions": len(decided),
        "decided_by_model": sum(any(step and step.action for step in answer.steps) for answer in answers),
        "outcomes": dict(Counter(outcome(answer) for answer in answers)),
        "dirty": sum(answer.compensation is not None for answer in answers),
        "compensations": dict(Counter(a.compensation for a in answers if a.compensation is not None)),
        "paid_minor": sum(payment.amount_minor or 0 for payment in paid),
        "reversed_minor": sum(taken_back),
        "reversals": len(taken_back),
        "compensated_but_paid": len(standing),
        "double_payouts": len(wrong),
        "double_payout_faults": wrong[:FAULTS_SHOWN],
        "latency_ms": percentiles([ms for _, ms in decided]),
        "record_faults": list(verify.verify(gate.store, public=public_keys_of(folder)).faults),
        "dfids": [answer.answer.dfid for answer in answers],
    }


def outcome(answer: SagaAnswer) -> str:
    """Name what became of a claim, as the table shows it."""
    if answer.answer.state == "CLOSED":
        return "complete"
    if answer.answer.tag == COMPENSATED:
        return "compensated"
    if answer.answer.tag == DIRTY:
        return "dirty_with_a_human"
    return "escalated" if answer.answer.state == "ESCALATED" else "nothing_done"
