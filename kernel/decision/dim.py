"""The Decision Integrity Module (DIR 4.4): five gates between a proposal and an order. Pure; never raises.

    1 schema      the bytes are one well-formed proposal              SCHEMA_INVALID
    2 authority   the agent may, and this lies inside the envelope    RBAC_DENIED, AGENT_SUSPENDED, ...
    3 state       it refers to the packet's snapshot, in time         STALE_CONTEXT
    4 resources   nobody else holds what it draws on                  RESOURCE_CONTENTION
    5 mission     the registered mission is the one it was given      MISSION_DISSONANCE

Every gate is evaluated, and the verdict carries every reason; only a proposal that its flow has had rejected before goes to
a human at once. An exception in the kernel is a rejection. Objections of the just-in-time check and of the reserving
transaction, which come later, are recorded as gate 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.envelope import ESCALATE, KindBound, parse_literal
from sds.kernel.envelope.proposal import Proposal, parse_proposal

Outcome = Literal["ACCEPTED", "REJECTED", "ESCALATED"]

AFTER_THE_GATES = 6
HANDED_OVER = ("ESCALATED_BY_AGENT", "the agent handed the decision to a human")
# The codes by which an agent says why it escalates (`Decoding.escalation`), with their words.
WHY_ESCALATED = {
    "UNFAMILIAR": "the evidence is unlike what the reader was fitted on",
    "UNCERTAIN": "the decision is less certain than `max_error` requires",
    "POLICY_FORBIDDEN": "the policy proposes what is not permitted now",
    "POLICY_ESCALATES": "the policy has no decision for this case",
}
PROBABILITY_MAX = 1 + 1e-9  # rounding may bring a sum of probabilities slightly above 1
# After one of these objections another attempt cannot help.
FINAL_CODES = frozenset(
    {"AGENT_SUSPENDED", "CONTRACT_REVOKED", "HALTED", "MISSION_DISSONANCE", "PROPOSAL_EXPIRED", "TOKEN_BUDGET_EXCEEDED"}
)

# Objections that do not keep an agent from handing its case to a human: otherwise a halt would lose every open case.
HUMAN_ANYWAY = frozenset({"AGENT_SUSPENDED", "CONTRACT_REVOKED", "HALTED"})


@dataclass(frozen=True, slots=True)
class Reason:
    """One determining reason: the gate (1 to 5; 6 for what comes later), its code, and one line of text."""

    gate: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class AuthorityState:
    """What registry and store say at the moment of judgement.

    `contract_hash`: of the contract the flow is under, "" when it is revoked. `mission_hash`: of the registered mission; of
    the packet's own when there is no contract to compare. `held`: snapshot fields whose resource another decision has
    reserved. `tokens_spent`: by earlier attempts of the flow, whose proposals are `rejected`.
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
    """The judgement. `amounts_minor`: every number of the decision in minor units, the kernel's fills included."""

    outcome: Outcome
    reasons: tuple[Reason, ...]
    proposal: Proposal | None = None
    amounts_minor: tuple[tuple[str, int], ...] = ()

    @property
    def gate_reached(self) -> int:
        """The first gate that objected, 5 when none did."""
        return self.reasons[0].gate if self.reasons else 5

    @property
    def reason_code(self) -> str | None:
        return self.reasons[0].code if self.reasons else None

    @property
    def contended(self) -> bool:
        """Whether other decisions' reservations are all that stands in the way: then the agent is not at fault."""
        return bool(self.reasons) and all(reason.code == "RESOURCE_CONTENTION" for reason in self.reasons)

    @property
    def final(self) -> bool:
        return any(reason.code in FINAL_CODES for reason in self.reasons)


def judge(
    contract: Contract, packet: DecisionPacket, data: bytes, now: AuthorityState, decoding: Decoding, now_ms: int
) -> Verdict:
    """Return the verdict on proposal bytes, for any bytes, in time linear in at most 64 KiB of them."""
    try:
        return _judge(contract, packet, data, now, decoding, now_ms)
    except Exception as error:  # noqa: BLE001  a fault of ours must never let a proposal through
        why = f"the kernel could not judge this proposal: {type(error).__name__}"
        return Verdict("REJECTED", (Reason(1, "KERNEL_FAULT", why),))


def _judge(
    contract: Contract, packet: DecisionPacket, data: bytes, now: AuthorityState, decoding: Decoding, now_ms: int
) -> Verdict:
    """Ask all five gates, and return the verdict that follows."""
    parsed = parse_proposal(data)
    proposal = None if isinstance(parsed, str) else parsed
    if proposal is not None and data in now.rejected:
        again = Reason(1, "REPEATED_PROPOSAL", "the same proposal was rejected before")
        return Verdict("ESCALATED", (again,), proposal)
    # the first two gates share the objections of the envelope
    objections = [("SCHEMA_INVALID", parsed)] if isinstance(parsed, str) else packet.envelope.objections(parsed)
    reasons = (
        *schema_gate(objections),
        *authority_gate(contract, packet, now, decoding, objections),
        *state_gate(packet, proposal, now_ms),
        *resources_gate(contract, proposal, now.held),
        *mission_gate(packet, now),
    )
    return _outcome(contract, packet, proposal, reasons, decoding)


def schema_gate(objections: list[tuple[str, str]]) -> list[Reason]:
    """Gate 1: the bytes are one proposal, and of a form that the envelope knows."""
    return [Reason(1, code, message) for code, message in objections if code == "SCHEMA_INVALID"]


def authority_gate(
    contract: Contract,
    packet: DecisionPacket,
    now: AuthorityState,
    decoding: Decoding,
    objections: list[tuple[str, str]],
) -> list[Reason]:
    """Gate 2: the agent may act, within its budget, under this contract, and the proposal lies inside the envelope."""
    reasons: list[Reason] = []
    if not now.agent_active:
        reasons.append(Reason(2, "AGENT_SUSPENDED", f"agent `{packet.agent_id}` is not active"))
    if now.halted:
        reasons.append(Reason(2, "HALTED", "an operator has halted the system"))
    tokens, most = now.tokens_spent + decoding.tokens, contract.budget.tokens_max
    if decoding.tokens < 0 or tokens > most:
        reasons.append(Reason(2, "TOKEN_BUDGET_EXCEEDED", f"{tokens} tokens are not within the budget of {most}"))
    if not now.contract_hash == packet.contract_hash == contract.hash:
        why = "the flow is not under the contract of this packet, or that contract was revoked"
        reasons.append(Reason(2, "CONTRACT_REVOKED", why))
    reasons += [Reason(2, code, message) for code, message in objections if code != "SCHEMA_INVALID"]
    return reasons


def state_gate(packet: DecisionPacket, proposal: Proposal | None, now_ms: int) -> list[Reason]:
    """Gate 3: the proposal came in time and refers to the packet's snapshot."""
    reasons: list[Reason] = []
    if now_ms > packet.expires_at_ms:
        reasons.append(Reason(3, "PROPOSAL_EXPIRED", "the packet expired before the proposal came"))
    if proposal is not None and proposal.context_ref != packet.snapshot.id:
        reasons.append(Reason(3, "STALE_CONTEXT", "the proposal refers to another snapshot"))
    return reasons


def resources_gate(contract: Contract, proposal: Proposal | None, held: frozenset[str]) -> list[Reason]:
    """Gate 4: no other decision holds what the proposal draws on."""
    kind = contract.kinds.get(proposal.action) if proposal is not None and held else None
    if kind is None:
        return []
    taken = sorted(held.intersection(kind.draws))
    return [Reason(4, "RESOURCE_CONTENTION", f"`{path}` is reserved by another decision") for path in taken]


def mission_gate(packet: DecisionPacket, now: AuthorityState) -> list[Reason]:
    """Gate 5: the registered mission is the one that the agent was given."""
    if now.mission_hash == packet.mission_hash:
        return []
    return [Reason(5, "MISSION_DISSONANCE", "the packet was made for another mission")]


def _outcome(
    contract: Contract,
    packet: DecisionPacket,
    proposal: Proposal | None,
    reasons: tuple[Reason, ...],
    decoding: Decoding,
) -> Verdict:
    """Return the verdict that follows from the reasons of all five gates."""
    permitted = packet.envelope.kind(proposal.action) if proposal is not None else None
    escalates = proposal is not None and proposal.action == ESCALATE
    if reasons and escalates and all(reason.code in HUMAN_ANYWAY for reason in reasons):
        return Verdict("ESCALATED", reasons, proposal)
    if reasons or proposal is None or permitted is None:
        return Verdict("REJECTED", reasons or (Reason(2, "RBAC_DENIED", "not permitted now"),), proposal)
    escalation = _escalation(contract, packet, proposal, decoding)
    outcome: Outcome = "ACCEPTED" if escalation is None else "ESCALATED"
    return Verdict(outcome, (escalation,) if escalation else (), proposal, amounts_minor(proposal, permitted))


def amounts_minor(proposal: Proposal, permitted: KindBound) -> tuple[tuple[str, int], ...]:
    """Return every number of an accepted proposal in minor units: first those it states, then the kernel's fills."""
    stated = ((n, parse_literal(t, b.scale)) for (n, t), (_, b) in zip(proposal.params, permitted.params, strict=True))
    return tuple((n, v) for n, v in stated if v is not None) + tuple((n, v) for n, v, _ in permitted.fills)


def _escalation(contract: Contract, packet: DecisionPacket, proposal: Proposal, decoding: Decoding) -> Reason | None:
    """Return why a human must decide a proposal that no gate objected to; None: the agent may decide it (DIR 3.9)."""
    if proposal.action == ESCALATE:
        if packet.notes:
            return Reason(5, "ESCALATED_BY_RULE", "; ".join(packet.notes))
        why = WHY_ESCALATED.get(decoding.escalation)
        return Reason(5, *((decoding.escalation, why) if why else HANDED_OVER))
    if proposal.action in contract.escalation.always:
        return Reason(5, "APPROVAL_REQUIRED", f"`{proposal.action}` always needs a human")
    minimum = contract.escalation.confidence_min_pct
    measured = decoding.confidence
    # Written so that NaN, and anything else that is no probability, fails every minimum.
    if minimum and (measured is None or not minimum / 100 <= measured <= PROBABILITY_MAX):
        unmeasured = f"this engine measures no probability, but the contract requires {minimum} %"
        less = f"the chosen action is less likely than {minimum} %"
        return Reason(5, "CONFIDENCE_BELOW_MINIMUM", unmeasured if measured is None else less)
    return None
