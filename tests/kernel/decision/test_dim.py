"""Five gates between a claim and an order: what each refuses, that all are asked, and what goes to a human."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sds.kernel.contract.schema import Contract
from sds.kernel.decision import dim
from sds.kernel.decision.dim import AuthorityState, Verdict, judge
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.envelope import DecisionEnvelope
from tests.kernel import world

TILL = world.contract()
PACKET = world.packet(TILL)
SURE = Decoding("m", confidence=1.0, tokens=10)
PAY = world.said(PACKET, "PAY", "OWED", amount="50.00")


def verdict(
    data: bytes = PAY,
    decoding: Decoding = SURE,
    *,
    contract: Contract = TILL,
    packet: DecisionPacket = PACKET,
    now_ms: int = world.NOW_MS,
    **changes: object,
) -> Verdict:
    return judge(contract, packet, data, world.standing(packet, **changes), decoding, now_ms)


def reasons(found: Verdict) -> list[tuple[int, str, str]]:
    return [(reason.gate, reason.code, reason.message) for reason in found.reasons]


def test_a_decision_of_the_envelope_is_accepted_with_its_numbers():
    found = verdict()
    assert ("ACCEPTED", (), 5, (("amount", 5000),)) == (
        found.outcome,
        found.reasons,
        found.gate_reached,
        found.amounts_minor,
    )


def test_numbers_that_the_rules_fix_are_filled_in_by_the_kernel():
    found = verdict(world.said(PACKET, "GRANT", "GRANTED"))
    assert ("ACCEPTED", (("amount", 6000),)) == (found.outcome, found.amounts_minor)


def test_numbers_keep_their_own_scale():
    found = verdict(world.said(PACKET, "TALK", "UNCLEAR", days="2", minutes="60"))
    assert ("ACCEPTED", (("days", 2), ("minutes", 60))) == (found.outcome, found.amounts_minor)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", (1, "SCHEMA_INVALID", 'does not begin with {"action":"<KIND>" or a rationale before it')),
        (PAY.replace(b'"amount":50.00', b""), (1, "SCHEMA_INVALID", "byte 26: expected a parameter")),
        (
            PAY.replace(b'"params":{"amount":50.00},', b""),
            (1, "SCHEMA_INVALID", "`PAY` does not take these parameters"),
        ),
        (PAY[:-1], (1, "SCHEMA_INVALID", 'byte 57: expected ,"context_ref":"<64 hex digits>"}')),
        (PAY.replace(b"50.00", b"50.0"), (1, "SCHEMA_INVALID", "`amount` is not a number with 2 decimals")),
        (PAY.replace(b"50.00", b"-0.00"), (1, "SCHEMA_INVALID", "`amount` is not a number with 2 decimals")),
        (PAY.replace(b"50.00", b"050.00"), (1, "SCHEMA_INVALID", "`amount` is not a number with 2 decimals")),
        (PAY.replace(b"OWED", b"GIFT"), (1, "SCHEMA_INVALID", "`GIFT` is not a reason of `PAY`")),
        (PAY.replace(b'"amount"', b'"sum"'), (1, "SCHEMA_INVALID", "`PAY` does not take these parameters")),
        (PAY.replace(b"50.00", b"50.01"), (2, "RBAC_DENIED", "`amount` is outside its bounds")),
        (PAY.replace(b"50.00", b"0.00"), (2, "RBAC_DENIED", "`amount` is outside its bounds")),
        (PAY.replace(b"PAY", b"STEAL"), (2, "RBAC_DENIED", "`STEAL` is not permitted now")),
        (
            PAY.replace(PACKET.snapshot.id.encode(), b"0" * 64),
            (3, "STALE_CONTEXT", "the proposal refers to another snapshot"),
        ),
    ],
)
def test_a_claim_that_is_not_of_the_envelope_is_rejected_at_its_gate(data: bytes, expected: tuple[int, str, str]):
    found = verdict(data)
    assert ("REJECTED", [expected], expected[0], ()) == (
        found.outcome,
        reasons(found),
        found.gate_reached,
        found.amounts_minor,
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"agent_active": False}, (2, "AGENT_SUSPENDED", "agent `till-agent` is not active")),
        ({"halted": True}, (2, "HALTED", "an operator has halted the system")),
        (
            {"contract_hash": "other"},
            (2, "CONTRACT_REVOKED", "the flow is not under the contract of this packet, or that contract was revoked"),
        ),
        ({"tokens_spent": 4087}, (2, "TOKEN_BUDGET_EXCEEDED", "4097 tokens are not within the budget of 4096")),
        ({"now_ms": PACKET.expires_at_ms + 1}, (3, "PROPOSAL_EXPIRED", "the packet expired before the proposal came")),
        (
            {"held": frozenset({"account.left"})},
            (4, "RESOURCE_CONTENTION", "`account.left` is reserved by another decision"),
        ),
        ({"mission_hash": "other"}, (5, "MISSION_DISSONANCE", "the packet was made for another mission")),
    ],
)
def test_what_stands_against_the_agent_rejects_a_flawless_claim(
    changes: dict[str, object], expected: tuple[int, str, str]
):
    found = verdict(**changes)  # type: ignore[arg-type]
    assert ("REJECTED", [expected], expected[0]) == (found.outcome, reasons(found), found.gate_reached)
    assert (expected[1] != "RESOURCE_CONTENTION") == found.final
    assert (expected[1] == "RESOURCE_CONTENTION") == found.contended


@pytest.mark.parametrize(
    "changes",
    [
        {"now_ms": PACKET.expires_at_ms},
        {"tokens_spent": 4086},
        {"held": frozenset({"account.slots"})},
    ],
    ids=["last millisecond", "last token", "another resource"],
)
def test_what_is_just_within_the_limits_is_accepted(changes: dict[str, object]):
    assert "ACCEPTED" == verdict(**changes).outcome  # type: ignore[arg-type]


def test_every_gate_is_asked_and_every_reason_is_told():
    data = PAY.replace(b"50.00", b"50.01").replace(b"OWED", b"GIFT")
    data = data.replace(PACKET.snapshot.id.encode(), b"0" * 64)
    found = verdict(
        data,
        replace(SURE, tokens=5000),
        now_ms=PACKET.expires_at_ms + 1,
        agent_active=False,
        halted=True,
        contract_hash="other",
        mission_hash="other",
        held=frozenset({"account.left"}),
    )
    expected = [
        (1, "SCHEMA_INVALID"),
        (2, "AGENT_SUSPENDED"),
        (2, "HALTED"),
        (2, "TOKEN_BUDGET_EXCEEDED"),
        (2, "CONTRACT_REVOKED"),
        (2, "RBAC_DENIED"),
        (3, "PROPOSAL_EXPIRED"),
        (3, "STALE_CONTEXT"),
        (4, "RESOURCE_CONTENTION"),
        (5, "MISSION_DISSONANCE"),
    ]
    assert expected == [(reason.gate, reason.code) for reason in found.reasons]
    assert ("REJECTED", 1, "SCHEMA_INVALID", False) == (
        found.outcome,
        found.gate_reached,
        found.reason_code,
        found.contended,
    )


def test_bytes_that_cannot_be_read_are_told_with_everything_else():
    found = verdict(b"{}", halted=True, mission_hash="other")
    assert ["SCHEMA_INVALID", "HALTED", "MISSION_DISSONANCE"] == [reason.code for reason in found.reasons]


def test_every_fault_of_a_claim_is_told():
    found = verdict(world.said(PACKET, "TALK", "GIFT", days="9", minutes="7"))
    messages = ["`GIFT` is not a reason of `TALK`", "`days` is outside its bounds", "`minutes` is outside its bounds"]
    assert messages == [reason.message for reason in found.reasons]


@pytest.mark.parametrize(
    "data",
    [
        world.said(PACKET, "GRANT", "GRANTED", amount="60.00"),
        world.said(PACKET, "GRANT", "GRANTED", amount="6000.00"),
        world.said(PACKET, "PAY", "OWED", amount="50.00", total="50.00"),
        world.said(PACKET, "PAY", "OWED", total="50.00", amount="50.00"),
        world.said(PACKET, "DENY", "NOT_OWED", amount="0.00"),
        world.said(PACKET, "ESCALATE", "HUMAN_REVIEW", amount="0.00"),
    ],
)
def test_a_number_that_is_not_the_agents_to_say_is_refused_even_when_it_is_right(data: bytes):
    assert ("REJECTED", "SCHEMA_INVALID") == (verdict(data).outcome, verdict(data).reason_code)


def test_a_packet_of_an_older_contract_is_refused_even_when_the_registry_has_not_noticed():
    newer = world.contract(("version: 1.0.0", "version: 1.0.1"))
    assert "CONTRACT_REVOKED" == verdict(contract=newer).reason_code


def test_tokens_cannot_be_handed_back():
    assert "TOKEN_BUDGET_EXCEEDED" == verdict(decoding=replace(SURE, tokens=-1)).reason_code


CAREFUL = world.contract(("spend:", "escalation: {confidence_min_pct: 29, always: [GRANT]}\nspend:"))
CAREFUL_PACKET = world.packet(CAREFUL)


def careful(action: str, reason: str, confidence: float | None, /, **params: str) -> tuple[str, str | None]:
    data = world.said(CAREFUL_PACKET, action, reason, **params)
    found = verdict(data, Decoding("m", confidence), contract=CAREFUL, packet=CAREFUL_PACKET)
    return found.outcome, found.reason_code


LOW = ("ESCALATED", "CONFIDENCE_BELOW_MINIMUM")


def test_an_engine_that_measures_no_probability_is_below_every_minimum_and_the_reason_says_why() -> None:
    data = world.said(CAREFUL_PACKET, "DENY", "NOT_OWED")
    found = verdict(data, Decoding("m", None), contract=CAREFUL, packet=CAREFUL_PACKET)
    assert "ESCALATED" == found.outcome
    assert ["this engine measures no probability, but the contract requires 29 %"] == [r.message for r in found.reasons]


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [
        (1.0, ("ACCEPTED", None)),
        (1.0000000000000002, ("ACCEPTED", None)),
        (0.29, ("ACCEPTED", None)),
        (0.28999, LOW),
        (0.0, LOW),
        (-1.0, LOW),
        (None, LOW),
        (float("nan"), LOW),
        (float("inf"), LOW),
        (29.0, LOW),
    ],
)
def test_a_decision_less_likely_than_the_minimum_goes_to_a_human(
    confidence: float | None, expected: tuple[str, str | None]
):
    assert expected == careful("PAY", "OWED", confidence, amount="1.00")
    assert expected == careful("DENY", "NOT_OWED", confidence)


def test_without_a_minimum_the_confidence_is_not_asked():
    assert "ACCEPTED" == verdict(decoding=Decoding("m", None)).outcome
    assert "ACCEPTED" == verdict(decoding=Decoding("m", 0.0)).outcome


def test_a_kind_that_always_needs_a_human_gets_one():
    assert ("ESCALATED", "APPROVAL_REQUIRED") == careful("GRANT", "GRANTED", 1.0)


def test_the_agents_own_escalation_needs_no_confidence():
    assert ("ESCALATED", "ESCALATED_BY_AGENT") == careful("ESCALATE", "HUMAN_REVIEW", None)


def test_an_escalation_that_was_the_only_way_says_why_it_was():
    noted = world.packet(TILL, world.situation({}), notes=("`account.left` is missing", "`claim.due` is missing"))
    found = verdict(world.said(noted, "ESCALATE", "HUMAN_REVIEW"), packet=noted)
    expected = (5, "ESCALATED_BY_RULE", "`account.left` is missing; `claim.due` is missing")
    assert ("ESCALATED", [expected]) == (found.outcome, reasons(found))


def test_an_escalation_keeps_the_numbers_for_the_human():
    data = world.said(CAREFUL_PACKET, "GRANT", "GRANTED")
    found = verdict(data, contract=CAREFUL, packet=CAREFUL_PACKET)
    assert ("ESCALATED", (("amount", 6000),)) == (found.outcome, found.amounts_minor)


def test_what_is_to_be_rejected_is_not_escalated():
    data = world.said(CAREFUL_PACKET, "GRANT", "GIFT")
    assert "REJECTED" == verdict(data, Decoding("m", 0.0), contract=CAREFUL, packet=CAREFUL_PACKET).outcome
    assert "REJECTED" == verdict(world.said(PACKET, "DENY", "NOT_OWED"), halted=True).outcome


@pytest.mark.parametrize(
    ("standing", "code"), [({"halted": True}, "HALTED"), ({"agent_active": False}, "AGENT_SUSPENDED")]
)
def test_an_agent_that_may_not_act_may_still_hand_the_case_to_a_human(standing: dict[str, bool], code: str) -> None:
    found = verdict(world.said(PACKET, "ESCALATE", "HUMAN_REVIEW"), **standing)
    assert ("ESCALATED", code) == (found.outcome, found.reason_code)


PIECES = [
    (dim, "parse_proposal"),
    (dim, "authority_gate"),
    (dim, "_escalation"),
    (dim, "parse_literal"),
    (DecisionEnvelope, "objections"),
    (DecisionEnvelope, "kind"),
]


@pytest.mark.parametrize("fault", [ValueError, KeyError, RecursionError, MemoryError, AssertionError])
@pytest.mark.parametrize(("owner", "piece"), PIECES, ids=[piece for _, piece in PIECES])
def test_a_fault_of_the_kernel_never_lets_a_claim_through(
    monkeypatch: pytest.MonkeyPatch, owner: object, piece: str, fault: type[Exception]
):
    def broken(*_: object) -> None:
        raise fault

    monkeypatch.setattr(owner, piece, broken)
    found = verdict()
    expected = [(1, "KERNEL_FAULT", f"the kernel could not judge this proposal: {fault.__name__}")]
    assert ("REJECTED", expected, ()) == (found.outcome, reasons(found), found.amounts_minor)


@pytest.mark.parametrize("stranger", [None, "text", 7, [PAY], {"action": "PAY"}])
def test_what_is_not_bytes_is_rejected(stranger: object):
    assert "REJECTED" == verdict(stranger).outcome  # type: ignore[arg-type]


def test_a_standing_that_nobody_filled_in_is_rejected():
    nobody = AuthorityState(agent_active=False, halted=False, contract_hash="", mission_hash="")
    assert "REJECTED" == judge(TILL, PACKET, PAY, nobody, SURE, world.NOW_MS).outcome


@pytest.mark.parametrize("standing", [{}, {"halted": True}, {"agent_active": False}, {"mission_hash": "0" * 64}])
def test_a_proposal_that_was_rejected_before_is_not_judged_again_but_goes_to_a_human(standing: dict[str, object]):
    found = verdict(rejected=frozenset({PAY}), **standing)
    assert ("ESCALATED", "REPEATED_PROPOSAL", ()) == (found.outcome, found.reason_code, found.amounts_minor)


def test_another_proposal_than_the_rejected_is_judged():
    assert "ACCEPTED" == verdict(rejected=frozenset({PAY + b" ", b""})).outcome
