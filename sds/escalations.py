"""A human resolves what waits for them: an escalated case, or an order that nobody else can tell the end of.

`summary` and `described` give a case as data, `choices` what they may decide now, `resolve` carries their decision out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from sds.host.clock import when
from sds.kernel.contract.human_terms import Impact, impact
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import ESCALATE, KindBound, format_literal
from sds.kernel.executor.protocol import Receipt
from sds.kernel.flow.dispatch import Log, no_log
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from sds.kernel.human.cases import Case
from sds.kernel.human.review import CaseView, HumanReview, Resolution, attest

Resolve = Literal["OVERRIDE", "MODIFY", "ABORT", "SETTLED", "REJECTED"]


@dataclass(frozen=True, slots=True)
class HumanDecision:
    """What a human decided about what waits for them, or found out about an order that is UNKNOWN.

    `change`: the JSON of another decision, with MODIFY. `seen`: the state they looked at, as the case view names it.
    `reference`: the outside's own id of what was carried out, with SETTLED. `acknowledge`: they know that it is of HIGH
    impact.
    """

    decision: Resolve
    who: str
    reason: str
    change: str = ""
    seen: str = ""
    reference: str = ""
    acknowledge: bool = False


def resolve(
    kernel: Kernel, dfid: str, decided: HumanDecision, *, now_ms: Callable[[], int], log: Log = no_log
) -> Answer:
    """Carry out what a human decided, or record what they found out; return the answer the flow then has.

    OVERRIDE, MODIFY and ABORT are for an escalated flow; SETTLED and REJECTED for an order that is UNKNOWN. Raises
    UsageError or WorldError when it is refused.
    """
    wanted, who, reason, acknowledged = decided.decision, decided.who, decided.reason, decided.acknowledge
    if wanted == "SETTLED" or wanted == "REJECTED":  # noqa: PLR1714  one by one, so that the type is narrowed
        receipt = Receipt("settled" if wanted == "SETTLED" else "rejected", reference=decided.reference)
        return attest(kernel, dfid, receipt, who=who, reason=reason, acknowledged=acknowledged, now_ms=now_ms())
    resolution = Resolution(wanted, who, reason, decided.change, decided.seen, acknowledged)
    return HumanReview(kernel, now_ms=now_ms, log=log).resolve(dfid, resolution)


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing a human may decide now. `kind`: what a MODIFY may be; `impacts`: of the least and of the most it may be.

    `acknowledge`: even the least of it is of HIGH impact, or final, and has to be acknowledged.
    """

    decision: Resolve
    acknowledge: bool = False
    kind: KindBound | None = None
    impacts: tuple[Impact, Impact] | None = None

    def example(self) -> str:
        """Return the JSON of a decision of this kind; every number stands at its lower bound."""
        if self.kind is None:
            return ""
        numbers = ",".join(f'"{name}":{format_literal(bound.lo, bound.scale)}' for name, bound in self.kind.params)
        params = f'"params":{{{numbers}}},' if numbers else ""
        return f'{{"action":"{self.kind.kind}",{params}"reason":"{self.kind.reasons[0]}"}}'


def waits(case: Case) -> bool:
    """Tell whether a case still waits for a human."""
    return case.unknown or (case.state == "ESCALATED" and case.resolved is None)


def choices(terms: Contract, case: Case, look: CaseView) -> list[Choice]:
    """Return what a human may decide now, most likely first; nothing where the case waits for nobody."""
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
            found.append(Choice("MODIFY", (both := impacts(terms, kind))[0] == "HIGH", kind, both))
    return [*found, Choice("ABORT")]


def impacts(terms: Contract, kind: KindBound) -> tuple[Impact, Impact]:
    """Return the impact of the least and of the most that a kind may be now."""
    fixed = {name: value for name, value, _ in kind.fills}
    least = fixed | {name: bound.lo for name, bound in kind.params}
    most = fixed | {name: bound.hi for name, bound in kind.params}
    return impact(terms, kind.kind, least), impact(terms, kind.kind, most)


def summary(terms: Contract, case: Case) -> dict[str, Any]:
    """Return a case as data for a list: since when, why, what is proposed, its impact. No text of the case is in it."""
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
    """Return a case as data, with its texts: state then and now, what was proposed and why it was not done."""
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
    spec = terms.kinds.get(action)

    def number(name: str, value: int) -> str:
        known = spec is not None and (name in spec.params or name in spec.fills)
        return format_literal(value, spec.scale(name)) if spec is not None and known else str(value)

    return " ".join([action, *(f"{name} {number(name, value)}" for name, value in numbers.items())])
