"""Readers learn beside orders that name every value, and are measured with others."""

from __future__ import annotations

from sds.judgement.distractions import NAMING, PLAIN, distractions
from sds.judgement.evaluation.injections import orders
from tests.judgement.claims import contract


def test_every_order_names_every_value_in_words() -> None:
    found = distractions(contract(), "cause")
    assert len(found) == len(PLAIN) + 3 * len(NAMING)
    assert all(any(value in each for each in found) for value in ("fault", "storm", "none"))


def test_none_says_what_a_value_means_for_a_text_may_say_so_in_earnest() -> None:
    meanings = contract().readings["cause"].values.values()
    assert not [each for each in distractions(contract(), "cause") if any(meaning in each for meaning in meanings)]


def test_what_is_learned_beside_is_not_what_is_measured_with() -> None:
    assert not {*distractions(contract(), "cause")} & {*orders(contract())}
