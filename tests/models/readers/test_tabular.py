"""A reader of rows: a score of every declared input, and no score where one is missing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from sds.models.readers.artifact import Input, Isotonic, Sigmoid
from sds.models.readers.calibration import calibrated_score
from sds.models.readers.protocol import Reader, ReaderError
from sds.models.readers.tabular import row_numbers
from tests.models.readers.rows import payments

FIELDS: dict[str, Any] = {"amount_minor": 400_000, "country": "FR", "new_device": True}
NOTE = {"note": {"takeover": 0.95, "routine": 0.05}}


def test_a_score_rises_with_what_makes_frauds(table: Reader) -> None:
    risky = table.read("", FIELDS, NOTE)
    calm = table.read(
        "", {**FIELDS, "amount_minor": 1000, "new_device": False}, {"note": {"takeover": 0.05, "routine": 0.95}}
    )
    assert risky.probabilities["score"] > 0.5
    assert calm.probabilities["score"] < 0.2
    assert (True, True) == (risky.familiar, calm.familiar)


def test_the_other_reading_counts(table: Reader) -> None:
    without = table.read(
        "", {**FIELDS, "amount_minor": 1000, "country": "DE"}, {"note": {"takeover": 0.1, "routine": 0.9}}
    )
    beside = table.read("", {**FIELDS, "amount_minor": 1000, "country": "DE"}, NOTE)
    assert beside.probabilities["score"] > without.probabilities["score"]


@pytest.mark.parametrize(
    ("changes", "readings", "expected"),
    [
        ({"amount_minor": None}, NOTE, "the field `amount_minor` is absent, or is not of type int"),
        ({"amount_minor": True}, NOTE, "the field `amount_minor` is absent, or is not of type int"),
        ({"amount_minor": "4"}, NOTE, "the field `amount_minor` is absent, or is not of type int"),
        ({"amount_minor": 10**400}, NOTE, "the field `amount_minor` is absent, or is not of type int"),
        ({"new_device": 1}, NOTE, "the field `new_device` is absent, or is not of type bool"),
        ({"country": 3}, NOTE, "the field `country` is absent, or is not of type category"),
        ({}, {}, "the reading `note` is absent, or has other values"),
        ({}, {"note": {"takeover": 0.5}}, "the reading `note` is absent, or has other values"),
        ({}, {"note": {"takeover": float("nan"), "routine": 0.5}}, "the reading `note` is absent, or has other values"),
        ({}, {"note": {"takeover": 1.5, "routine": 0.5}}, "the reading `note` is absent, or has other values"),
    ],
)  # fmt: skip
def test_a_row_with_an_input_missing_or_of_another_type_has_no_score(
    table: Reader, changes: dict[str, Any], readings: dict[str, dict[str, float]], expected: str
) -> None:
    fields = {name: value for name, value in {**FIELDS, **changes}.items() if value is not None}
    with pytest.raises(ReaderError) as raised:
        table.read("", fields, readings)
    assert expected == str(raised.value)


@pytest.mark.parametrize("changes", [{"country": "XX"}, {"amount_minor": 5_000_000}, {"amount_minor": -5_000_000}])
def test_a_category_or_a_number_that_was_never_seen_is_unfamiliar(table: Reader, changes: dict[str, Any]) -> None:
    reading = table.read("", {**FIELDS, **changes}, NOTE)
    assert not reading.familiar
    assert 0.0 <= reading.probabilities["score"] <= 1.0


def test_scores_are_shares(table: Reader) -> None:
    """In five parts by score, as many are frauds as was said, within what 2,000 rows can tell."""
    rows, frauds = payments(2000, random.Random(9))
    scores = np.array([table.read("", *row).probabilities["score"] for row in rows])
    order = np.argsort(scores)
    truth = np.array(frauds)
    assert np.mean([abs(scores[part].mean() - truth[part].mean()) for part in np.array_split(order, 5)]) < 0.06


def test_a_row_becomes_numbers_in_the_declared_order() -> None:
    inputs = (
        Input(name="n", type="int"),
        Input(name="c", type="category", values=("x", "y")),
        Input(name="b", type="bool"),
        Input(name="r", type="reading", values=("no", "yes")),
    )
    numbers = row_numbers(inputs, {"b": True, "c": "y", "n": -3}, {"r": {"yes": 0.75, "no": 0.25}})
    assert [-3, 0, 1, 1, 0.25, 0.75] == numbers.tolist()


def test_calibrations_are_applied_as_written() -> None:
    assert [0.5] == calibrated_score(Sigmoid(slope=2, offset=-2), np.array([1.0])).tolist()
    assert [0.1, 0.2, 0.3, 0.3] == pytest.approx(
        calibrated_score(Isotonic(scores=(0, 1, 2), shares=(0.1, 0.2, 0.3)), np.array([-5.0, 1.0, 2.0, 9.0])).tolist()
    )


@pytest.mark.parametrize(
    "changes", [{"scores": (1, 0)}, {"shares": (0.2, 0.1)}, {"shares": (0.1, 0.2, 0.3)}, {"shares": (0.1, 2.0)}]
)
def test_an_isotonic_calibration_rises(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Isotonic"):
        Isotonic(**{"scores": (0, 1), "shares": (0.1, 0.2), **changes})
