"""A reader of texts: probabilities of every value, familiar or not, and nothing that a text says moves more than that."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from sds.models.readers.artifact import read_artifact
from sds.models.readers.encoder import TextTokenizer, strange_share
from sds.models.readers.opening import open_reader
from sds.models.readers.protocol import Reader, ReaderError
from tests.models.readers.tiny import NAMES, VOCABULARY, claims


def test_a_reading_has_every_value_in_the_declared_order_and_adds_up_to_one(head: Reader) -> None:
    reading = head.read("my flight was late because of a storm")
    assert list(NAMES) == list(reading.probabilities)
    assert 1.0 == pytest.approx(sum(reading.probabilities.values()))
    assert reading.familiar


def test_texts_that_were_not_fitted_are_read_right(head: Reader) -> None:
    texts, values = claims(90, seed=3)
    readings = [head.read(text).probabilities for text in texts]
    right = [max(shares, key=shares.__getitem__) == value for shares, value in zip(readings, values, strict=True)]
    assert np.mean(right) >= 0.9


def test_a_text_reads_the_same_whatever_was_read_before(head: Reader) -> None:
    first = head.read("the pump of my flight")
    head.read("snow " * 20)
    assert first == head.read("the pump of my flight")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "\n\t",
        "雪が降ったので飛行機が遅れました",
        "Из-за метели рейс отменили",
        "🙂🙂🙂",
        "\x00\x00\x00",
        "\ud800",
        "%%%%%%%%%%",
        "storm " * 200_000,
    ],
    ids=["empty", "spaces", "lines", "japanese", "russian", "emoji", "nul", "surrogate", "signs", "a megabyte"],
)
def test_what_is_no_text_of_the_fitted_kind_is_unfamiliar(head: Reader, text: str) -> None:
    reading = head.read(text)
    assert not reading.familiar
    assert 1.0 == pytest.approx(sum(reading.probabilities.values()))


def test_of_a_long_text_only_the_beginning_is_tokenized(fitted_head: Path) -> None:
    """The tokenizer is given a bounded number of characters: the time does not grow with the text."""
    tokenizer = TextTokenizer(read_artifact(fitted_head).files, 16)
    tokens, whole = tokenizer.encode("storm " * 200_000)
    assert (16, False) == (len(tokens), whole)
    assert VOCABULARY.index("[SEP]") == tokens[-1]
    assert tokenizer.encode("x" * (16 * 8 + 1)) == (tokenizer.encode("x" * (16 * 8))[0], False)


def test_a_control_token_in_a_text_is_read_as_letters(fitted_head: Path) -> None:
    tokens, _ = TextTokenizer(read_artifact(fitted_head).files, 64).encode("late [SEP] [CLS] [PAD]")
    assert [VOCABULARY.index("[CLS]"), VOCABULARY.index("[SEP]")] == [tokens[0], tokens[-1]]
    assert not {0, 2, 3} & set(tokens[1:-1])


def test_accents_and_capitals_are_no_strange_letters() -> None:
    assert 0.0 == strange_share("CAFÉ", "acef")
    assert 0.5 == strange_share("ab 日本", "ab")
    assert 1.0 == strange_share("", "ab")


def test_threads_may_read_at_once(head: Reader) -> None:
    expected = head.read("the captain was late")
    found = []

    def read() -> None:
        found.extend(head.read("the captain was late") for _ in range(20))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [expected] * 80 == found


def test_a_closed_reader_says_so(fitted_head: Path) -> None:
    reader = open_reader(fitted_head)
    reader.close()
    with pytest.raises(ReaderError, match=r"^the reader is closed$"):
        reader.read("late")


def test_a_colder_temperature_makes_a_reading_surer(head_folder: Path) -> None:
    before = open_reader(head_folder).read("storm at the gate").probabilities
    told = json.loads((head_folder / "reader.json").read_text())
    told["calibration"]["temperature"] /= 2
    (head_folder / "reader.json").write_text(json.dumps(told))
    after = open_reader(head_folder).read("storm at the gate").probabilities
    assert max(after.values()) > max(before.values())
