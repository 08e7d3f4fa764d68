"""A case is read in two texts: what recurs from case to case, so that a backend can keep it, and its own numbers."""

from __future__ import annotations

import pytest

from sds.kernel.contract.compiler import Rules
from sds.kernel.envelope.state import Value
from tests.kernel import world

LEVELS = "levels: {claim.minutes: [none, 15, short, 180, long], account.left: [little, 1000, much]}\nwhen: claim.due"
FILL = '"claim.minutes * 100"'


def texts(*edits: tuple[str, str], **changes: Value | None) -> tuple[str, ...]:
    """Return the case of the till: what is between the contract's text and the evidence."""
    return world.packet(world.contract(*edits), world.situation(world.fields(**changes))).texts[1:-1]


def shown(text: str) -> tuple[str, str]:
    return "when: claim.due", f"show: {text}\nwhen: claim.due"


def test_what_has_few_values_is_told_before_what_is_permitted_and_all_other_numbers_after_it():
    recurring = "claim.due yes\nclaim.size large\nPermitted: DENY, ESCALATE, GRANT, PAY, TALK\n"
    numbers = (
        "account.left 50.00\n"
        "account.owner Ada\n"
        "account.slots 2\n"
        "claim.filed_at 1600000000\n"
        "claim.minutes 60\n"
        "GRANT 60.00\n"
        "PAY 0.01 to 50.00\n"
        "TALK (days 1 to 3, minutes 5 to 60)\n"
    )
    assert (recurring, numbers) == texts()


def test_each_text_keeps_the_order_and_the_labels_of_what_is_shown():
    recurring, numbers = texts(shown('{account.left: "left:", claim.size: size, account.slots: slots, claim.due: due}'))
    assert ["size large", "due yes"] == recurring.splitlines()[:-1]
    assert ["left: 50.00", "slots 2"] == numbers.splitlines()[:2]


def test_the_model_reads_what_it_needs_and_no_more():
    assert ("claim.size large\nPermitted: DENY, ESCALATE\n",) == texts(shown("[claim.size]"), claim_due=False)


def test_where_nothing_is_shown_that_recurs_the_permitted_kinds_still_are():
    assert ("Permitted: DENY, ESCALATE\n", "account.left 50.00\n") == texts(shown("[account.left]"), claim_due=False)


def test_a_number_with_levels_is_told_by_its_word_among_what_recurs():
    recurring, numbers = texts(("when: claim.due", LEVELS))
    assert ["account.left much", "claim.due yes", "claim.minutes short", "claim.size large"] == recurring.splitlines()[
        :-1
    ]
    assert not any(line.startswith(("claim.minutes", "account.left")) for line in numbers.splitlines())


@pytest.mark.parametrize(
    ("minutes", "word"),
    [
        (-(10**15), "none"), (0, "none"), (14, "none"), (15, "short"), (16, "short"), (179, "short"), (180, "long"),
        (10**15, "long"),
    ],
)  # fmt: skip
def test_a_level_begins_with_its_least_value(minutes: int, word: str):
    assert f"claim.minutes {word}" in texts(("when: claim.due", LEVELS), claim_minutes=minutes)[0].splitlines()


@pytest.mark.parametrize(("left", "word"), [(999, "little"), (1000, "much")])
def test_the_levels_of_an_amount_are_in_minor_units(left: int, word: str):
    assert f"account.left {word}" in texts(("when: claim.due", LEVELS), account_left=left)[0].splitlines()


def test_a_time_may_have_levels_below_zero():
    levels = "levels: {claim.filed_at: [early, -5, recent, 1600000000, new]}\nwhen: claim.due"
    words = [
        next(line for line in texts(("when: claim.due", levels), claim_filed_at=at)[0].splitlines() if "filed" in line)
        for at in (-6, -5, 1_599_999_999, 1_600_000_000)
    ]
    assert [f"claim.filed_at {word}" for word in ("early", "recent", "recent", "new")] == words


def test_two_cases_that_differ_only_within_their_levels_share_what_recurs():
    one = texts(("when: claim.due", LEVELS), claim_minutes=20, account_left=2_000, account_slots=1)
    other = texts(("when: claim.due", LEVELS), claim_minutes=170, account_left=90_000, account_slots=9)
    assert one[0] == other[0]
    assert one[1] != other[1]


@pytest.mark.parametrize(
    ("value", "recurs"),
    [
        ("3000", True),
        ('"(3000)"', True),
        ('"claim.minutes > 5 ? 3000 : 4000"', True),
        ('"claim.minutes > 5 ? (claim.due ? 3000 : 2) : claim.size == \\"large\\" ? 4000 : 1"', True),
        ('"claim.minutes > 5 ? 3000 : claim.minutes"', False),
        ('"claim.minutes > 5 ? 3000 : (claim.due ? 1 : claim.minutes)"', False),
        ('"1500 + 1500"', False),
        ('"min(3000, 4000)"', False),
        ("account.left", False),
    ],
)
def test_a_fill_recurs_where_its_rule_names_every_amount_it_can_have(value: str, recurs: bool):
    edit = (FILL, value)
    recurring, numbers = texts(edit)
    amount = world.packet(world.contract(edit)).envelope.kind("GRANT").fills[0][1]  # type: ignore[union-attr]
    line = f"GRANT {amount // 100}.{amount % 100:02}"
    assert recurs == Rules(world.contract(edit)).recurs("GRANT", "amount")
    assert recurs == (f", {line}, " in recurring)
    assert recurs != (line in numbers.splitlines())


def test_what_is_not_a_fill_does_not_recur():
    """A parameter's bounds may be narrowed by every safeguard, whatever its expressions are."""
    rules = Rules(world.contract())
    assert [False] * 3 == [rules.recurs(*each) for each in (("TALK", "days"), ("GRANT", "hours"), ("ESCALATE", "x"))]


@pytest.mark.parametrize(
    ("fills", "params", "again", "once"),
    [
        ("amount: 3000", "", "GRANT 30.00", None),
        ("amount: 3000, more: 50", "", "GRANT (amount 30.00, more 0.50)", None),
        ("amount: claim.minutes, more: 50", "", "GRANT (more 0.50)", "GRANT (amount 0.60)"),
        ("amount: 3000", "days: {lo: 1, hi: 3}", "GRANT (amount 30.00)", "GRANT (days 1 to 3)"),
        ("amount: claim.minutes", "days: {lo: 1, hi: 3}", "GRANT", "GRANT (amount 0.60, days 1 to 3)"),
        (
            "amount: claim.minutes, more: 50, most: account.left",
            "days: {lo: 1, hi: 3}, hours: {lo: 4, hi: 5}",
            "GRANT (more 0.50)",
            "GRANT (amount 0.60, most 50.00, days 1 to 3, hours 4 to 5)",
        ),
    ],
)
def test_a_number_needs_a_name_unless_it_is_the_only_one_of_its_kind(
    fills: str, params: str, again: str, once: str | None
):
    named = (each.split(": ") for each in fills.split(", "))
    written = ", ".join(f"{name}: {{value: {value}, scale: 2}}" for name, value in named)
    recurring, numbers = texts(
        (
            f"    fills:\n      amount: {{value: {FILL}, scale: 2}}",
            f"    fills: {{{written}}}\n    params: {{{params}}}",
        )
    )
    assert f"Permitted: DENY, ESCALATE, {again}, PAY, TALK" == recurring.splitlines()[-1]
    assert ([once] if once else []) == [line for line in numbers.splitlines() if line.startswith("GRANT")]
