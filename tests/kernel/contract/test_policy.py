"""Readings and policy: what a contract may say of them, and what the written rule makes of fields and readings."""

from __future__ import annotations

from decimal import Decimal

import pytest

from sds.kernel.contract.policy import policy_rules
from sds.kernel.contract.schema import Contract, parse_contract
from sds.kernel.envelope.state import Value
from sds.kernel.errors import ContractError
from tests.kernel import world

SECTIONS = """\
readings:
  mood:
    question: How does the customer write?
    values: {calm: without anger, angry: with anger}
  risk: {question: 'Is it fraud?', score: [claim.minutes, reading.mood]}
policy:
  - {kind: DENY, reason: NOT_OWED, when: "reading.risk > 0.8"}
  - {kind: PAY, reason: LATE, when: "reading.mood == 'angry'", params: {amount: "min(account.left, 500)"}}
  - {kind: ESCALATE, when: claim.minutes > 90}
  - {kind: TALK, reason: UNCLEAR, when: "reading.risk <= 0.25", params: {days: 1, minutes: claim.minutes / 5 * 5}}
  - otherwise: MODEL
max_error: {any: 0.02, kinds: {PAY: 0.01}}
"""


def contract(*edits: tuple[str, str]) -> Contract:
    text = world.CONTRACT + SECTIONS
    for old, new in edits:
        assert old in text, f"`{old}` is not in the contract"
        text = text.replace(old, new, 1)
    return parse_contract(text, "till.yaml")


def test_a_contract_without_readings_is_hashed_as_before() -> None:
    plain = world.contract()
    assert {"readings", "policy", "max_error"}.isdisjoint(plain.model_dump(mode="json"))
    assert plain.hash != contract().hash


def test_a_share_is_kept_as_it_was_written() -> None:
    bounds = contract().max_error
    assert bounds is not None
    assert (Decimal("0.01"), Decimal("0.02"), Decimal("0.05")) == (bounds.of("PAY"), bounds.of("DENY"), bounds.delta)
    by_name = contract(("max_error: {any: 0.02, kinds: {PAY: 0.01}}", "max_error: {any: 0.02, PAY: 0.01}")).max_error
    assert bounds == by_name
    one_number = contract(("max_error: {any: 0.02, kinds: {PAY: 0.01}}", "max_error: 0.02")).max_error
    assert one_number is not None
    assert one_number.of("PAY") == Decimal("0.02")


@pytest.mark.parametrize(
    ("fields", "readings", "expected"),
    [
        ({}, {"mood": "angry", "risk": 800_001}, ("DENY", "NOT_OWED", (), 0)),
        ({}, {"mood": "angry", "risk": 800_000}, ("PAY", "LATE", (("amount", 500),), 1)),
        ({"account_left": 499}, {"mood": "angry", "risk": 0}, ("PAY", "LATE", (("amount", 499),), 1)),
        ({"claim_minutes": 91}, {"mood": "calm", "risk": 0}, ("ESCALATE", "", (), 2)),
        (
            {"claim_minutes": 58},
            {"mood": "calm", "risk": 250_000},
            ("TALK", "UNCLEAR", (("days", 1), ("minutes", 55)), 3),
        ),
        ({}, {"mood": "calm", "risk": 250_001}, ("MODEL", "", (), 4)),
    ],
)
def test_the_first_line_that_holds_is_proposed(
    fields: dict[str, Value], readings: dict[str, Value], expected: tuple[object, ...]
) -> None:
    found = policy_rules(contract()).propose(world.fields(**fields), readings)
    assert expected == (found.action, found.reason, found.params, found.line)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("when: claim.due", "when: claim.due && reading.mood == 'calm'", "only `policy` may use readings"),
        ("lo: 1, hi: account.left", "lo: 1, hi: reading.risk", "only `policy` may use readings"),
        (
            "reading.mood == 'angry'",
            "reading.mod == 'angry'",
            "policy.1.when: column 1: `reading.mod` is not one of the readings",
        ),
        ("reading.mood == 'angry'", "reading.mood == 'glad'", "`glad` is not one of angry, calm"),
        ("reading.risk > 0.8", "reading.risk > 1", "expected score, found int"),
        ("reading.risk > 0.8", "reading.risk > 1.5", "`1.5` is not a score"),
        ("reading.risk > 0.8", "reading.risk > 0.1234567", "`0.1234567` is not a score"),
        ("reading.risk > 0.8", "reading.risk + 1 > 2", "expected int, found score"),
        ("reading.risk > 0.8", "claim.minutes > 0.8", "expected int, found score"),
        ('amount: "min(account.left, 500)"', "amount: reading.risk", "expected int, found score"),
        (
            'kind: DENY, reason: NOT_OWED, when: "r',
            'kind: GIVE, reason: NOT_OWED, when: "r',
            "policy.0.kind: `GIVE` is not in `authority`",
        ),
        ("reason: LATE, when", "reason: EARLY, when", "policy.1.reason: `EARLY` is not a reason of `PAY`"),
        (
            ', params: {amount: "min(account.left, 500)"}',
            "",
            "policy.1: `PAY` needs the parameter `amount`, which `params` does not give",
        ),
        ("days: 1, minutes", "weeks: 1, days: 1, minutes", "policy.3.params.weeks: is not a parameter of `TALK`"),
        ("  - otherwise: MODEL\n", "", "the last line must say `otherwise`"),
        (
            "  - otherwise: MODEL\n",
            "  - otherwise: MODEL\n  - otherwise: ESCALATE\n",
            "policy.4: only the last line may say `otherwise`",
        ),
        ("otherwise: MODEL", "otherwise: PAY", "must be 'ESCALATE' or 'MODEL'"),
        ("otherwise: MODEL", "{otherwise: MODEL, when: claim.due}", "`otherwise` must be the only field of its line"),
        (
            "kind: ESCALATE, when",
            "kind: ESCALATE, reason: UNCLEAR, when",
            "ESCALATE takes neither a reason nor parameters",
        ),
        ("{calm: without anger, angry: with anger}", "{calm: without anger}", "`values` must have two or more entries"),
        (
            "score: [claim.minutes, reading.mood]",
            "score: [claim.hours]",
            "`claim.hours` is not a declared snapshot field",
        ),
        (
            "score: [claim.minutes, reading.mood]",
            "score: [reading.risk]",
            "`reading.risk` is not a reading with `values`",
        ),
        ("max_error: {any: 0.02, kinds: {PAY: 0.01}}", "max_error: 2", "max_error: must be at most 1"),
        ("max_error: {any: 0.02, kinds: {PAY: 0.01}}", "max_error: 0", "`any` must be more than 0"),
        ("kinds: {PAY: 0.01}}", "kinds: {GIVE: 0.01}}", "max_error.kinds.GIVE: `GIVE` is not one of the kinds"),
        ("evidence: letter", "evidence_chars_max: 9", "reads the evidence, but `event.evidence` names no field"),
        (
            "readings:\n",
            "rationale: {order: before, chars_max: 9}\nreadings:\n",
            "a policy gives its rationale afterwards",
        ),
    ],
)
def test_what_does_not_hold_together_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(ContractError) as caught:
        contract((old, new))
    assert message in str(caught.value)
    assert str(caught.value).startswith("till.yaml:")


def test_readings_need_a_policy_and_a_policy_readings() -> None:
    readings, policy = SECTIONS.split("policy:")
    for text, message in ((readings, "`policy` is missing"), (f"policy:{policy}", "reading")):
        with pytest.raises(ContractError, match=message):
            parse_contract(world.CONTRACT + text)


def test_a_snapshot_may_not_have_the_root_of_readings() -> None:
    with pytest.raises(ContractError, match="which is kept for readings"):
        contract(("  account.slots: int\n", "  account.slots: int\n  reading.mood: int\n"))


def test_combinations_are_limited() -> None:
    many = "".join(
        f"  r{n}: {{question: 'Which?', values: {{{', '.join(f'v{m}: a value' for m in range(32))}}}}}\n"
        for n in range(3)
    )
    with pytest.raises(ContractError, match="more than 1024 combinations"):
        contract(("readings:\n", f"readings:\n{many}"))


def test_a_human_decides_without_readings() -> None:
    from sds.kernel.contract.human_terms import human_contract

    terms = human_contract(contract())
    assert ({}, (), None) == (terms.readings, terms.policy, terms.max_error)


def test_a_policy_without_an_end_fails() -> None:
    rules = policy_rules(contract())
    rules.lines = rules.lines[:-1]
    with pytest.raises(ValueError, match="zip"):
        rules.propose(world.fields(), {"mood": "calm", "risk": 500_000})
