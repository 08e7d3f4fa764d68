"""What is said of a policy: lines that never fire, proposals that are never, or not always, permitted, readings nobody asks."""

from __future__ import annotations

from random import Random

import pytest

from sds.gates.refund.gate import load_refund_contract
from sds.kernel.contract.policy import policy_rules
from sds.kernel.contract.schema import Contract, parse_contract
from sds.lint.finding import Finding
from sds.lint.lint import lint
from sds.lint.policy import policy_findings
from sds.lint.snapshots import space_of
from tests.kernel import world

SECTIONS = """\
readings:
  mood: {question: 'How?', values: {calm: c, angry: a}}
  risk: {question: 'Is it?', score: [claim.minutes]}
policy:
  - {kind: DENY, reason: NOT_OWED, when: "!claim.due || reading.risk > 0.8"}
  - {kind: PAY, reason: LATE, when: "reading.mood == 'angry' && account.left > 0", params: {amount: account.left}}
  - {kind: GRANT, reason: GRANTED, when: claim.size == "large"}
  - otherwise: ESCALATE
"""
ANGRY = "reading.mood == 'angry' && account.left > 0"


def contract(*edits: tuple[str, str]) -> Contract:
    text = world.CONTRACT + SECTIONS
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    return parse_contract(text)


def findings(*edits: tuple[str, str]) -> dict[str, Finding]:
    terms = contract(*edits)
    found = policy_findings(terms, space_of(terms), Random(5))
    return {f"{each.severity} {each.rule} {'.'.join(map(str, each.path))}": each for each in found}


def test_a_policy_that_says_what_it_means_has_no_findings() -> None:
    assert {} == findings()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (ANGRY, f"{ANGRY} && reading.risk > 0.8", "error policy-line-never policy.1"),
        (ANGRY, f"{ANGRY} && reading.mood == 'calm'", "error policy-line-never policy.1"),
        (
            "- otherwise",
            "- {kind: DENY, reason: NOT_OWED, when: \"reading.mood == 'calm' && claim.size == 'large'\"}\n  - otherwise",
            "error policy-line-never policy.3",
        ),
        ('when: claim.size == "large"}', 'when: claim.size == "small"}', "error policy-line-forbidden policy.2"),
        (ANGRY, "reading.mood == 'angry'", "warning policy-forbidden policy.1"),
        ("params: {amount: account.left}", "params: {amount: account.left + 1}", "warning policy-forbidden policy.1"),
        (
            "params: {amount: account.left}",
            'params: {amount: "claim.minutes == 4711 && claim.due ? 0 : account.left"}',
            "warning policy-forbidden policy.1",
        ),
        ('when: claim.size == "large"}', "when: claim.minutes > 5}", "warning policy-forbidden policy.2"),
        ("!claim.due || reading.risk > 0.8", "!claim.due", "warning reading-unused readings.risk"),
    ],
)
def test_what_its_author_may_not_have_meant_is_said(old: str, new: str, expected: str) -> None:
    assert [expected] == list(findings((old, new)))


def test_a_disagreement_is_shown_on_a_snapshot_that_has_it() -> None:
    edits = (("params: {amount: account.left}", "params: {amount: account.left + 1}"),)
    (found,) = findings(*edits).values()
    assert found.example is not None
    assert "angry" == found.example.get("reading.mood")
    assert "then a human decides" in found.message


def test_a_reading_that_a_score_needs_is_asked() -> None:
    edits = (("score: [claim.minutes]", "score: [claim.minutes, reading.mood]"), (ANGRY, "account.left > 0"))
    assert {} == findings(*edits)


def test_fields_that_only_the_policy_reads_are_used() -> None:
    shown = ("kinds:\n", "show: [claim.due]\nkinds:\n")
    read = {"claim.due", "claim.minutes", "claim.size", "account.left", "account.slots"}
    rules = {each.path[1] for each in lint(contract(shown), Random(5)).findings if each.rule == "field-unused"}
    assert not rules & read


def test_the_refund_gates_policy_is_proven_clean() -> None:
    terms = load_refund_contract()
    assert [] == policy_findings(terms, space_of(terms), Random(5))
    assert len(terms.policy) == len(policy_rules(terms).lines)
