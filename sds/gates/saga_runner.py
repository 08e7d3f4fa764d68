"""Decides a gate's queue in the steps of a saga, and measures the result.

It counts cases that were half settled, choices from the menu, payments that the executor took back, and payments that
still stand although their case was compensated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from sds.definitions.definition import GateDefinition
from sds.engines.protocol import Engine
from sds.gate import Gate
from sds.gates.runner import (
    FAULTS_SHOWN,
    payments_of,
    percentiles,
    refuse_in_doubt,
    undecided_cases,
    waits,
    watched,
    wrongly_paid,
)
from sds.host.paths import public_keys_of
from sds.kernel.audit import verify
from sds.kernel.errors import UsageError
from sds.kernel.saga.state import COMPENSATED, DIRTY, SagaAnswer, spec_of

Decided = list[tuple[SagaAnswer, float]]  # an answer, and its time in milliseconds


def run(
    gate: GateDefinition,
    folder: Path,
    *,
    saga: str,
    limit: int,
    engine: Engine,
    chaos: str | None,
    on_decided: Callable[[SagaAnswer], None],
) -> dict[str, Any]:
    """Decide the next `limit` cases of the saga; return the report. Raises UsageError where fewer are left."""
    with watched(gate, folder, engine, chaos, limit) as (opened, _, watch):
        cases = list(islice(_cases(gate, opened, folder, spec_of(opened.contract, saga).steps[0]), limit))
        if len(cases) < limit:
            hint = f"sds run {gate.argument} --reset"
            raise UsageError(f"only {len(cases)} {gate.demo.case}s for `{saga}` are left", hint=hint)
        decided: Decided = []
        for event in cases:
            began = perf_counter()
            answer = opened.decide_saga(saga, event)
            decided.append((answer, (perf_counter() - began) * 1000))
            on_decided(answer)
        refuse_in_doubt(opened, gate)  # the record may have been replaced meanwhile
        report = _report(gate, opened, folder, decided)
        return report | {"saga": saga, "out_of_envelope": watch.out_of_envelope}


def _cases(gate: GateDefinition, opened: Gate, folder: Path, first: str) -> Iterator[Mapping[str, object]]:
    """Yield the undecided events for which the first step is permitted now."""
    for case in undecided_cases(gate, opened, folder):
        if first in opened.preview(case.event).envelope.names:
            yield case.event


def _report(gate: GateDefinition, opened: Gate, folder: Path, decided: Decided) -> dict[str, Any]:
    answers = [answer for answer, _ in decided]
    payments = payments_of(opened, gate)
    wrong = wrongly_paid(opened, gate, payments)
    ours = {step.dfid: answer for answer in answers for step in answer.steps if step is not None}
    paid = [payment for payment in payments if payment.dfid in ours]
    taken_back = [payment.amount_minor or 0 for payment in paid if payment.outcome == "reverted"]
    standing = [p for p in paid if p.outcome == "settled" and ours[p.dfid].answer.tag == COMPENSATED]
    return {
        "model": opened.engine.model,
        "decisions": len(decided),
        "decided_by_model": sum(any(step and step.action for step in answer.steps) for answer in answers),
        "waiting": sum(waits(answer.answer) for answer in answers),
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
        "record_faults": list(verify.verify(opened.store, public=public_keys_of(folder)).faults),
        "dfids": [answer.answer.dfid for answer in answers],
    }


def outcome(answer: SagaAnswer) -> str:
    """Return the word for a case's outcome in the table."""
    if waits(answer.answer):
        return "waiting"
    if answer.answer.state == "CLOSED":
        return "complete"
    if answer.answer.tag == COMPENSATED:
        return "compensated"
    if answer.answer.tag == DIRTY:
        return "dirty_with_a_human"
    return "escalated" if answer.answer.state == "ESCALATED" else "nothing_done"
