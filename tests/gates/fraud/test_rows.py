"""The labelled rows to fit and evaluate on."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from sds.gates.fraud.gate import load_fraud_contract
from sds.gates.fraud.labels import labelled, labelled_case
from sds.gates.fraud.rows import DAYS, Row, rows
from sds.gates.fraud.world.texts import read_corpus
from sds.kernel.contract.compiler import Rules
from sds.kernel.envelope.envelope import ESCALATE_ONLY
from sds.kernel.errors import UsageError


def test_the_test_part_has_ten_thousand_rows_by_time(test_rows: list[Row]) -> None:
    assert len(test_rows) > 10_000
    assert sorted(row.day for row in test_rows) == [row.day for row in test_rows]
    first, end = DAYS["test"]
    assert (first, end - 1) == (test_rows[0].day, test_rows[-1].day)
    assert 0.005 < sum(row.label for row in test_rows) / len(test_rows) < 0.02


def test_the_training_part_has_twenty_thousand_rows_before_all_others() -> None:
    train = list(islice(rows("train"), 20_000))
    assert 20_000 == len(train)
    assert DAYS["train"][1] == DAYS["calibrate"][0]
    assert DAYS["calibrate"][1] == DAYS["test"][0]
    assert DAYS["train"][0] == train[0].day


def test_the_same_seed_gives_the_same_rows_alone_and_beside_another_part(test_rows: list[Row]) -> None:
    assert test_rows == [row for row in rows("calibrate", "test") if row.part == "test"]
    assert list(islice(rows("train"), 50)) != list(islice(rows("train", seed=262), 50))


def test_a_row_has_the_whole_snapshot_in_its_types(test_rows: list[Row]) -> None:
    contract = load_fraud_contract()
    rules = Rules(contract)
    assert set(contract.snapshot) == set(test_rows[0].fields)
    assert all(ESCALATE_ONLY != rules.envelope(row.fields) for row in test_rows[:200])


def test_a_label_is_known_only_days_later(test_rows: list[Row]) -> None:
    for row in test_rows:
        assert row.label is (row.known_day is not None) is bool(row.scenario)
        assert row.known_day is None or row.known_day > row.day


def test_another_part_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"^there is no part `tomorrow`$"):
        next(rows("train", "tomorrow"))


def test_every_text_and_every_payment_is_a_label(tmp_path: Path) -> None:
    cases = list(labelled(tmp_path))
    texts = {part: {note.text for notes in read_corpus(part).values() for note in notes} for part in DAYS}
    assert texts == {part: {case.text for case in cases if case.part == part} for part in DAYS}
    of_payments = [case for case in cases if case.fields]
    assert {"note", "risk"} == set(of_payments[0].readings)
    assert {"ALLOW", "CHALLENGE", "BLOCK"} == {case.decision for case in of_payments}
    assert all(case.decision is None for case in cases if not case.fields)


def test_what_the_written_rule_says_of_a_label_is_permitted(test_rows: list[Row]) -> None:
    rules = Rules(load_fraud_contract())
    for row in test_rows[::10]:
        assert labelled_case(row).decision in rules.envelope(row.fields).names
