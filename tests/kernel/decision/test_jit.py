"""Just before execution: is the world still the one the decision was made for?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import Contract
from sds.kernel.decision import jit
from sds.kernel.decision.jit import JitReport
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.decision.safeguards import EnvelopeInputs, LiveState, envelope_in_force, safeguards_of
from sds.kernel.envelope.envelope import DecisionEnvelope, bound, envelope_of
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.kernel.envelope.state import Fields, Value
from tests.kernel import world

DRIFT = """drift:
  age_ms_max: 1000
  fields:
    account.left: {pct: 10}
    claim.minutes: {abs: 5}
    account.slots: {abs: 5}
    claim.filed_at: strict
spend:"""
TILL = world.contract(("spend:", DRIFT))
RULES = Rules(TILL)
PACKET = world.packet(TILL, world.situation(spend_left=10_000))


def derive(now: EnvelopeInputs) -> DecisionEnvelope:
    return envelope_in_force(RULES.envelope(now.fields), now, safeguards_of(TILL))


def never(now: EnvelopeInputs) -> DecisionEnvelope:
    raise AssertionError("nothing has changed, so nothing is derived again")


def proposed(action: str = "PAY", reason: str = "OWED", **params: str) -> Proposal:
    found = parse_proposal(world.said(PACKET, action, reason, **params))
    assert isinstance(found, Proposal)
    return found


PAID = proposed(amount="40.00")


def check(
    live: EnvelopeInputs,
    proposal: Proposal = PAID,
    *,
    after_ms: int = 10,
    contract_hash: str = TILL.hash,
    derive: object = derive,
    packet: DecisionPacket = PACKET,
    contract: Contract = TILL,
) -> JitReport:
    return jit.check(
        contract,
        jit.tolerances(contract),
        packet,
        proposal,
        LiveState(live, "v2", {}, contract_hash),
        derive,  # type: ignore[arg-type]  # a test may pass one that must not be called
        world.NOW_MS + after_ms,
    )


def live(spend_left: int | None = 10_000, **changes: Value | None) -> EnvelopeInputs:
    return world.situation(world.fields(**changes), spend_left=spend_left)


def test_a_world_that_has_not_moved_passes_and_says_what_was_looked_at():
    assert JitReport(True, 10, observed=LiveState(live(), "v2", {}, TILL.hash)) == check(live())


def test_a_packet_with_a_widened_envelope_does_not_get_past_the_live_one():
    wide = bound(1, 10**9, scale=2)
    assert wide is not None
    kinds = [replace(k, params=(("amount", wide),)) if k.kind == "PAY" else k for k in PACKET.envelope.kinds]
    forged = replace(PACKET, envelope=envelope_of(kinds))
    report = check(live(), proposed(amount="9999999.00"), packet=forged)
    assert (False, ("`amount` is outside its bounds",)) == (report.ok, report.objections)


@pytest.mark.parametrize(
    ("state", "moved"),
    [
        ({}, ()),
        ({"account_left": 5_500}, ()),
        ({"account_left": 4_500}, ()),
        ({"account_left": 5_501}, ("account.left",)),
        ({"account_left": 4_499}, ("account.left",)),
        ({"claim_minutes": 65}, ()),
        ({"claim_minutes": 66}, ("claim.minutes",)),
        ({"claim_minutes": 54}, ("claim.minutes",)),
        ({"claim_filed_at": 1_600_000_001}, ("claim.filed_at",)),
        ({"claim_due": False}, ("claim.due",)),
        ({"claim_size": "small"}, ("claim.size",)),
        ({"account_owner": "ada"}, ("account.owner",)),
        ({"account_owner": None}, ("account.owner",)),
        ({"account_left": None, "claim_due": None}, ("claim.due", "account.left")),
        ({"claim_minutes": "60"}, ("claim.minutes",)),
        ({"claim_due": 1}, ("claim.due",)),
        ({"account_slots": True}, ("account.slots",)),
    ],
    ids=str,
)
def test_a_field_may_move_as_far_as_the_contract_says(state: dict[str, Value | None], moved: tuple[str, ...]):
    assert moved == jit.drift(jit.tolerances(TILL), world.FIELDS, world.fields(**state))


def test_a_value_that_appears_has_moved():
    assert ("account.owner",) == jit.drift(jit.tolerances(TILL), world.fields(account_owner=None), world.FIELDS)


@pytest.mark.parametrize(
    ("before", "after", "rule", "moves"),
    [
        (0, 1, "pct: 100", True),
        (0, 0, "pct: 0", False),
        (-100, -110, "pct: 10", False),
        (-100, -111, "pct: 10", True),
        (-5, 5, "pct: 100", True),
        (3, 4, "pct: 33", True),
        (3, 4, "pct: 34", False),
        (10, -10, "abs: 20", False),
        (10**15, 10**15 - 1, "pct: 0", True),
        (10**15, 9 * 10**14, "pct: 10", False),
        (1, 2, "abs: 0", True),
    ],
)
def test_tolerances_are_exact_integers(before: int, after: int, rule: str, moves: bool):
    contract = world.contract(("spend:", f"drift: {{fields: {{claim.minutes: {{{rule}}}}}}}\nspend:"))
    then, now = world.fields(claim_minutes=before), world.fields(claim_minutes=after)
    assert moves == bool(jit.drift(jit.tolerances(contract), then, now))


def test_a_field_that_is_not_named_may_not_move_at_all():
    for path, value in world.FIELDS.items():
        other = (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int) else value + "x"
        moved = {**world.FIELDS, path: other}
        assert (path,) == jit.drift(jit.tolerances(world.contract()), world.FIELDS, moved)


@pytest.mark.parametrize(("after_ms", "ok"), [(0, True), (1000, True), (1001, False), (-1, False), (10**9, False)])
def test_a_snapshot_may_be_neither_too_old_nor_from_the_future(after_ms: int, ok: bool):
    report = check(live(), after_ms=after_ms)
    assert (ok, after_ms, () if ok else ("snapshot age",)) == (report.ok, report.age_ms, report.drift)
    assert (None if ok else "STATE_DRIFT_DETECTED") == report.code


def test_what_moved_is_named_and_nothing_goes_out():
    report = check(live(account_owner="Bob", account_left=1))
    assert (False, "STATE_DRIFT_DETECTED", None) == (report.ok, report.code, report.observed)
    assert ("account.owner", "account.left") == report.drift
    assert ("`amount` is outside its bounds",) == report.objections


def test_a_move_within_tolerance_is_fine_as_long_as_the_envelope_still_holds_the_decision():
    report = check(live(account_left=4_500))
    assert (True, LiveState(live(account_left=4_500), "v2", {}, TILL.hash)) == (report.ok, report.observed)
    tight = check(live(account_left=4_500), proposed(amount="45.01"))
    assert (False, (), ("`amount` is outside its bounds",)) == (tight.ok, tight.drift, tight.objections)


def test_a_kind_that_is_no_longer_permitted_is_refused():
    report = check(live(account_slots=0), proposed("GRANT", "GRANTED"))
    assert (False, ("`GRANT` is not permitted now",)) == (report.ok, report.objections)


def test_a_value_that_the_rules_fix_must_still_be_the_same():
    grant = proposed("GRANT", "GRANTED")
    assert check(live(account_slots=1), grant).ok
    report = check(live(claim_minutes=61), grant)
    assert (False, (), ("a value the rules fix has changed",)) == (report.ok, report.drift, report.objections)


@pytest.mark.parametrize(("left", "ok"), [(10_000, True), (9_999, True), (6_000, True), (4_000, False), (None, True)])
def test_the_envelope_is_derived_again_when_a_limit_has_come_nearer(left: int | None, ok: bool):
    assert ok == check(live(left)).ok


def test_the_envelope_is_derived_again_when_the_contract_is_no_longer_in_effect():
    gone = world.situation(spend_left=10_000, in_effect=False)
    assert (False, ("`PAY` is not permitted now",)) == (check(gone).ok, check(gone).objections)


@pytest.mark.parametrize(
    ("trouble", "contract_hash", "code"),
    [
        ({"agent_active": False}, TILL.hash, "AGENT_SUSPENDED"),
        ({"halted": True}, TILL.hash, "HALTED"),
        ({}, "another", "CONTRACT_REVOKED"),
        ({}, "", "CONTRACT_REVOKED"),
    ],
)
def test_authority_withdrawn_since_is_told_before_anything_else(
    trouble: dict[str, bool], contract_hash: str, code: str
):
    now = world.situation(spend_left=10_000, **trouble)
    report = check(now, contract_hash=contract_hash, after_ms=10**9, derive=never)
    assert (False, code, None) == (report.ok, report.code, report.observed)


def test_one_is_not_the_same_as_true_even_where_nothing_else_has_changed():
    assert live() == live(claim_due=1)  # as Python sees it
    assert ("claim.due",) == check(live(claim_due=1)).drift


def test_a_derivation_that_fails_does_not_let_the_decision_through():
    with pytest.raises(AssertionError):
        check(live(account_left=4_999), derive=never)


STATES = st.builds(
    world.fields,
    claim_due=st.sampled_from([True, True, True, False, 1]),
    claim_minutes=st.sampled_from([None, 0, 54, 55, 60, 60, 60, 65, 66]),
    claim_size=st.sampled_from(["large", "large", "small", "vast"]),
    account_owner=st.sampled_from(["Ada", "Ada", "Bob"]),
    account_left=st.sampled_from([None, 0, 4_499, 4_500, 5_000, 5_000, 5_500, 10**16]),
    account_slots=st.sampled_from([0, 1, 2, 2, 2, 7, 8]),
)
PROPOSALS = st.sampled_from(
    [
        PAID,
        proposed(amount="50.00"),
        proposed("GRANT", "GRANTED"),
        proposed("TALK", "UNCLEAR", days="1", minutes="60"),
        proposed("DENY", "NOT_OWED"),
        proposed("ESCALATE", "HUMAN_REVIEW"),
    ]
)


@given(STATES, PROPOSALS, st.sampled_from([None, 0, 4_000, 6_000, 10_000]))
def test_what_passes_is_inside_the_live_envelope_and_nothing_moved_too_far(
    state: Fields, proposal: Proposal, left: int | None
):
    now = world.situation(state, spend_left=left)
    report, envelope = check(now, proposal), derive(now)
    then, kind = PACKET.envelope.kind(proposal.action), envelope.kind(proposal.action)
    still = not envelope.objections(proposal) and kind is not None and then is not None and kind.fills == then.fills
    calm = not jit.drift(jit.tolerances(TILL), world.FIELDS, state)
    assert (still and calm) == report.ok
    assert report.ok == (report.code is None) == (report.observed is not None)
