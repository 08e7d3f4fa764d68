"""What the fraud contract permits, at each of its boundaries."""

from __future__ import annotations

import pytest

from sds.gates.fraud.gate import load_fraud_contract
from sds.gates.fraud.world.bank import FEATURES
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.policy import policy_rules
from sds.kernel.decision.safeguards import EnvelopeInputs, envelope_in_force, safeguards_of
from sds.kernel.envelope.envelope import ESCALATE_ONLY, Bound, DecisionEnvelope
from sds.kernel.envelope.state import Value
from tests.gates.fraud.one_payment import ORDINARY

CONTRACT = load_fraud_contract()
RULES = Rules(CONTRACT)
LIMIT = 50_000
ALWAYS = {"BLOCK", "ESCALATE"}
WHOLE = {**ORDINARY, "payment.open_minor": 2_500, "payment.held": False}


def envelope(**changes: Value) -> DecisionEnvelope:
    fields = WHOLE | {name.replace("_", ".", 1): value for name, value in changes.items()}
    now = EnvelopeInputs(fields, agent_active=True, in_effect=True, halted=False, spend_left=None, context_whole=True)
    return envelope_in_force(RULES.envelope(fields), now, safeguards_of(CONTRACT))


def kinds(**changes: Value) -> set[str]:
    return set(envelope(**changes).names)


def test_an_ordinary_payment_may_pass_be_held_or_be_blocked() -> None:
    assert ALWAYS | {"ALLOW", "CHALLENGE"} == kinds()


@pytest.mark.parametrize("status", ["compromised", "closed"])
def test_an_account_that_is_not_active_is_neither_allowed_nor_challenged(status: str) -> None:
    assert ALWAYS == kinds(account_status=status)


@pytest.mark.parametrize(("amount", "more"), [(LIMIT, {"ALLOW", "CHALLENGE"}), (LIMIT + 1, set())])
def test_nothing_passes_or_is_held_above_the_limit(amount: int, more: set[str]) -> None:
    assert ALWAYS | more == kinds(payment_amount_minor=amount, payment_open_minor=amount)


@pytest.mark.parametrize(("count", "more"), [(9, {"ALLOW", "CHALLENGE"}), (10, {"CHALLENGE"}), (500, {"CHALLENGE"})])
def test_the_tenth_payment_of_a_day_is_the_last_that_may_be_allowed(count: int, more: set[str]) -> None:
    assert ALWAYS | more == kinds(customer_count_1d=count)


@pytest.mark.parametrize(("paid", "more"), [(97_500, {"ALLOW", "CHALLENGE"}), (97_501, {"CHALLENGE"})])
def test_a_day_may_come_to_twice_the_limit(paid: int, more: set[str]) -> None:
    assert ALWAYS | more == kinds(customer_sum_1d_minor=paid)


@pytest.mark.parametrize("over", [{"payment_held": True}, {"payment_open_minor": 0}])
def test_what_is_held_or_has_passed_can_only_be_blocked_or_escalated(over: dict[str, Value]) -> None:
    assert ALWAYS == kinds(**over)


def test_a_hold_lasts_five_minutes_to_a_day() -> None:
    challenge = envelope().kind("CHALLENGE")
    assert challenge is not None
    assert {"minutes": Bound(5, 1_440, 5, 0, 0)} == dict(challenge.params)


def test_what_is_released_is_not_the_models_to_say() -> None:
    allow = envelope().kind("ALLOW")
    assert allow is not None
    assert ((), (("amount", 2_500, 2),)) == (allow.params, allow.fills)


@pytest.mark.parametrize("path", sorted(WHOLE))
def test_a_field_that_is_not_known_goes_to_a_human(path: str) -> None:
    fields = {name: value for name, value in WHOLE.items() if name != path}
    assert ESCALATE_ONLY == RULES.envelope(fields)


def test_a_status_that_nobody_declared_goes_to_a_human() -> None:
    assert ESCALATE_ONLY == envelope(account_status="frozen")


@pytest.mark.parametrize(
    ("note", "risk", "changes", "expected"),
    [
        ("routine", 0.15, {}, "ALLOW USUAL_FOR_CUSTOMER"),
        ("routine", 0.150001, {}, "CHALLENGE UNUSUAL_PAYMENT"),
        ("routine", 0.6, {}, "CHALLENGE UNUSUAL_PAYMENT"),
        ("routine", 0.600001, {}, "BLOCK LIKELY_FRAUD"),
        ("confirmed", 0.15, {}, "ALLOW CONFIRMED_BY_CUSTOMER"),
        ("confirmed", 0.2, {}, "ESCALATE "),
        ("takeover", 0.1, {}, "ALLOW USUAL_FOR_CUSTOMER"),
        ("takeover", 0.3, {}, "CHALLENGE DOUBTFUL_NOTE"),
        ("takeover", 0.7, {}, "BLOCK ACCOUNT_TAKEN_OVER"),
        ("imitation", 0.7, {}, "BLOCK MERCHANT_IMITATED"),
        ("coached", 0.7, {}, "BLOCK CUSTOMER_COACHED"),
        ("routine", 0.0, {"account.status": "compromised"}, "BLOCK ACCOUNT_NOT_ACTIVE"),
        ("routine", 0.0, {"payment.amount_minor": LIMIT + 1}, "BLOCK ABOVE_LIMIT"),
        ("routine", 0.0, {"customer.count_1d": 10}, "CHALLENGE TOO_MUCH_IN_A_DAY"),
        ("routine", 0.0, {"customer.sum_1d_minor": 97_501}, "CHALLENGE TOO_MUCH_IN_A_DAY"),
        ("routine", 0.0, {"payment.held": True}, "ESCALATE "),
        ("routine", 0.0, {"payment.open_minor": 0}, "ESCALATE "),
    ],
)
def test_the_policy_makes_one_decision_of_readings_and_state(
    note: str, risk: float, changes: dict[str, Value], expected: str
) -> None:
    fields = WHOLE | changes
    proposed = policy_rules(CONTRACT).propose(fields, {"note": note, "risk": round(risk * 10**6)})
    assert expected == f"{proposed.action} {proposed.reason}"
    assert proposed.action in RULES.envelope(fields).names


def test_the_score_reads_every_feature_and_the_note() -> None:
    assert {*FEATURES, "reading.note"} == set(CONTRACT.readings["risk"].score)


def test_what_a_text_says_is_no_authority() -> None:
    assert not [kind for kind, spec in CONTRACT.kinds.items() if "reading" in spec.when]
