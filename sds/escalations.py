"""The cases that wait for a human, as data: `summary` and `described` say what a case is, `choices` what may be decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sds.host.clock import when
from sds.kernel.contract.human_terms import Impact, impact
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import ESCALATE, KindBound, format_literal
from sds.kernel.human.cases import Case, Decision
from sds.kernel.human.review import CaseView


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision that a human may take now. `kind`: the bounds of a MODIFY; `impacts`: at its least and its greatest
    numbers.

    `acknowledge`: even at its least it is of HIGH impact, or it is final, and so must be acknowledged.
    """

    decision: Decision
    acknowledge: bool = False
    kind: KindBound | None = None
    impacts: tuple[Impact, Impact] | None = None

    def example(self) -> str:
        """Return the JSON of a decision of this kind, with every number at its lower bound."""
        if self.kind is None:
            return ""
        numbers = ",".join(f'"{name}":{format_literal(bound.lo, bound.scale)}' for name, bound in self.kind.params)
        params = f'"params":{{{numbers}}},' if numbers else ""
        return f'{{"action":"{self.kind.kind}",{params}"reason":"{self.kind.reasons[0]}"}}'


def waits(case: Case) -> bool:
    """Tell whether a case still waits for a human."""
    return case.unknown or (case.state == "ESCALATED" and case.resolved is None)


def choices(terms: Contract, case: Case, look: CaseView) -> list[Choice]:
    """Return the permitted decisions, the likeliest first; none where the case does not wait for a human."""
    if not waits(case):
        return []
    if case.unknown:
        return [Choice("SETTLED", acknowledge=True), Choice("REJECTED", acknowledge=True)]
    if not case.can_be_carried_out:
        return [Choice("ABORT")]
    found, envelope = list[Choice](), look.packet.envelope
    if case.proposal and not envelope.objections(replace(case.proposal, rationale=None)):
        found.append(Choice("OVERRIDE", acknowledge=case.impact(terms) == "HIGH"))
    for kind in envelope.kinds:
        if kind.kind != ESCALATE:
            found.append(Choice("MODIFY", (least_most := impacts(terms, kind))[0] == "HIGH", kind, least_most))
    return [*found, Choice("RETURN"), Choice("ABORT")]


def impacts(terms: Contract, kind: KindBound) -> tuple[Impact, Impact]:
    """Return the impacts of a kind at its least and at its greatest numbers."""
    fixed = {name: value for name, value, _ in kind.fills}
    least = fixed | {name: bound.lo for name, bound in kind.params}
    most = fixed | {name: bound.hi for name, bound in kind.params}
    return impact(terms, kind.kind, least), impact(terms, kind.kind, most)


def summary(terms: Contract, case: Case) -> dict[str, Any]:
    """Return a case as data for a list: since when, why, the proposal and its impact. It contains no text of the case."""
    return {
        "dfid": case.dfid,
        "event_id": case.event_id,
        "since": when(case.since_ms),
        "reason": "RECORD_DAMAGED" if case.damaged else "UNKNOWN" if case.unknown else case.reason_code,
        "proposed": decision_text(terms, case.action, case.numbers) if case.action else None,
        "action": case.action,
        "params": case.numbers if case.action else {},
        "impact": case.impact(terms),
    }


def described(terms: Contract, case: Case, look: CaseView) -> dict[str, Any]:
    """Return a case as data with its texts: state then and now, the proposal and why it was not carried out."""
    return {
        **summary(terms, case),
        "state": case.state,
        "resolved": case.resolved,
        "why": case.reasons,
        "event": case.trigger,
        "snapshot": {"id": case.snapshot_id, "fields": case.fields},
        "now": {"id": look.seen, "fields": look.packet.snapshot.fields, "notes": look.packet.notes},
        "moved": look.moved,
        "proposal": case.said.decode("utf-8", "backslashreplace"),
        "confidence": case.confidence,
        "alternatives": case.alternatives,
        "may_decide": look.packet.envelope.as_data(),
    }


def decision_text(terms: Contract, action: str, numbers: Mapping[str, int]) -> str:
    """Return a decision in words: the kind, and its numbers with their decimals."""

    def number(name: str, value: int) -> str:
        scale = scale_of(terms, action, name)
        return str(value) if scale is None else format_literal(value, scale)

    return " ".join([action, *(f"{name} {number(name, value)}" for name, value in numbers.items())])


def scale_of(terms: Contract, action: str, name: str) -> int | None:
    """Return the decimals of a decision's number; None where the contract does not know it."""
    spec = terms.kinds.get(action)
    number = (spec.params.get(name) or spec.fills.get(name)) if spec else None
    return number.scale if number else None
