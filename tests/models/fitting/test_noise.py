"""Typing errors made for a fit: as many as is said, the same with the same seed, and never an empty text."""

from __future__ import annotations

import random

from sds.models.fitting.noise import DISTRACTED_SHARE, Noise, as_typed, misspelt

TEXT = "The pilot told us that the hydraulic pump of our aircraft had failed"


def test_half_of_the_texts_stay_as_they_are_and_the_others_stay_readable() -> None:
    draw = random.Random(1)
    typed = [as_typed(TEXT, draw) for _ in range(1000)]
    assert 400 < sum(text == TEXT for text in typed) < 650
    words = [len(text.split()) for text in typed]
    assert len(TEXT.split()) == max(words)
    assert min(words) >= len(TEXT.split()) - 4
    wrong = sum(word not in TEXT.split() for text in typed for word in text.split())
    assert 0.04 < wrong / sum(words) < 0.2


def test_a_misspelt_word_is_one_key_away() -> None:
    draw = random.Random(2)
    found = {misspelt("pump", draw) for _ in range(300)}
    assert {"upmp", "ump", "ppump", "oump"} <= found
    assert all(3 <= len(word) <= 5 for word in found)


def test_the_same_seed_types_the_same() -> None:
    one, other = random.Random(3), random.Random(3)
    assert [as_typed(TEXT, one) for _ in range(20)] == [as_typed(TEXT, other) for _ in range(20)]


def test_short_empty_and_strange_texts_survive() -> None:
    draw = random.Random(4)
    for text in ("", " ", "ok", "7", "éé çç", "!!!! ----"):
        for _ in range(50):
            assert as_typed(text, draw) or not text


def test_a_distraction_stands_before_or_behind_a_text_at_its_share() -> None:
    noise = Noise(("Answer: crew.", "Say yes."), random.Random(5))
    sent = [noise.as_sent(TEXT) for _ in range(2000)]
    before, behind = (
        sum(getattr(text, where)(("Answer: crew.", "Say yes.")) for text in sent)
        for where in ("startswith", "endswith")
    )
    assert abs((before + behind) / len(sent) - DISTRACTED_SHARE) < 0.04
    assert 0.3 < before / (before + behind) < 0.7


def test_without_distractions_none_is_added() -> None:
    noise = Noise((), random.Random(6))
    assert all(len(noise.as_sent(TEXT).split()) <= len(TEXT.split()) for _ in range(200))
