"""Typing errors are mended to usual words; what is known stays, and what nobody knows stays, too."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sds.models.fitting.familiarity import KNOWN_MIN, USUAL_MIN, fit_spelling
from sds.models.readers.protocol import ReaderError
from sds.models.readers.spelling import LETTERS_MAX, SURE_LETTERS, Spelling, is_one_slip_away, read

USUAL = ("snow", "strike", "the", "storm", "delayed", "delayer", "done", "his", "read", "werent")
LETTERS = st.text("abcl\xe9", max_size=6)


@pytest.mark.parametrize(
    ("typed", "mended"),
    [
        ("snwo", "snow"),  # two changed places
        ("teh", "the"),
        ("strik", "strike"),  # one is missing
        ("stormm", "storm"),  # one too many
        ("stprm", "storm"),  # another
        ("Snwo, strik!", "snow, strike!"),
        ("delayec", "delayed"),  # two are near: the more frequent
        ("drews", "drews"),  # known
        ("snwo0", "snow0"),
        ("sw", "sw"),  # too short to tell
        ("sntorwm", "sntorwm"),  # two slips
        ("zebra 12 -- ?", "zebra 12 -- ?"),
    ],
)
def test_a_slip_is_mended_and_nothing_else(typed: str, mended: str) -> None:
    assert mended == Spelling(USUAL, {"drews"}).mended(typed)


@pytest.mark.parametrize("word", ["dont", "hes", "hrs", "recd", "rea", "Dont", "isnt"])
def test_a_contraction_or_an_abbreviation_is_no_slip_of_a_word_that_says_something_else(word: str) -> None:
    assert word == Spelling((*USUAL, "isn"), ()).mended(word)


@given(LETTERS, LETTERS)
def test_a_slip_is_what_one_edit_makes(word: str, other: str) -> None:
    edits = {word} | {word[:n] + word[n + 1 :] for n in range(len(word))}
    edits |= {word[:n] + letter + word[n:] for n in range(len(word) + 1) for letter in "abcl\xe9"}
    edits |= {word[:n] + letter + word[n + 1 :] for n in range(len(word)) for letter in "abcl\xe9"}
    edits |= {word[:n] + word[n + 1] + word[n] + word[n + 2 :] for n in range(len(word) - 1)}
    assert (other in edits) == is_one_slip_away(word, other)


@given(LETTERS.filter(lambda word: len(word) >= SURE_LETTERS), st.integers(0, 5))
def test_every_word_is_found_by_every_slip(word: str, place: int) -> None:
    spelling = Spelling([word], ())
    typed = word[: place % len(word)] + "z" + word[place % len(word) :]
    assert [word, word] == [spelling.mended(typed), spelling.mended(word)]


@given(st.text(max_size=60))
def test_no_text_fails_and_only_words_change(text: str) -> None:
    spelling = Spelling(USUAL, ())
    once = spelling.mended(text)
    assert [each for each in text if not each.isalpha()] == [each for each in once if not each.isalpha()]


def test_a_longer_word_than_any_is_not_looked_at() -> None:
    """What is looked for grows with the square of a word's length."""
    longest = "x" * LETTERS_MAX
    spelling = Spelling([longest], ())
    assert [longest, longest + "x"] == [spelling.mended(longest[1:]), spelling.mended(longest + "x")]


def test_words_of_enough_texts_are_usual_and_of_two_known() -> None:
    texts = ["Snow again"] * (USUAL_MIN - 1) + ["snow snow xqz"] * KNOWN_MIN + ["snwo"]
    assert {"usual": ["snow"], "known": ["xqz"]} == json.loads(fit_spelling(texts, {"snow", "again"}))


def test_what_was_written_is_read_and_what_is_no_spelling_is_refused() -> None:
    content = fit_spelling(["late late"] * USUAL_MIN, {"late"})
    assert "late" == read(content, {"late"}).mended("laet")
    for bad in (
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"usual": 1, "known": []}',
        b'{"usual": [1], "known": []}',
        b"[" * 100_000,
    ):
        with pytest.raises(ReaderError, match=r"spelling\.json"):
            read(bad, ())
