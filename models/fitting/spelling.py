"""Which words are usual in fitted texts, and which are known, so that a word that is neither is taken for a slip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from sds.models.readers.spelling import LETTERS_MIN, WORD, written

USUAL_MIN = 5  # texts that have a word, so that another is mended to it
KNOWN_MIN = 2  # texts that have a word, so that it stays: the same slip seldom happens twice


def fit_spelling(texts: Sequence[str], vocabulary: Collection[str]) -> bytes:
    """Return the `spelling.json` of texts. `vocabulary`: the words that the tokenizer has a token for; no other is mended to."""
    counts = Counter(word for text in texts for word in set(WORD.findall(text.lower())) if len(word) >= LETTERS_MIN)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    usual = [word for word in ranked if counts[word] >= USUAL_MIN and word in vocabulary]
    known = [word for word in ranked if counts[word] >= KNOWN_MIN and word not in vocabulary]
    return written(usual, known)
