"""Readers learn beside orders that name every value, and are measured with others."""

from __future__ import annotations

from sds.judgement.distractions import NAMING, PLAIN, distractions
from sds.judgement.evaluation.injections import orders
from tests.judgement.claims import contract


def test_every_order_names_every_value_in_words() -> None:
    found = distractions(contract(), "cause")
    assert len(found) == len(PLAIN) + 3 * len(NAMING)
    assert all(any(value in each for each in found) for value in ("fault", "storm", "none"))


def test_what_a_value_means_is_only_said_in_an_order_that_names_it_for_a_text_may_say_so_in_earnest() -> None:
    for value, meaning in contract().readings["cause"].values.items():
        for each in distractions(contract(), "cause"):
            assert meaning not in each or value.replace("_", " ") in each.replace(meaning, "")


def test_what_is_learned_beside_is_not_what_is_measured_with() -> None:
    assert not {*distractions(contract(), "cause")} & {*orders(contract())}
