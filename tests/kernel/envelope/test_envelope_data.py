"""An envelope that was recorded is read back as the same, and anything else is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from sds.kernel.envelope.envelope import DecisionEnvelope, envelope_from_data
from sds.kernel.errors import StoreError
from tests.model_fixtures import refund_envelope
from tests.strategies import envelopes

NUMBERS = ("lo", "hi", "step", "residue", "scale")


@given(envelopes())
def test_an_envelope_read_back_is_equal_and_has_the_same_hash(envelope: DecisionEnvelope) -> None:
    read = envelope_from_data(json.loads(json.dumps(envelope.as_data())), envelope.hash)
    assert envelope == read
    assert envelope.hash == read.hash


@pytest.mark.parametrize("number", range(len(NUMBERS)), ids=NUMBERS)
def test_any_changed_number_of_a_bound_is_refused(number: int) -> None:
    envelope = refund_envelope()
    data: Any = json.loads(json.dumps(envelope.as_data()))
    kind = next(kind for kind in data["kinds"] if kind["params"])
    kind["params"][0][1 + number] += 1
    with pytest.raises(StoreError, match=r"the recorded envelope (is malformed|does not match the recorded hash)"):
        envelope_from_data(data, envelope.hash)


@pytest.mark.parametrize("numbers", [[2, 1, 1, 0, 2], [1, 4, 5, 0, 2], [float("inf"), 1, 1, 0, 2]])
def test_a_bound_that_holds_no_value_is_refused(numbers: list[int]) -> None:
    envelope = refund_envelope()
    data: Any = json.loads(json.dumps(envelope.as_data()))
    kind = next(kind for kind in data["kinds"] if kind["params"])
    kind["params"][0][1:] = numbers
    with pytest.raises(StoreError, match="the recorded envelope is malformed"):
        envelope_from_data(data, envelope.hash)


@pytest.mark.parametrize(
    "data", [None, [], {}, {"kinds": [{}], "rationale_chars_max": 0}, {"kinds": 1, "rationale_chars_max": 0}, "text"]
)
def test_what_is_no_envelope_is_refused(data: object) -> None:
    with pytest.raises(StoreError, match="the recorded envelope is malformed"):
        envelope_from_data(data, refund_envelope().hash)


def test_an_envelope_with_another_hash_is_refused() -> None:
    with pytest.raises(StoreError, match="does not match the recorded hash"):
        envelope_from_data(refund_envelope().as_data(), "0" * 64)
