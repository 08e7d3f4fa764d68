"""The Decision Integrity Module (DIR 4.4): five gates between a claim and an order. Pure; never raises.

    1 schema      the bytes are one well-formed proposal              SCHEMA_INVALID
    2 authority   the agent may, and this lies inside the envelope    RBAC_DENIED, AGENT_SUSPENDED, ...
    3 state       it refers to the packet's snapshot, in time         STALE_CONTEXT
    4 resources   nobody else holds what it draws on                  RESOURCE_CONTENTION
    5 mission     the registered mission is the one it was given      MISSION_DISSONANCE

What the just-in-time check and the reserving transaction object to afterwards is recorded as gate 6.
Every gate is evaluated, and the verdict carries every reason. A kernel fault is a rejection, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.bounds import parse_literal
from sds.kernel.envelope.envelope import ESCALATE, KindBound
from sds.kernel.envelope.proposal import Proposal, parse_proposal

Outcome = Literal["ACCEPTED", "REJECTED", "ESCALATED"]

AFTER_THE_GATES = 6
PROBABILITY_MAX = 1 + 1e-9  # a sum of measured probabilities may be rounded up
FINAL_CODES = frozenset(
    {"AGENT_SUSPENDED", "CONTRACT_REVOKED", "HALTED", "MISSION_DISSONANCE", "PROPOSAL_EXPIRED", "TOKEN_BUDGET_EXCEEDED"}
)

# An agent that may not act may still hand the case to a human: otherwise a halt would lose every case it meets.
HUMAN_ANYWAY = frozenset({"AGENT_SUSPENDED", "CONTRACT_REVOKED", "HALTED"})


@dataclass(frozen=True, slots=True)
class Reason:
    """One determining reason: the gate (1-5; 6 for what comes after), its code, one line."""

    gate: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class AuthorityState:
    """What registry and store say at the moment of judgement.

    `contract_hash`, `mission_hash`: of the contract the flow is under, empty when that is revoked.
    `held`: snapshot fields whose resource another decision has reserved. `tokens_spent`: by earlier attempts, whose
    proposals are `rejected`.
    """

    agent_active: bool
    halted: bool
    contract_hash: str
    mission_hash: str
    held: frozenset[str] = frozenset()
    tokens_spent: int = 0
    rejected: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement. `amounts_minor`: every number of the decision in minor units, kernel-filled ones included.

    `gate_reached`: the first gate that objected, 5 when none did. `final`: trying again cannot help.
    """

    outcome: Outcome
    reasons: tuple[Reason, ...]
    gate_reached: int
    proposal: Proposal | None = None
    amounts_minor: tuple[tuple[str, int], ...] = ()

    @property
    def reason_code(self) -> str | None:
        return self.reasons[0].code if self.reasons else None

    @property
    def contended(self) -> bool:
        """Whether all that stands in the way is another decision's reservation: not the agent's fault."""
        return bool(self.reasons) and all(reason.code == "RESOURCE_CONTENTION" for reason in self.reasons)

    @property
    def final(self) -> bool:
        return any(reason.code in FINAL_CODES for reason in self.reasons)


def judge(
    contract: Contract, packet: DecisionPacket, data: bytes, standing: AuthorityState, decoding: Decoding, now_ms: int
) -> Verdict:
    """Return the verdict on proposal bytes, for any bytes, in time linear in at most 64 KiB of them."""
    try:
        return _judge(contract, packet, data, standing, decoding, now_ms)
    except Exception as error:  # noqa: BLE001  a fault of ours must never let a proposal through
        why = f"the kernel could not judge this proposal: {type(error).__name__}"
        return Verdict("REJECTED", (Reason(1, "KERNEL_FAULT", why),), 1)


def _judge(
    contract: Contract, packet: DecisionPacket, data: bytes, standing: AuthorityState, decoding: Decoding, now_ms: int
) -> Verdict:
    parsed = parse_proposal(data)
    reasons = _packet_reasons(contract, packet, standing, decoding, now_ms)
    if isinstance(parsed, str):
        reasons.append(Reason(1, "SCHEMA_INVALID", parsed))
        return _rejected(reasons, None)
    if data in standing.rejected:
        again = Reason(1, "REPEATED_PROPOSAL", "this very proposal was rejected before")
        return Verdict("ESCALATED", (again,), 1, parsed)
    for code, message in packet.envelope.objections(parsed):
        reasons.append(Reason(1 if code == "SCHEMA_INVALID" else 2, code, message))
    if parsed.context_ref != packet.snapshot.id:
        reasons.append(Reason(3, "STALE_CONTEXT", "the proposal refers to another snapshot"))
    spec = contract.kinds.get(parsed.action)
    for path in sorted(spec.draws) if spec else ():
        if path in standing.held:
            reasons.append(Reason(4, "RESOURCE_CONTENTION", f"`{path}` is reserved by another decision"))
    permitted = packet.envelope.kind(parsed.action)
    if parsed.action == ESCALATE and reasons and all(reason.code in HUMAN_ANYWAY for reason in reasons):
        return Verdict("ESCALATED", tuple(reasons), reasons[0].gate, parsed)
    if reasons or permitted is None:
        return _rejected(reasons, parsed)
    return _accepted_or_escalated(contract, packet, parsed, permitted, decoding)


def _packet_reasons(
    contract: Contract, packet: DecisionPacket, standing: AuthorityState, decoding: Decoding, now_ms: int
) -> list[Reason]:
    """Objections that do not depend on what was proposed."""
    found: list[Reason] = []
    if not standing.agent_active:
        found.append(Reason(2, "AGENT_SUSPENDED", f"agent `{packet.agent_id}` is not active"))
    if standing.halted:
        found.append(Reason(2, "HALTED", "an operator has halted the system"))
    tokens = standing.tokens_spent + decoding.tokens
    if decoding.tokens < 0 or tokens > contract.budget.tokens_max:
        found.append(Reason(2, "TOKEN_BUDGET_EXCEEDED", f"{tokens} tokens are over the budget"))
    if now_ms > packet.expires_at_ms:
        found.append(Reason(3, "PROPOSAL_EXPIRED", "the packet expired before the proposal came"))
    if standing.contract_hash != packet.contract_hash or contract.hash != packet.contract_hash:
        found.append(Reason(2, "CONTRACT_REVOKED", "the flow is not, or no longer, under the contract of this packet"))
    if standing.mission_hash != packet.mission_hash:
        found.append(Reason(5, "MISSION_DISSONANCE", "the packet was made for another mission"))
    return found


def _rejected(reasons: list[Reason], proposal: Proposal | None) -> Verdict:
    ordered = tuple(sorted(reasons, key=lambda r: r.gate)) or (Reason(2, "RBAC_DENIED", "not permitted now"),)
    return Verdict("REJECTED", ordered, ordered[0].gate, proposal)


def _accepted_or_escalated(
    contract: Contract, packet: DecisionPacket, proposal: Proposal, permitted: KindBound, decoding: Decoding
) -> Verdict:
    escalation = _escalation(contract, packet, proposal, decoding)
    if escalation is not None:
        return Verdict("ESCALATED", (escalation,), 5, proposal, amounts_minor(proposal, permitted))
    return Verdict("ACCEPTED", (), 5, proposal, amounts_minor(proposal, permitted))


def amounts_minor(proposal: Proposal, permitted: KindBound) -> tuple[tuple[str, int], ...]:
    """Return every number of a proposal without objections, in minor units: what it says, then what the rules fix."""
    said = ((n, parse_literal(t, b.scale)) for (n, t), (_, b) in zip(proposal.params, permitted.params, strict=True))
    return tuple((n, v) for n, v in said if v is not None) + tuple((n, v) for n, v, _ in permitted.fills)


def _escalation(contract: Contract, packet: DecisionPacket, proposal: Proposal, decoding: Decoding) -> Reason | None:
    """Who must decide is not the model's call alone (DIR 3.9): low confidence and named kinds go to a human."""
    if proposal.action == ESCALATE:
        if packet.notes:
            return Reason(5, "ESCALATED_BY_RULE", "; ".join(packet.notes))
        return Reason(5, "ESCALATED_BY_AGENT", "the agent handed the decision to a human")
    if proposal.action in contract.escalation.always:
        return Reason(5, "APPROVAL_REQUIRED", f"`{proposal.action}` always needs a human")
    minimum = contract.escalation.confidence_min_pct
    measured = decoding.confidence
    # Written so that NaN, and anything else that is no probability, is below every minimum.
    if minimum and (measured is None or not minimum / 100 <= measured <= PROBABILITY_MAX):
        unmeasured = f"this engine measures no probability, and {minimum} % are asked for"
        less = f"the chosen action is less likely than {minimum} %"
        return Reason(5, "CONFIDENCE_BELOW_MINIMUM", unmeasured if measured is None else less)
    return None
