"""The lint finds what a contract does that its author did not mean; what it calls proven is never contradicted."""

from __future__ import annotations

from random import Random

import pytest

from sds.kernel.contract.schema import parse_contract
from sds.kernel.contract.yaml_lines import load_with_lines
from sds.lint.declared import source_findings
from sds.lint.finding import Finding
from sds.lint.lint import lint
from sds.lint.snapshots import draw, space_of
from tests.kernel import world
from tests.lint.random_contracts import random_contract
from tests.scale import scale, seeded

Edits = tuple[tuple[str, str], ...]
RANDOM_SNAPSHOTS = 100


def findings(*edits: tuple[str, str]) -> dict[tuple[str, str], Finding]:
    """Return the findings for the till with these edits, by severity and rule at path."""
    report = lint(world.contract(*edits), Random(5), random_snapshots=RANDOM_SNAPSHOTS)
    return {(f.severity, f"{f.rule} {'.'.join(map(str, f.path))}"): f for f in report.findings}


PAY = "amount: {lo: 1, hi: account.left, scale: 2}"
MINUTES = "minutes: {lo: 5, hi: claim.minutes, step: 5}"
GRANT = 'when: claim.size == "large"'
FILL = 'value: "claim.minutes * 100"'
SPEND = "spend:\n  - {name: day, window: day, max_minor: 100000}\n"
DRAWS = "    draws: {account.left: amount}\n    spends: amount\n"


@pytest.mark.parametrize(
    ("severity", "rule", "broken", "mended"),
    [
        ("error", "when-never when", (("when: claim.due", "when: claim.due && !claim.due"),), ()),
        ("error", "kind-unreachable kinds.GRANT.when", ((GRANT, f'{GRANT} && claim.size == "small"'),), ()),
        ("error", "kind-unreachable kinds.GRANT.when", ((GRANT, "when: claim.minutes > 9 && claim.minutes < 9"),), ()),
        ("error", "kind-unreachable kinds.GRANT.when", ((GRANT, "when: '!claim.due'"),), ()),
        ("error", "kind-unreachable kinds.TALK.params", (("days: {lo: 1", "days: {lo: 4"),), ()),
        (
            "warning",
            "kind-unreachable kinds.GRANT.when",
            ((GRANT, "when: claim.minutes * claim.minutes == 7"),),
            ((GRANT, "when: claim.minutes * claim.minutes == 9"),),
        ),
        ("warning", "kind-never-in-force kinds.PAY", ((PAY, PAY.replace("lo: 1", "lo: 200000")),), ()),
        ("warning", "bound-empty kinds.PAY.params.amount", (), (("  PAY:", "  PAY:\n    when: account.left >= 1"),)),
        (
            "warning",
            "step-skips-all kinds.TALK.params.minutes",
            ((MINUTES, MINUTES.replace("lo: 5", "lo: 6")),),
            ((MINUTES, MINUTES.replace("lo: 5", "lo: 10")),),
        ),
        (
            "warning",
            "draw-beyond kinds.GRANT.draws.account.slots",
            (),
            ((GRANT, f"{GRANT} && account.slots >= 1"),),
        ),
        (
            "warning",
            "draw-beyond kinds.PAY.draws.account.left",
            ((PAY, PAY.replace("account.left", "account.left + 1")),),
            (),
        ),
        (
            "warning",
            "expression-fails kinds.PAY.params.amount.hi",
            ((PAY, PAY.replace("account.left", '"account.left / account.slots"')),),
            ((PAY, PAY.replace("account.left", '"account.left / max(1, account.slots)"')),),
        ),
        (
            "warning",
            "beyond-limits kinds.GRANT.fills.amount.value",
            ((FILL, FILL.replace("100", "claim.minutes")),),
            ((FILL, 'value: "max(0, min(claim.minutes, 600)) * 100"'),),
        ),
        (
            "info",
            "beyond-limits kinds.GRANT.fills.amount.value",
            (),
            ((FILL, 'value: "max(0, min(claim.minutes, 600)) * 100"'),),
        ),
        (
            "error",
            "expression-always-fails kinds.PAY.params.amount.hi",
            ((PAY, PAY.replace("account.left", "1 / 0")),),
            (),
        ),
        (
            "error",
            "expression-always-fails kinds.PAY.params.amount.hi",
            ((PAY, PAY.replace("account.left", "2000000000000000")),),
            (),
        ),
        (
            "warning",
            "field-unused snapshot.account.owner",
            (("when: claim.due", "show: [claim.due]\nwhen: claim.due"),),
            (("when: claim.due", "show: [claim.due, account.owner]\nwhen: claim.due"),),
        ),
        (
            "warning",
            "field-unused snapshot.account.owner",
            (("when: claim.due", "show: [claim.due]\nwhen: claim.due"),),
            (
                ("when: claim.due", "show: [claim.due]\nwhen: claim.due"),
                ("max_minor:", "per: account.owner, max_minor:"),
            ),
        ),
        (
            "warning",
            "shown-alike show.account.owner",
            (("when: claim.due", "show: {claim.due: it, account.owner: it}\nwhen: claim.due"),),
            (("when: claim.due", "show: {claim.due: due, account.owner: it}\nwhen: claim.due"),),
        ),
        (
            "warning",
            "kind-without-authority kinds.TALK",
            (("GRANT, TALK, DENY", "GRANT, DENY"),),
            (("GRANT, TALK, DENY", "GRANT, DENY"), ("kinds:", "human: {authority: [TALK, DENY]}\nkinds:")),
        ),
        ("warning", "reason-repeated kinds.PAY.reasons.2", (("[OWED, LATE]", "[OWED, LATE, OWED]"),), ()),
        ("info", "code-begins-another kinds.PAY.reasons", (("[OWED, LATE]", "[OWED, OWED_LATE]"),), ()),
        ("info", "code-begins-another kinds.PAY", (("TALK, DENY]", "PAY_LATE, DENY]"), ("  TALK:", "  PAY_LATE:")), ()),
        ("warning", "spend-unlimited kinds.PAY.spends", ((SPEND, ""),), ()),
        ("warning", "draw-not-spent kinds.PAY.draws", ((DRAWS, DRAWS[: DRAWS.index("    spends")]),), ()),
        ("warning", "owner-unreachable owner", (("till@shop.example", "the till"),), ()),
        (
            "info",
            "confidence-needed escalation.confidence_min_pct",
            ((SPEND, "escalation: {confidence_min_pct: 9}\n"),),
            (),
        ),
        (
            "warning",
            "always-without-authority escalation.always.0",
            (("GRANT, TALK, DENY", "GRANT, DENY"), (SPEND, "escalation: {always: [TALK]}\n")),
            ((SPEND, "escalation: {always: [TALK]}\n"),),
        ),
        ("warning", "ttl-too-short budget.ttl_ms", ((SPEND, "budget: {ttl_ms: 20}\n"),), ()),
        ("warning", "age-shorter-than-decision drift.age_ms_max", ((SPEND, "drift: {age_ms_max: 20}\n"),), ()),
        (
            "warning",
            "human-no-wider human",
            (("kinds:", "human: {authority: [PAY, GRANT, TALK, DENY]}\nkinds:"),),
            (("kinds:", "human: {when: 'true'}\nkinds:"),),
        ),
    ],
)
def test_a_finding_is_there_when_it_should_be_and_gone_when_mended(
    severity: str, rule: str, broken: Edits, mended: Edits
):
    assert (severity, rule) in findings(*broken)
    assert (severity, rule) not in findings(*mended)


def test_a_finding_shows_the_plainest_snapshot_and_only_what_matters():
    found = findings((PAY, PAY.replace("account.left", '"account.left / account.slots"')))
    finding = found["warning", "expression-fails kinds.PAY.params.amount.hi"]
    assert {"account.slots": 0} == finding.example
    assert "`PAY.params.amount.hi` divides by zero when account.slots=0: then only ESCALATE is left" == (
        finding.message.removeprefix("`kinds.").replace("``", "`")
    )


def test_a_proof_and_a_search_are_told_apart():
    proven = findings((GRANT, "when: claim.minutes > 9 && claim.minutes < 9"))
    searched = findings((GRANT, "when: claim.minutes * claim.minutes == 7"))
    assert "proven" in proven["error", "kind-unreachable kinds.GRANT.when"].message
    assert "(a search, not a proof)" in searched["warning", "kind-unreachable kinds.GRANT.when"].message


def test_what_is_guarded_does_not_fail():
    hi = '"account.slots > 0 && account.left / account.slots > 5 ? account.left / account.slots : 5"'
    assert not [rule for _, rule in findings((PAY, PAY.replace("account.left", hi))) if rule.startswith("expression")]


def test_a_contract_without_faults_has_no_findings():
    mended: Edits = (
        ("  PAY:", "  PAY:\n    when: account.left >= 1"),
        (GRANT, f"{GRANT} && account.slots >= 1"),
        (FILL, 'value: "max(0, min(claim.minutes, 600)) * 100"'),
        ("  TALK:", "  TALK:\n    when: claim.minutes >= 5"),
    )
    assert {} == findings(*mended)


def test_a_finding_names_its_line():
    text = world.edited(("till@shop.example", "the till"))
    report = lint(parse_contract(text), Random(5), random_snapshots=RANDOM_SNAPSHOTS)
    lines = load_with_lines(text, "till.yaml")[1]
    [owner] = [finding for finding in report.findings if finding.rule == "owner-unreachable"]
    assert "owner: the till" == text.splitlines()[owner.line(lines) - 1]
    assert 1 == Finding("any", "info", ("nowhere", "at all"), "").line(lines)


def test_equal_seeds_give_equal_reports():
    contract = world.contract()
    assert lint(contract, Random(8)) == lint(contract, Random(8))


def test_what_is_proven_is_never_contradicted_and_what_is_shown_happens():
    rng = seeded(41)
    proven = shown = 0
    for _ in range(scale(16, 600)):
        contract = random_contract(rng)
        report = lint(contract, rng, random_snapshots=RANDOM_SNAPSHOTS)
        space = space_of(contract)
        impossible = {f.path[1] for f in report.findings if f.severity == "error" and f.rule == "kind-unreachable"}
        if any(f.rule == "when-never" for f in report.findings):
            impossible |= {kind for kind in contract.authority if kind != contract.refusal}
        assert not impossible & report.reached.keys(), contract
        for _ in range(RANDOM_SNAPSHOTS):
            permitted = space.rules.envelope(draw(space, rng)).names
            assert not impossible & set(permitted), contract
        assert all(kind in space.rules.envelope(at).names for kind, found in report.reached.items() for at in found)
        proven += len(impossible)
        shown += len(report.reached)
    assert proven > 0
    assert shown > proven


@pytest.mark.parametrize(
    ("reads", "severity", "rule", "words"),
    [
        (
            [world.fields(claim_minutes=None)] * 2,
            "error",
            "field-not-at-source",
            "`claim.minutes` is missing in 2 of 2",
        ),
        ([world.fields(claim_minutes=None), world.FIELDS], "warning", "field-unlike-source", "missing in 1 of 2"),
        ([world.fields(claim_minutes="60")], "error", "field-unlike-source", "is not of its declared type in 1 of 1"),
        ([], "warning", "source-unread", "the state source offers no key"),
    ],
)
def test_fields_are_compared_with_what_the_source_has(
    reads: list[dict[str, object]], severity: str, rule: str, words: str
):
    [finding] = source_findings(world.contract(), reads)  # type: ignore[arg-type]
    assert (severity, rule) == (finding.severity, finding.rule)
    assert words in finding.message
    assert [] == source_findings(world.contract(), [world.FIELDS])
