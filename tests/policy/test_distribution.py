"""The distribution over decisions is the exact sum over every combination of values."""

from __future__ import annotations

from itertools import product
from math import fsum

import pytest

from sds.kernel.contract.policy import policy_rules
from sds.kernel.contract.schema import parse_contract
from sds.kernel.errors import ModelError
from sds.policy.distribution import check_reading, confidence, distribution
from tests.kernel import world
from tests.policy import scripted
from tests.scale import scale, seeded

TWO = """\
readings:
  mood: {question: 'How?', values: {calm: c, angry: a, odd: o}}
  tongue: {question: 'Which?', values: {ours: o, theirs: t}}
policy:
  - {kind: TALK, reason: UNCLEAR, when: "reading.tongue == 'theirs' && reading.mood != 'calm'", params: {days: 1, minutes: 5}}
  - {kind: TALK, reason: UNCLEAR, when: "reading.mood == 'odd'", params: {days: 2, minutes: 5}}
  - {kind: DENY, reason: NOT_OWED, when: "reading.mood == 'angry'"}
  - otherwise: ESCALATE
"""


def test_probabilities_add_up_by_kind_and_numbers() -> None:
    rules = policy_rules(parse_contract(world.CONTRACT + TWO))
    mood, tongue = {"calm": 0.2, "angry": 0.3, "odd": 0.5}, {"ours": 0.6, "theirs": 0.4}
    found = distribution(rules, world.fields(), {"mood": mood, "tongue": tongue})
    expected = {
        "TALK days=1 minutes=5": 0.8 * 0.4,
        "TALK days=2 minutes=5": 0.5 * 0.6,
        "DENY": 0.3 * 0.6,
        "ESCALATE": 0.2,
    }
    assert expected == pytest.approx({each.label: each.probability for each in found})
    assert [each.label for each in found] == sorted(expected, key=lambda label: -expected[label])


def test_it_is_what_counting_gives() -> None:
    rng = seeded(1)
    rules = policy_rules(parse_contract(world.CONTRACT + TWO))
    for _ in range(scale(20, 500)):
        weights = [[rng.random() ** 3 for _ in range(n)] for n in (3, 2)]
        shares = [[w / fsum(each) for w in each] for each in weights]
        mood, tongue = (
            dict(zip(("calm", "angry", "odd"), shares[0], strict=True)),
            dict(zip(("ours", "theirs"), shares[1], strict=True)),
        )
        counted = dict[str, float]()
        for one, other in product(mood, tongue):
            proposed = rules.propose(world.fields(), {"mood": one, "tongue": other})
            key = f"{proposed.action}{proposed.params}"
            counted[key] = counted.get(key, 0.0) + mood[one] * tongue[other]
        found = distribution(rules, world.fields(), {"mood": mood, "tongue": tongue})
        assert sorted(counted.values()) == pytest.approx(sorted(each.probability for each in found))
        assert 1 == pytest.approx(fsum(each.probability for each in found))


def test_of_the_reasons_for_one_decision_the_likeliest_is_given() -> None:
    rules = policy_rules(scripted.contract())
    for mood, reason in (
        ({"calm": 0, "angry": 0.6, "odd": 0.4}, "LATE"),
        ({"calm": 0, "angry": 0.4, "odd": 0.6}, "OWED"),
    ):
        (only,) = distribution(rules, world.fields(), {"mood": mood, "risk": {"score": 0.1}})
        assert (1.0, reason, (("amount", 500),)) == (only.probability, only.proposed.reason, only.proposed.params)


SCORED = """\
readings:
  mood: {question: 'How?', values: {calm: c, angry: a}}
  risk: {question: 'Should it be feared?', score: [claim.minutes]}
policy:
  - {kind: DENY, reason: NOT_OWED, when: reading.risk > 0.6}
  - {kind: TALK, reason: UNCLEAR, when: reading.risk > 0.2, params: {days: 1, minutes: 5}}
  - {kind: GRANT, reason: GRANTED, when: "reading.mood == 'calm'"}
  - otherwise: ESCALATE
"""


@pytest.mark.parametrize(
    ("risk", "decided", "probability", "expected"),
    [
        (0.1, "GRANT", 0.7, 0.7 * 0.9),  # right where the mood is calm and nothing is to be feared
        (0.7, "DENY", 1.0, 0.7),
        (0.3, "TALK days=1 minutes=5", 1.0, 0.0),  # decided of no truth, only because it is not known
        (0.0, "GRANT", 0.7, 0.7),
        (1.0, "DENY", 1.0, 1.0),
    ],
)
def test_a_score_makes_a_decision_as_certain_as_it_is_itself(
    risk: float, decided: str, probability: float, expected: float
) -> None:
    rules = policy_rules(parse_contract(world.CONTRACT + SCORED))
    given = (rules, world.fields(), {"mood": {"calm": 0.7, "angry": 0.3}, "risk": {"score": risk}})
    first = distribution(*given)[0]
    assert (decided, pytest.approx(probability)) == (first.label, first.probability)
    assert expected == pytest.approx(confidence(*given, first))


def test_without_a_score_a_decision_is_as_certain_as_it_is_likely() -> None:
    rules = policy_rules(parse_contract(world.CONTRACT + TWO))
    given = (rules, world.fields(), {"mood": {"calm": 0.2, "angry": 0.3, "odd": 0.5}, "tongue": {"ours": 1.0}})
    for each in distribution(*given):
        assert each.probability == confidence(*given, each)


@pytest.mark.parametrize(
    "found",
    [
        {"calm": 0.5, "angry": 0.5},
        {"calm": 0.5, "angry": 0.5, "odd": 0.0, "more": 0.0},
        {"calm": 0.5, "angry": 0.6, "odd": 0.0},
        {"calm": 1.5, "angry": -0.5, "odd": 0.0},
        {"calm": float("nan"), "angry": 0.5, "odd": 0.5},
        {},
    ],
)
def test_what_is_no_distribution_is_refused(found: dict[str, float]) -> None:
    with pytest.raises(ModelError) as caught:
        check_reading("mood", scripted.contract().readings["mood"], found)
    assert "READING_INVALID" == caught.value.reason_code


@pytest.mark.parametrize(
    "found", [{"score": 1.01}, {"score": float("inf")}, {"risk": 0.5}, {"score": 0.5, "more": 0.5}]
)
def test_what_is_no_score_is_refused(found: dict[str, float]) -> None:
    with pytest.raises(ModelError, match="did not return a probability for each"):
        check_reading("risk", scripted.contract().readings["risk"], found)
