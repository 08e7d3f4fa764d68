"""The difference of two contracts: shown on snapshots, as exact sets, in the right direction."""

from __future__ import annotations

from random import Random

import pytest

from sds.kernel.contract.schema import parse_contract
from sds.kernel.envelope.envelope import meet
from sds.lint.diff import ContractDiff, diff
from sds.lint.diff import _Pair as Pair
from sds.lint.settings_diff import changed_settings
from sds.lint.snapshots import calm_envelope, draw, space_of
from tests.kernel import world
from tests.lint.random_contracts import mutated_contract, random_contract
from tests.scale import scale, seeded

RANDOM_SNAPSHOTS = 100
PAY = "hi: account.left, scale: 2"
GRANT = 'when: claim.size == "large"'
LEVELS = "levels: {claim.minutes: [few, 15, many]}\nkinds:"
SPEND = "spend:\n  - {name: day, window: day, max_minor: 100000}\n"


def compare(*edits: tuple[str, str]) -> tuple[ContractDiff, ContractDiff]:
    """Return the difference from the till to the edited till, and back."""
    a, b = world.contract(), world.contract(*edits)
    forth = diff(a, b, Random(3), random_snapshots=RANDOM_SNAPSHOTS)
    return forth, diff(b, a, Random(3), random_snapshots=RANDOM_SNAPSHOTS)


def said(found: ContractDiff) -> set[str]:
    return {f"{change.kind} {change.aspect}: {change.direction}" for change in found.decisions}


def monitored(monitor: str) -> tuple[str, str]:
    return SPEND, f"{SPEND}aggregate_thresholds: [{{name: m, window: {{last: 10}}, {monitor}}}]\n"


@pytest.mark.parametrize(
    ("edit", "forth", "back"),
    [
        (("[OWED, LATE]", "[OWED]"), "PAY reasons: narrower", "PAY reasons: wider"),
        (("[OWED, LATE]", "[OWED, SORRY]"), "PAY reasons: different", "PAY reasons: different"),
        ((PAY, PAY.replace("left", "left / 2")), "PAY amount: narrower", "PAY amount: wider"),
        (("claim.minutes, step: 5", "claim.minutes, step: 10"), "TALK minutes: narrower", "TALK minutes: wider"),
        (
            ("claim.minutes, step: 5", "claim.minutes, step: 5, residue: 1"),
            "TALK minutes: different",
            "TALK minutes: different",
        ),
        (
            ("claim.minutes * 100", "claim.minutes == 471 ? 0 : claim.minutes * 100"),
            "GRANT amount: different",
            "GRANT amount: different",
        ),
        (
            (GRANT, f"{GRANT} && claim.minutes != 471"),
            "GRANT becomes impossible: narrower",
            "GRANT becomes possible: wider",
        ),
        (
            ("when: claim.due", "when: claim.due && claim.minutes > 47"),
            "PAY becomes impossible: narrower",
            "PAY becomes possible: wider",
        ),
        (("PAY, GRANT, TALK", "GRANT, TALK"), "PAY becomes impossible: narrower", "PAY becomes possible: wider"),
        (
            ("account.slots: 1}", "account.slots: 9}"),
            "GRANT becomes impossible: narrower",
            "GRANT becomes possible: wider",
        ),
        (("kinds:", "rationale: {order: before, chars_max: 9}\nkinds:"), "* rationale: wider", "* rationale: narrower"),
        (("days: {lo: 1, hi: 3}", "hours: {lo: 1, hi: 3}"), "TALK numbers: different", "TALK numbers: different"),
        ((SPEND, SPEND.replace("100000", "4000")), "PAY amount: narrower", "PAY amount: wider"),
    ],
)
def test_a_change_of_what_may_be_decided_is_found_both_ways(edit: tuple[str, str], forth: str, back: str):
    there, again = compare(edit)
    assert forth in said(there)
    assert back in said(again)


def test_a_change_is_shown_on_the_plainest_snapshot_with_only_what_matters():
    there, _ = compare((GRANT, f"{GRANT} && claim.minutes != 471"))
    [change] = [each for each in there.decisions if each.kind == "GRANT"]
    assert {"claim.due": True, "claim.minutes": 471, "claim.size": "large", "account.slots": 1} == dict(change.example)
    assert ("amount 471.00 (filled in)", "not permitted") == (change.before, change.after)
    assert 0 < change.snapshots < there.snapshots


def test_the_verdict_says_that_it_rests_on_a_search():
    narrower, wider = compare((PAY, PAY.replace("left", "left / 2")))
    searched = f"(in {narrower.snapshots} snapshots: a search, not a proof)"
    assert f"the new contract permits nothing that the old one did not {searched}" == narrower.verdict
    assert () == narrower.more
    assert "PAY amount" in wider.more
    assert wider.verdict.startswith("the new contract permits more: PAY amount, PAY becomes possible (in ")


@pytest.mark.parametrize(
    ("edit", "path", "forth", "back"),
    [
        ((SPEND, SPEND.replace("100000", "90000")), "spend.day", "narrower", "wider"),
        ((SPEND, SPEND.replace("window: day", "window: hour")), "spend.day", "wider", "narrower"),
        ((SPEND, SPEND.replace("max_minor", "per: account.owner, max_minor")), "spend.day", "wider", "narrower"),
        ((SPEND, SPEND.replace("max_minor", "sliding: true, max_minor")), "spend.day", "narrower", "wider"),
        ((SPEND, SPEND.replace("max_minor", "timezone: Asia/Tokyo, max_minor")), "spend.day", "wider", "wider"),
        ((SPEND, ""), "spend.day", "wider", "narrower"),
        ((SPEND, f"{SPEND}drift: {{age_ms_max: 9}}\n"), "drift.age_ms_max", "narrower", "wider"),
        (
            (SPEND, f"{SPEND}drift: {{fields: {{account.left: {{abs: 5}}}}}}\n"),
            "drift.fields.account.left",
            "wider",
            "narrower",
        ),
        (
            (SPEND, f"{SPEND}escalation: {{confidence_min_pct: 9}}\n"),
            "escalation.confidence_min_pct",
            "narrower",
            "wider",
        ),
        ((SPEND, f"{SPEND}escalation: {{always: [PAY]}}\n"), "escalation.always", "narrower", "wider"),
        (
            (SPEND, f"{SPEND}escalation: {{impact_high_minor: 9}}\n"),
            "escalation.impact_high_minor",
            "narrower",
            "wider",
        ),
        ((SPEND, f"{SPEND}escalation: {{pauses_agent: true}}\n"), "escalation.pauses_agent", "narrower", "wider"),
        ((SPEND, f"{SPEND}retry: {{attempts_max: 9}}\n"), "retry.attempts_max", "wider", "narrower"),
        (
            (SPEND, f"{SPEND}aggregate_thresholds: {{paid_mean_minor_max: 9}}\n"),
            "aggregate_thresholds.paid_mean_minor_max",
            "narrower",
            "wider",
        ),
        (monitored("of: approval_rate, stop: 0.5"), "aggregate_thresholds.m", "narrower", "wider"),
        ((SPEND, f"{SPEND}draws_settle_in: source\n"), "draws_settle_in", "wider", "narrower"),
        ((SPEND, f"{SPEND}source: elsewhere\n"), "source", "wider", "wider"),
        (("2020-01-01", "2021-01-01"), "effective_from", "narrower", "wider"),
        (("id: event_id", "id: other_id"), "event.id", "wider", "wider"),
        (("Decide who is paid.", "Decide well."), "mission", "different", "different"),
        (("    reasons: [OWED", "    impact: LOW\n    reasons: [OWED"), "kinds.PAY.impact", "wider", "narrower"),
        (("{account.slots: 1}", "{account.slots: 2}"), "kinds.GRANT.draws.account.slots", "narrower", "wider"),
        (("    draws: {account.slots: 1}\n", ""), "kinds.GRANT.draws.account.slots", "wider", "narrower"),
        (("    spends: amount\n    reasons: [OWED", "    reasons: [OWED"), "kinds.PAY.spends", "wider", "narrower"),
        (("account.slots: int", "account.slots: timestamp"), "snapshot.account.slots", "wider", "wider"),
        (("claim.minutes: int", "claim.minutes: timestamp"), "snapshot.claim.minutes", "different", "different"),
        (("kinds:", "human: {when: 'true'}\nkinds:"), "human.when", "different", "different"),
        (("kinds:", LEVELS), "levels.claim.minutes", "different", "different"),
        (("kinds:", "labels: {claim.minutes: Minuten}\nkinds:"), "labels.claim.minutes", "different", "different"),
    ],
)
def test_a_setting_that_differs_is_named_with_its_direction(edit: tuple[str, str], path: str, forth: str, back: str):
    a, b = world.contract(), world.contract(edit)
    assert forth in {change.direction for change in changed_settings(a, b) if change.path == path}
    assert back in {change.direction for change in changed_settings(b, a) if change.path == path}


@pytest.mark.parametrize(
    ("before", "after", "forth", "back"),
    [
        ("of: approval_rate, stop: 0.5", "of: approval_rate, stop: 0.6", "wider", "narrower"),
        ("of: confidence_mean, stop: 0.5", "of: confidence_mean, stop: 0.6", "narrower", "wider"),
        ("of: approval_rate, stop: 0.5", "of: approval_rate, warn: 0.5", "wider", "narrower"),
        ("of: approval_rate, stop: 0.5", "of: approval_rate, stop: 0.5, warn: 0.4", "different", "different"),
        ("of: approval_rate, stop: 0.5", "of: paid_share, stop: 0.5", "wider", "wider"),
    ],
)
def test_a_monitor_that_stops_later_or_never_is_wider(before: str, after: str, forth: str, back: str):
    a, b = world.contract(monitored(before)), world.contract(monitored(after))
    assert [("aggregate_thresholds.m", forth)] == [(each.path, each.direction) for each in changed_settings(a, b)]
    assert [("aggregate_thresholds.m", back)] == [(each.path, each.direction) for each in changed_settings(b, a)]


def test_a_setting_that_is_wider_permits_more_and_one_that_is_different_does_not():
    wider, narrower = compare((SPEND, f"{SPEND}drift: {{age_ms_max: 90000}}\n"))
    assert ("drift.age_ms_max",) == wider.more
    assert () == narrower.more
    different, _ = compare(("Decide who is paid.", "Decide well."))
    assert () == different.more
    assert ["mission"] == [change.path for change in different.settings]


def test_words_for_a_number_are_told_and_permit_nothing_more():
    there, again = compare(("kinds:", LEVELS))
    assert [("levels.claim.minutes", None, "few, 15, many")] == [(s.path, s.before, s.after) for s in there.settings]
    assert ((), ()) == (there.decisions, there.more) == (again.decisions, again.more)


def test_every_field_of_a_contract_is_compared_in_some_way():
    """A field that is added to the contract and forgotten here would be a difference that nobody is told of."""
    compared = {
        "gate", "agent_id", "owner", "effective_from", "proposal_schema", "mission", "source", "authority", "event",
        "show", "levels", "labels", "rationale", "draws_settle_in", "drift", "escalation", "human", "memory", "artifacts", "retry", "budget",
        "aggregate_thresholds", "snapshot", "spend", "sagas", "kinds", "refusal",
        "when",  # as decisions
        "readings", "policy", "max_error",
        "version", "role",  # the first is no difference, the second has one value
    }  # fmt: skip
    assert set(type(world.contract()).model_fields) == compared


def test_what_a_human_may_decide_is_compared_too():
    there, again = compare(("kinds:", "human: {when: 'true'}\nkinds:"))
    assert ("human", "PAY", "wider") in {(change.who, change.kind, change.direction) for change in there.decisions}
    assert "human: PAY becomes possible" in there.more
    assert {"human: DENY becomes possible"} >= set(again.more)  # where the till would escalate for lack of budget


def test_what_differs_below_human_is_named_setting_by_setting_as_it_is_written():
    kind = "human: {kinds: {GIFT: {params: {amount: {lo: 0, hi: %d, scale: 2}}, reasons: [%s]}}}\nkinds:"
    plain, small, large = (
        world.contract(*edit)
        for edit in ((), (("kinds:", kind % (500, "OWED")),), (("kinds:", kind % (900, "OWED, LATE")),))
    )
    assert [
        ("human.kinds.GIFT.reasons", "OWED", "OWED, LATE"),
        (
            "human.kinds.GIFT.params.amount",
            "{lo: 0, hi: 500, scale: 2, step: 1, residue: 0}",
            "{lo: 0, hi: 900, scale: 2, step: 1, residue: 0}",
        ),
    ] == [(change.path, change.before, change.after) for change in changed_settings(small, large)]
    (added,) = changed_settings(plain, small)
    assert ("human.kinds.GIFT", None) == (added.path, added.before)
    assert added.after == (
        "{reasons: [OWED], when: true, params: {amount: {lo: 0, hi: 500, scale: 2, step: 1, residue: 0}}}"
    )


def test_real_state_is_tried_besides_what_is_found():
    real = [world.fields(account_owner="Grace Hopper")]
    edit = ("when: claim.due", 'when: claim.due && account.owner != "Grace Hopper"')
    found = diff(world.contract(), world.contract(edit), Random(3), real=real, random_snapshots=0)
    assert "PAY becomes impossible: narrower" in said(found)


def test_a_contract_does_not_differ_from_itself():
    rng = seeded(17)
    for _ in range(scale(6, 400)):
        contract = random_contract(rng)
        found = diff(contract, contract.model_copy(), rng, random_snapshots=RANDOM_SNAPSHOTS)
        assert ((), (), ()) == (found.decisions, found.settings, found.more)


def test_when_nothing_more_is_permitted_no_fresh_snapshot_permits_more():
    rng, fresh = seeded(23), seeded(24)
    nothing_more = 0
    for _ in range(scale(12, 400)):
        a = random_contract(rng)
        b = mutated_contract(rng, a)
        if diff(a, b, rng).more:
            continue
        nothing_more += 1
        pair = Pair("agent", space_of(a, b), space_of(b, a))
        for _ in range(RANDOM_SNAPSHOTS):
            fields = draw(pair.both, fresh)
            before, after = calm_envelope(pair.a, fields), calm_envelope(pair.b, fields)
            assert after == meet(before, after), (a, b, fields)
    assert nothing_more > scale(1, 5)


def test_what_a_policy_says_otherwise_is_named():
    sections = """\
readings:
  mood: {question: 'How?', values: {calm: c, angry: a}}
policy:
  - {kind: DENY, reason: NOT_OWED, when: "reading.mood == 'angry'"}
  - otherwise: ESCALATE
max_error: 0.02
"""
    before, other = (
        parse_contract(world.CONTRACT + text)
        for text in (sections, sections.replace("0.02", "0.05").replace("'angry'", "'calm'"))
    )
    assert ["max_error", "policy"] == sorted(each.path for each in diff(before, other, Random(1)).settings)
    assert ["max_error", "policy", "readings.mood"] == sorted(
        each.path for each in diff(world.contract(), other, Random(1)).settings
    )


@pytest.mark.parametrize(
    ("before", "after", "direction"),
    [
        ("", "max_error: 0.02\n", "narrower"),
        ("max_error: 0.02\n", "", "wider"),
        ("max_error: 0.02\n", "max_error: 0.01\n", "wider"),
    ],
)
def test_a_bound_where_there_was_none_is_narrower_and_every_other_change_of_it_is_looked_at(
    before: str, after: str, direction: str
) -> None:
    policy = """\
readings:
  mood: {question: 'How?', values: {calm: c, angry: a}}
policy:
  - {kind: DENY, reason: NOT_OWED, when: "reading.mood == 'angry'"}
  - otherwise: ESCALATE
"""
    a, b = (parse_contract(world.CONTRACT + policy + bound) for bound in (before, after))
    assert [("max_error", direction)] == [(each.path, each.direction) for each in diff(a, b, Random(1)).settings]
