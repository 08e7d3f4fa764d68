"""A small gate with every kind of rule in it, and the pieces that a pure test of the kernel needs."""

from __future__ import annotations

from dataclasses import replace

from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import Contract, parse_contract
from sds.kernel.decision.dim import AuthorityState
from sds.kernel.decision.packet import DecisionPacket, compile_packet
from sds.kernel.decision.safeguards import EnvelopeInputs, LiveState, envelope_in_force, safeguards_of
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.envelope.state import Fields, Value

NOW_MS = 1_700_000_000_000
CONTRACT = """\
gate: till
agent_id: till-agent
version: 1.0.0
owner: till@shop.example
effective_from: 2020-01-01
mission: Decide who is paid.
authority: [PAY, GRANT, TALK, DENY]
event: {id: event_id, key: account_id, evidence: letter}
snapshot:
  claim.due: bool
  claim.minutes: int
  claim.size: enum(small, large)
  claim.filed_at: timestamp
  account.owner: string
  account.left: fixed(2)
  account.slots: int
when: claim.due
kinds:
  PAY:
    params:
      amount: {lo: 1, hi: account.left, scale: 2}
    draws: {account.left: amount}
    spends: amount
    reasons: [OWED, LATE]
  GRANT:
    when: claim.size == "large"
    fills:
      amount: {value: "claim.minutes * 100", scale: 2}
    draws: {account.slots: 1}
    spends: amount
    reasons: [GRANTED]
  TALK:
    params:
      days: {lo: 1, hi: 3}
      minutes: {lo: 5, hi: claim.minutes, step: 5}
    reasons: [UNCLEAR]
  DENY:
    reasons: [NOT_OWED]
spend:
  - {name: day, window: day, max_minor: 100000}
"""
FIELDS: dict[str, Value] = {
    "claim.due": True,
    "claim.minutes": 60,
    "claim.size": "large",
    "claim.filed_at": 1_600_000_000,
    "account.owner": "Ada",
    "account.left": 5_000,
    "account.slots": 2,
}


def contract(*edits: tuple[str, str]) -> Contract:
    """Return the till's contract with each (old, new) text replaced once."""
    return parse_contract(edited(*edits))


def edited(*edits: tuple[str, str]) -> str:
    text = CONTRACT
    for old, new in edits:
        assert old in text, f"`{old}` is not in the contract"
        text = text.replace(old, new, 1)
    return text


def fields(**changes: Value | None) -> dict[str, Value]:
    """Return the till's fields; `claim_due=False` sets `claim.due`, None leaves a field out."""
    named = {name.replace("_", ".", 1): value for name, value in changes.items()}
    return {path: value for path, value in {**FIELDS, **named}.items() if value is not None}


def situation(state: Fields | None = None, **changes: object) -> EnvelopeInputs:
    calm = EnvelopeInputs(
        FIELDS if state is None else state,
        agent_active=True,
        in_effect=True,
        halted=False,
        spend_left=None,
        context_whole=True,
    )
    return replace(calm, **changes)  # type: ignore[arg-type]  # tests name the fields they change


def packet(
    contract: Contract, now: EnvelopeInputs | None = None, *, notes: tuple[str, ...] = (), evidence: str = ""
) -> DecisionPacket:
    rules, now = Rules(contract), now or situation()
    return compile_packet(
        contract,
        rules,
        dfid="d-1",
        event_id="e-1",
        key="k-1",
        evidence=evidence,
        live=LiveState(now, "1", {}, contract.hash, notes),
        envelope=envelope_in_force(rules.envelope(now.fields), now, safeguards_of(contract)),
        now_ms=NOW_MS,
    )


def standing(packet: DecisionPacket, **changes: object) -> AuthorityState:
    calm = AuthorityState(
        agent_active=True, halted=False, contract_hash=packet.contract_hash, mission_hash=packet.mission_hash
    )
    return replace(calm, **changes)  # type: ignore[arg-type]  # tests name the fields they change


def said(packet: DecisionPacket, action: str, reason: str, /, **params: str) -> bytes:
    """Return a proposal for this packet, as a model would write it."""
    return write_proposal(Proposal(action, tuple(params.items()), reason, packet.snapshot.id))
