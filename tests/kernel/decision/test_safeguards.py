"""What each safeguard takes away."""

from __future__ import annotations

import pytest

from sds.kernel.contract.compiler import Rules
from sds.kernel.decision.safeguards import EnvelopeInputs, envelope_in_force, safeguards_of, standing
from sds.kernel.envelope.envelope import ESCALATE_ONLY, Bound, DecisionEnvelope
from tests.kernel import world

TILL = world.contract()


def in_force(now: EnvelopeInputs, *edits: tuple[str, str]) -> DecisionEnvelope:
    contract = world.contract(*edits)
    return envelope_in_force(Rules(contract).envelope(now.fields), now, safeguards_of(contract))


def amount(envelope: DecisionEnvelope) -> Bound | None:
    pay = envelope.kind("PAY")
    return dict(pay.params)["amount"] if pay else None


def test_a_calm_situation_takes_nothing_away():
    assert ("DENY", "ESCALATE", "GRANT", "PAY", "TALK") == in_force(world.situation()).names
    assert Rules(TILL).envelope(world.FIELDS) == in_force(world.situation())


@pytest.mark.parametrize(
    "trouble", [{"agent_active": False}, {"in_effect": False}, {"halted": True}], ids=["suspended", "expired", "halted"]
)
def test_without_standing_only_the_human_is_left(trouble: dict[str, bool]):
    now = world.situation(**trouble)
    assert ESCALATE_ONLY == standing(Rules(TILL).envelope(now.fields), now) == in_force(now)


@pytest.mark.parametrize(
    ("left", "expected"), [(None, 5000), (10**9, 5000), (6000, 5000)], ids=["no limit", "far", "exactly the grant"]
)
def test_a_spend_limit_that_is_far_away_takes_nothing(left: int | None, expected: int):
    assert Bound(1, expected, 1, 0, 2) == amount(in_force(world.situation(spend_left=left)))


def test_a_spend_limit_narrows_what_may_be_paid():
    small = world.fields(claim_size="small")  # no GRANT, whose fixed amount is over the limit
    assert Bound(1, 700, 1, 0, 2) == amount(in_force(world.situation(small, spend_left=700)))
    assert Bound(1, 1, 1, 0, 2) == amount(in_force(world.situation(small, spend_left=1)))


@pytest.mark.parametrize(
    ("state", "left"), [({"claim_size": "small"}, 0), ({}, 5999)], ids=["nothing", "not the grant"]
)
def test_a_limit_that_leaves_a_kind_nothing_escalates_instead_of_denying(state: dict[str, str], left: int):
    assert ESCALATE_ONLY == in_force(world.situation(world.fields(**state), spend_left=left))


@pytest.mark.parametrize(("slots", "there"), [(2, True), (1, True), (0, False), (-1, False)])
def test_a_kind_that_draws_more_than_there_is_goes(slots: int, there: bool):
    envelope = in_force(world.situation(world.fields(account_slots=slots)))
    assert there == ("GRANT" in envelope.names)
    assert "DENY" in envelope.names


def test_a_parameter_is_never_wider_than_the_field_it_draws_on():
    generous = ("hi: account.left", "hi: 999999")
    assert Bound(1, 5000, 1, 0, 2) == amount(in_force(world.situation(), generous))
    assert amount(in_force(world.situation(world.fields(account_left=0)), generous)) is None


def test_nothing_below_zero_is_ever_drawn_or_spent():
    careless = ("lo: 1, hi: account.left", "lo: -500, hi: account.left")
    assert Bound(0, 5000, 1, 0, 2) == amount(in_force(world.situation(), careless))
    undrawn = ("    draws: {account.left: amount}\n", "")
    assert Bound(0, 5000, 1, 0, 2) == amount(in_force(world.situation(), careless, undrawn))
    assert ESCALATE_ONLY == in_force(world.situation(world.fields(claim_minutes=-60)))
