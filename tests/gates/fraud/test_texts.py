"""The corpus and how its texts are drawn: parts that share nothing, values at their rates."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from sds.gates.fraud.rows import Row
from sds.gates.fraud.world.texts import CORPUS, MISLEADS, TELLS, VALUES, Note, read_corpus
from sds.kernel.errors import StateError
from tests.gates.corpora import nearly_the_same

PARTS = ("train", "calibrate", "test")
TEXT_CHARS_MAX = 500


@pytest.fixture(scope="module")
def corpus() -> dict[str, list[Note]]:
    return {part: [note for notes in read_corpus(part).values() for note in notes] for part in PARTS}


def test_there_are_six_hundred_different_texts(corpus: dict[str, list[Note]]) -> None:
    texts = [note.text for part in PARTS for note in corpus[part]]
    assert len(texts) >= 600
    assert len(texts) == len({" ".join(text.lower().split()) for text in texts})


def test_no_two_texts_are_nearly_the_same() -> None:
    texts = [json.loads(line)["text"] for path in sorted(CORPUS.iterdir()) for line in path.read_text().splitlines()]
    assert [] == nearly_the_same(texts)


def test_every_text_is_short_printable_ascii(corpus: dict[str, list[Note]]) -> None:
    for part in PARTS:
        for note in corpus[part]:
            assert note.text.isascii(), note.text
            assert note.text.isprintable(), note.text
            assert 0 < len(note.text) <= TEXT_CHARS_MAX, note.text


def test_each_value_has_as_great_a_share_in_every_part(corpus: dict[str, list[Note]]) -> None:
    counts = {part: Counter(note.value for note in corpus[part]) for part in PARTS}
    for value in VALUES:
        assert sum(counts[part][value] for part in PARTS) >= 120
        shares = [counts[part][value] / counts[part].total() for part in PARTS]
        assert max(shares) - min(shares) < 0.01, (value, shares)


@pytest.mark.parametrize("alone", [True, False])
def test_every_text_of_a_kind_is_drawn_as_often_as_another(test_rows: list[Row], alone: bool) -> None:
    routine = [row for row in test_rows if row.note == "routine" and (row.style == "descriptor") is alone]
    drawn = Counter(row.text for row in routine)
    assert max(drawn.values()) - min(drawn.values()) <= 1


def test_beside_most_payments_stands_a_descriptor_alone(test_rows: list[Row]) -> None:
    routine = [row for row in test_rows if row.note == "routine"]
    assert 0.9 < sum(row.style == "descriptor" for row in routine) / len(routine) < 0.94


def test_a_row_of_the_test_part_has_a_text_of_the_test_part(
    corpus: dict[str, list[Note]], test_rows: list[Row]
) -> None:
    known = {note.text: note.value for note in corpus["test"]}
    assert {row.text for row in test_rows} <= set(known)
    assert all(known[row.text] == row.note for row in test_rows)


def test_in_about_a_third_of_the_frauds_the_text_says_so_and_rarely_beside_a_good_payment(test_rows: list[Row]) -> None:
    frauds = Counter(row.note in TELLS for row in test_rows if row.label)
    good = Counter(row.note for row in test_rows if not row.label)
    assert 0.25 < frauds[True] / frauds.total() < 0.42
    assert 0 < sum(good[value] for value in TELLS) / good.total() < 3 * MISLEADS
    assert 0.02 < good["confirmed"] / good.total() < 0.15
    assert good["routine"] / good.total() > 0.8


def test_a_corpus_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"^the texts in `.*test.jsonl` cannot be read$"):
        read_corpus("test", tmp_path)
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": "a", "value": "routine", "style": "plain"}) + "\n")
    with pytest.raises(
        StateError, match="must have texts of exactly the values takeover, imitation, coached, confirmed, routine"
    ):
        read_corpus("test", tmp_path)


def test_the_package_has_the_three_parts_and_what_was_written_after_the_fit() -> None:
    assert {"later.jsonl", *(f"{part}.jsonl" for part in PARTS)} == {path.name for path in CORPUS.iterdir()}
