"""The distribution over decisions that follows from the distributions of the readings. Exact and pure.

The policy is applied to every combination of values. The probabilities of combinations with the same kind and numbers
add up; the decision gets the likeliest of its reasons. Several readings count as independent. A score is decided by its
number; the confidence comes from what the policy would decide if the answer to the score's question were known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import fsum, isfinite, prod
from typing import Any

from sds.kernel.contract.policy import PolicyRules, Proposed
from sds.kernel.contract.readings import ReadingSpec
from sds.kernel.envelope.state import Fields, Value
from sds.kernel.errors import ModelError

SUM_OFF_MAX = 1e-3
MILLIONTHS = 10**6
SCORE = "score"  # the only key in a score's reading

Readings = Mapping[str, Mapping[str, float]]  # reading -> value -> probability; for a score: {"score": number}


@dataclass(frozen=True, slots=True)
class Weighted:
    """A decision and its probability. `proposed` has the likeliest of its reasons."""

    proposed: Proposed
    probability: float

    @property
    def label(self) -> str:
        """The decision in words, for the record: its kind, and its numbers in minor units."""
        return " ".join([self.proposed.action, *(f"{name}={value}" for name, value in self.proposed.params)])


def distribution(rules: PolicyRules, fields: Fields, readings: Readings) -> list[Weighted]:
    """Return every possible decision with its probability, the likeliest first. Raises what an expression raises."""
    shares = dict[tuple[object, ...], list[tuple[float, Proposed]]]()
    as_read = {
        name: {_millionths(each): 1.0} if (each := found.get(SCORE)) is not None else found
        for name, found in readings.items()
    }
    for values, probability in _combinations(as_read):
        proposed = rules.propose(fields, values)
        shares.setdefault(proposed.decision, []).append((probability, proposed))
    found = [Weighted(_likeliest_reason(each), min(1.0, fsum(share for share, _ in each))) for each in shares.values()]
    return sorted(found, key=lambda one: (-one.probability, one.label))


def confidence(rules: PolicyRules, fields: Fields, readings: Readings, chosen: Weighted) -> float:
    """Return the probability that the policy would decide the same if it knew the truth. Raises what an expression raises.

    The truth of a score is 1 with the probability `score`, else 0: to let a payment pass at a risk of 0.1 is right nine
    times in ten. Without a score, the result is the decision's own probability. A decision that the policy takes only
    because it does not know the truth, such as to hold a payment and ask, gets 0.
    """
    if not any(SCORE in found for found in readings.values()):
        return chosen.probability
    truths = {
        name: {_millionths(1): each, 0: 1 - each} if (each := found.get(SCORE)) is not None else found
        for name, found in readings.items()
    }
    decided = chosen.proposed.decision
    return min(
        1.0, fsum(share for values, share in _combinations(truths) if rules.propose(fields, values).decision == decided)
    )


def _millionths(score: float) -> int:
    return round(score * MILLIONTHS)


def _combinations(readings: Mapping[str, Mapping[Any, float]]) -> Iterator[tuple[dict[str, Value], float]]:
    """Yield every combination of values with a probability above 0, and that probability."""
    for combination in product(*(found.items() for found in readings.values())):
        if probability := prod(share for _, share in combination):
            yield dict(zip(readings, (value for value, _ in combination), strict=True)), probability


def _likeliest_reason(shares: list[tuple[float, Proposed]]) -> Proposed:
    """Return the proposal whose reason has most of the probability; of equal reasons, that of the first line."""
    by_reason = dict[str, float]()
    for share, proposed in shares:
        by_reason[proposed.reason] = by_reason.get(proposed.reason, 0.0) + share
    return max((proposed for _, proposed in shares), key=lambda each: (by_reason[each.reason], -each.line))


def check_reading(name: str, spec: ReadingSpec, found: Mapping[str, float]) -> None:
    """Raise ModelError unless `found` is a distribution over the reading's values, or a score."""
    wanted = set(spec.values) or {SCORE}
    numbers = list(found.values())
    if set(found) != wanted or not all(isfinite(number) and 0 <= number <= 1 for number in numbers):
        raise ModelError(
            f"the reader of `{name}` did not return a probability for each of its values", reason_code="READING_INVALID"
        )
    if spec.values and abs(fsum(numbers) - 1) > SUM_OFF_MAX:
        raise ModelError(f"the probabilities of `{name}` do not add up to 1", reason_code="READING_INVALID")
