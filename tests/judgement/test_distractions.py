"""Readers learn beside orders that name every value, and are measured with others."""

from __future__ import annotations

from sds.judgement.distractions import EXPLAINED_MIN, EXPLAINING, NAMING, PLAIN, distractions
from sds.judgement.evaluation.injections import orders
from tests.judgement.claims import contract

MANY = 3 * EXPLAINED_MIN


def test_every_order_names_every_value_in_words() -> None:
    found = distractions(contract(), "cause", texts=MANY)
    assert len(found) == len(PLAIN) + 3 * (len(NAMING) + len(EXPLAINING))
    assert all(any(value in each for each in found) for value in ("fault", "storm", "none"))


def test_of_few_texts_none_says_what_a_value_means_for_a_text_may_say_so_in_earnest() -> None:
    meanings = contract().readings["cause"].values.values()
    few, many = (distractions(contract(), "cause", texts=texts) for texts in (MANY - 1, MANY))
    assert [] == [each for each in few if any(meaning in each for meaning in meanings)]
    assert all(any(meaning in each for each in many) for meaning in meanings)
    assert {*few} < {*many}


def test_what_is_learned_beside_is_not_what_is_measured_with() -> None:
    assert not {*distractions(contract(), "cause", texts=MANY)} & {*orders(contract())}
