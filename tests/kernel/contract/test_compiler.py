"""`envelope(contract, snapshot)`: what the contract's rules give for a state, and that failing gives the human."""

from __future__ import annotations

import pytest

from sds.kernel.contract.compiler import Rules
from sds.kernel.envelope.envelope import ESCALATE_ONLY, Bound, DecisionEnvelope, KindBound, envelope_of
from sds.kernel.envelope.state import Value
from tests.kernel import world

TILL = Rules(world.contract())


def envelope(*edits: tuple[str, str], **changes: Value | None) -> DecisionEnvelope:
    return Rules(world.contract(*edits)).envelope(world.fields(**changes))


def test_the_rules_give_exactly_the_permitted_kinds_and_bounds():
    expected = envelope_of(
        [
            KindBound("DENY", ("NOT_OWED",)),
            KindBound("GRANT", ("GRANTED",), fills=(("amount", 6000, 2),)),
            KindBound("PAY", ("LATE", "OWED"), (("amount", Bound(1, 5000, 1, 0, 2)),)),
            KindBound("TALK", ("UNCLEAR",), (("days", Bound(1, 3, 1, 0, 0)), ("minutes", Bound(5, 60, 5, 0, 0)))),
        ]
    )
    assert expected == envelope()


def test_a_kind_whose_condition_fails_is_not_permitted():
    assert ("DENY", "ESCALATE", "PAY", "TALK") == envelope(claim_size="small").names


def test_where_the_contract_does_not_apply_only_denying_and_escalating_are_left():
    assert ("DENY", "ESCALATE") == envelope(claim_due=False).names


@pytest.mark.parametrize("minutes", [4, 0, -10])
def test_a_kind_of_which_a_parameter_has_no_value_left_goes(minutes: int):
    assert ("DENY", "ESCALATE", "GRANT", "PAY") == envelope(claim_minutes=minutes).names


def test_a_kind_without_authority_is_not_permitted_whatever_its_condition():
    assert ("DENY", "ESCALATE", "PAY") == envelope(("[PAY, GRANT, TALK, DENY]", "[PAY]")).names


def test_an_undeclared_field_changes_nothing():
    extra = {**world.FIELDS, "claim.colour": "red", "account.left2": 10**9}
    assert envelope() == TILL.envelope(extra)


@pytest.mark.parametrize("path", sorted(world.FIELDS))
def test_a_missing_field_leaves_only_the_human(path: str):
    state = {name: value for name, value in world.FIELDS.items() if name != path}
    assert ESCALATE_ONLY == TILL.envelope(state)
    assert [f"`{path}` is missing"] == TILL.faults(state)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("claim.due", 1),
        ("claim.due", "true"),
        ("claim.minutes", True),
        ("claim.minutes", "60"),
        ("claim.minutes", 60.0),
        ("claim.minutes", float("nan")),
        ("claim.minutes", 10**15 + 1),
        ("claim.minutes", -(10**15) - 1),
        ("claim.minutes", 10**400),
        ("claim.size", "Large"),
        ("claim.size", "large "),
        ("claim.size", 1),
        ("claim.filed_at", False),
        ("account.owner", 7),
        ("account.owner", b"Ada"),
        ("account.owner", "A" * 257),
        ("account.owner", "\ud800"),
        ("account.left", 50.00),
        ("account.left", "50.00"),
        ("account.left", [5000]),
        ("account.slots", {"n": 2}),
    ],
)
def test_a_mistyped_field_leaves_only_the_human(path: str, value: Value):
    state = {**world.FIELDS, path: value}
    assert ESCALATE_ONLY == TILL.envelope(state)
    assert [f"`{path}` is not of its declared type"] == TILL.faults(state)


DIVIDED = [
    ("when: claim.due", "when: 1 / account.slots >= 0"),
    ("when: claim.due", "when: 1 / account.slots >= 0 || claim.due"),
    ('claim.size == "large"', "60 % account.slots == 0 || claim.due"),
    ('claim.size == "large"', "'!(claim.minutes / account.slots > 1 && !claim.due)'"),
    ("hi: account.left", "hi: account.left / account.slots"),
    ("hi: account.left", 'hi: "min(account.left, 100 / account.slots)"'),
    ("claim.minutes * 100", "claim.minutes / account.slots"),
]


@pytest.mark.parametrize(("old", "new"), DIVIDED)
def test_a_division_by_zero_leaves_only_the_human(old: str, new: str):
    assert ESCALATE_ONLY != envelope((old, new), account_slots=2)
    assert ESCALATE_ONLY == envelope((old, new), account_slots=0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hi: 3", "hi: claim.filed_at * 9999999999"),
        ("when: claim.due", "when: claim.filed_at * 9999999999 > 0 || claim.due"),
        ("hi: 3", "hi: claim.filed_at * 999999"),
        ("lo: 1, hi: 3", "lo: 0 - claim.filed_at * 999999, hi: 3"),
        ("claim.minutes * 100", "claim.filed_at * 999999"),
    ],
)
def test_a_number_beyond_the_limits_leaves_only_the_human(old: str, new: str):
    assert ESCALATE_ONLY != envelope((old, new), claim_filed_at=1)
    assert ESCALATE_ONLY == envelope((old, new))


def test_an_expression_of_a_kind_that_is_not_permitted_fails_all_the_same():
    broken = ("claim.minutes * 100", "claim.minutes / account.slots")
    assert ESCALATE_ONLY == envelope(broken, claim_size="small", account_slots=0)


def test_the_envelope_carries_the_contracts_bound_on_the_rationale():
    before, after = (
        ("spend:", f"rationale: {{order: {order}, chars_max: 80}}\nspend:") for order in ("before", "after")
    )
    assert 80 == envelope(before).rationale_chars_max
    assert 0 == envelope(before, account_slots=None).rationale_chars_max
    assert 0 == envelope(after).rationale_chars_max


def test_the_same_state_gives_the_same_envelope():
    assert TILL.envelope(world.FIELDS).hash == TILL.envelope(dict(reversed(world.FIELDS.items()))).hash
