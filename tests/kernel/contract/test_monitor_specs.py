"""`aggregate_thresholds` as a list of monitors: what is wrong with one is said with its line, and the older form stays."""

from __future__ import annotations

import pytest

from sds.kernel.contract.human_terms import human_contract
from sds.kernel.contract.schema import Contract, parse_contract
from sds.kernel.errors import ContractError
from sds.kernel.registry.contract_versions import recorded_contract
from tests.kernel.durable import CONTRACT, contract, usual_contract

LINE = CONTRACT.count("\n") + 2
RATE = "name: m, of: approval_rate, window: {last: 10}, stop: 0.5"
SHIFT = "name: m, of: reading_shift, window: {last: 10}, stop: 0.2"
COST = "name: n, of: paid_sum_minor, window: {minutes: 60}, stop: 900"


READINGS = "readings: {mood: {question: How, values: {a: one, b: another, c: a third}}, sum: {question: How, score: [ticket.mood]}}\npolicy: [{otherwise: MODEL}]\n"
LINE += 2


def listed(*monitors: str) -> str:
    return READINGS + "aggregate_thresholds:\n" + "".join(f"  - {{{monitor}}}\n" for monitor in monitors)


@pytest.mark.parametrize(
    ("monitors", "where", "why"),
    [
        ((RATE, RATE), "1.name", "`m` is the name of another monitor"),
        ((RATE.replace("m,", "M,"),), "0.name", "`M` is not a name in_lower_case"),
        ((RATE.replace("approval_rate", "approvals"),), "0.of", "must be 'approval_rate', 'paid_share', 'paid_mean_minor', 'paid_sum_minor', 'reason_share', 'confidence_mean', 'reading_shift' or 'calibration'"),
        ((COST, RATE.replace("last: 10", "last: 9")), "1.window.last", "must be at least 10"),
        ((RATE.replace("last: 10", "minutes: 10081"),), "0.window.minutes", "must be at most 10080"),
        ((RATE.replace("last: 10", "last: 10, minutes: 1"),), "0.window", "must be {last: N} or {minutes: N}"),
        ((RATE.replace("{last: 10}", "10"),), "0.window", "must be {last: N} or {minutes: N}"),
        ((RATE.replace("stop: 0.5", "stop: 1.5"),), "0.stop", "must be at most 1"),
        ((RATE.replace("stop: 0.5", "stop: -0.5"),), "0.stop", "must be from 0 to 1000000000000000"),
        ((RATE.replace("stop: 0.5", "stop: 0.1234567"),), "0.stop", "must have 6 or fewer decimals"),
        ((RATE.replace("stop: 0.5", "stop: '0.1234567'"),), "0.stop", "must have 6 or fewer decimals"),
        ((RATE.replace("stop: 0.5", "stop: much"),), "0.stop", "must be a number"),
        ((RATE.replace("stop: 0.5", "stop: yes"),), "0.stop", "must be a number"),
        ((RATE.replace(", stop: 0.5", ""),), "0", "has neither `warn` nor `stop`"),
        ((f"{RATE}, warn: 0.5",), "0.warn", "must be below `stop`"),
        (("name: m, of: confidence_mean, window: {last: 10}, warn: 0.4, stop: 0.5",), "0.warn", "must be above `stop`"),
        ((f"{RATE}, reason: NOT_ELIGIBLE",), "0.reason", "is only for `of: reason_share`"),
        ((RATE.replace("approval_rate", "reason_share"),), "0", "`reason_share` needs `reason`"),
        ((f"{RATE.replace('approval_rate', 'reason_share')}, reason: UNKNOWN",), "0.reason", "no kind has the reason `UNKNOWN`"),
        ((SHIFT,), "0", "`reading_shift` needs `reading`"),
        ((f"{SHIFT}, reading: tone, expected: {{a: 1}}",), "0.reading", "`tone` is not a reading with `values`"),
        ((f"{SHIFT}, reading: sum, expected: {{a: 1}}",), "0.reading", "`sum` is not a reading with `values`"),
        ((f"{SHIFT}, reading: mood, expected: {{z: 1}}",), "0.expected.z", "is not a value of `mood`"),
        ((f"{SHIFT}, reading: mood",), "0", "`reading_shift` needs `expected`"),
        ((f"{SHIFT}, reading: mood, expected: {{a: 0.5, b: 0.49}}",), "0.expected", "the shares do not sum to 1"),
        ((f"{SHIFT}, reading: mood, expected: {{a: half}}",), "0.expected.a", "must be a number"),
        ((f"{RATE}, colour: red",), "0.colour", "is not a known field: the fields here are expected, name, of, reading, reason, stop, warn, window"),
        (tuple(RATE.replace("m,", f"m{n},") for n in range(17)), "", "must have 16 or fewer entries"),
    ],
)  # fmt: skip
def test_a_monitor_that_says_nothing_sensible_is_refused_with_its_line(monitors: tuple[str, ...], where: str, why: str):
    with pytest.raises(ContractError) as caught:
        parse_contract(CONTRACT + listed(*monitors), "claims.yaml")
    number = int(where.partition(".")[0]) if where else -1
    at = ".".join(filter(None, ("aggregate_thresholds", where)))
    assert f"claims.yaml:{LINE + number}: {at}: {why}" == str(caught.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("5", "aggregate_thresholds: must be a mapping"),
        ("{window: 9}", "aggregate_thresholds.window: must be at least 10"),
        (
            "{last: 10}",
            "aggregate_thresholds.last: is not a known field: the fields here are paid_mean_minor_max, paid_pct_max, window",
        ),
        ("{window: 10.5}", "aggregate_thresholds.window: must be a whole number"),
        ("{window: 1e3}", "aggregate_thresholds.window: must be a whole number"),
    ],
)
def test_the_older_form_is_refused_in_the_words_it_was(given: str, why: str):
    with pytest.raises(ContractError) as caught:
        parse_contract(f"{CONTRACT}aggregate_thresholds: {given}\n", "claims.yaml")
    assert f"claims.yaml:{LINE - 3}: {why}" == str(caught.value)


def test_shares_that_sum_to_one_within_a_thousandth_are_whole():
    parse_contract(CONTRACT + listed(f"{SHIFT}, reading: mood, expected: {{a: 0.333, b: 0.333, c: 0.333}}"))


@pytest.mark.parametrize(
    ("written", "kept"), [("0.50", "0.5"), ("1", "1"), ("1.0", "1"), ("0.0", "0"), ('"0.25"', "0.25")]
)
def test_a_threshold_is_the_same_however_it_is_written(written: str, kept: str):
    one = contract(more=listed(RATE.replace("0.5", written)))
    assert kept == one.monitors[0].stop
    assert contract(more=listed(RATE.replace("0.5", kept))).hash == one.hash


def test_a_contract_with_monitors_is_read_back_from_its_record_with_the_same_hash():
    terms = contract(more=listed(RATE, f"{SHIFT.replace('m,', 's,')}, reading: mood, expected: {{a: 0.5, b: 0.5}}"))
    assert (terms, terms.hash) == ((back := recorded_contract(terms.model_dump_json())), back.hash)
    assert terms == Contract.model_validate(terms.model_dump())
    assert len({terms.hash, usual_contract().hash, contract(more=listed(RATE)).hash}) == 3


def test_the_older_form_is_two_monitors_and_what_it_never_stopped_is_none():
    older = contract(more="aggregate_thresholds: {window: 50, paid_pct_max: 95, paid_mean_minor_max: 300}\n")
    said = [(each.name, each.of, each.window.last, each.warn, each.stop) for each in older.monitors]
    assert [
        ("paid_pct_max", "paid_share", 50, None, "0.95"),
        ("paid_mean_minor_max", "paid_mean_minor", 50, None, "300"),
    ] == said
    assert () == usual_contract().monitors == contract(more="aggregate_thresholds: {window: 50}\n").monitors


def test_an_agent_is_watched_and_a_human_is_not_held_to_its_reasons():
    human = "human: {kinds: {GOODWILL: {reasons: [KINDNESS]}}}\n"
    watched = listed("name: m, of: reason_share, reason: SHORT_DELAY, window: {last: 10}, stop: 0.5")
    assert () == human_contract(contract(more=human + watched)).monitors
