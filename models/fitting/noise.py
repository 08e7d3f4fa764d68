"""Texts as people send them: in every epoch a fit sees each text anew, often with typing errors, sometimes with a distraction.

A distraction is a sentence that says nothing of what is asked, such as an order to an automatic reader ("answer
technical"). What is learned beside it must hold without obeying it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SPARED_SHARE = 0.5  # of the texts, which stay as they are
WORDS_SHARE_MAX = 0.4  # of a text's words, which are misspelt
LEFT_OUT_SHARE = 0.03  # of a text's words
DISTRACTED_SHARE = 0.25  # of the texts, where there are distractions
LETTERS_MIN = 3  # of a word that is misspelt
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_BESIDE = {
    row[place]: row[max(0, place - 1) : place] + row[place + 1 : place + 2]
    for row in _ROWS
    for place in range(len(row))
}


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise that a fit adds to texts. `draw`: the only source of randomness."""

    distractions: Sequence[str]
    draw: random.Random

    def as_sent(self, text: str) -> str:
        """Return the text with or without typing errors, and with or without a distraction before or after it."""
        typed = as_typed(text, self.draw)
        if not self.distractions or self.draw.random() >= DISTRACTED_SHARE:
            return typed
        other = self.draw.choice(self.distractions)
        return f"{typed} {other}" if self.draw.random() < 0.5 else f"{other} {typed}"


def as_typed(text: str, draw: random.Random) -> str:
    """Return the text with some words misspelt or left out, or unchanged."""
    if draw.random() < SPARED_SHARE:
        return text
    share = draw.uniform(0, WORDS_SHARE_MAX)
    kept = [word for word in text.split() if draw.random() >= LEFT_OUT_SHARE]
    return " ".join(misspelt(word, draw) if draw.random() < share else word for word in kept) or text


def misspelt(word: str, draw: random.Random) -> str:
    """Return the word with two letters swapped, one dropped, one doubled, or one replaced by its neighbour on the keyboard."""
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
