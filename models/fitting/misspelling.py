"""Texts as they are typed on a telephone: a fit sees each text anew in every epoch, half the time with typing errors."""

from __future__ import annotations

import random

SPARED_SHARE = 0.5  # of the texts, that stay as they are
WORDS_SHARE_MAX = 0.4  # of a text's words, that are misspelt
LEFT_OUT_SHARE = 0.03  # of its words
LETTERS_MIN = 3  # of a word that is misspelt
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_BESIDE = {
    row[place]: row[max(0, place - 1) : place] + row[place + 1 : place + 2]
    for row in _ROWS
    for place in range(len(row))
}


def as_typed(text: str, draw: random.Random) -> str:
    """Return the text with some words misspelt or left out, or as it is."""
    if draw.random() < SPARED_SHARE:
        return text
    share = draw.uniform(0, WORDS_SHARE_MAX)
    kept = [word for word in text.split() if draw.random() >= LEFT_OUT_SHARE]
    return " ".join(misspelt(word, draw) if draw.random() < share else word for word in kept) or text


def misspelt(word: str, draw: random.Random) -> str:
    """Swap two letters, drop one, type one twice, or hit the key beside it."""
    if len(word) < LETTERS_MIN:
        return word
    place = draw.randrange(len(word) - 1)
    before, letter, following, after = word[:place], word[place], word[place + 1], word[place + 2 :]
    kind = draw.randrange(4)
    if kind == 0:
        return before + following + letter + after
    if kind == 1:
        return before + following + after
    if kind == 2:
        return before + letter * 2 + following + after
    return before + draw.choice(_BESIDE.get(letter.lower()) or letter) + following + after
