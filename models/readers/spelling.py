"""Corrects typing errors before a text is tokenized: an unknown word becomes the usual word that is one slip away from it.

A misspelt word is cut into tokens that say nothing of it ("strik" is no strike). The usual words were learned with the
reader and lie in its folder, so that no other version of a dictionary changes what a calibrated reader reads.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from sds.models.readers.protocol import ReaderError

LETTERS_MIN, LETTERS_MAX = 3, 24  # of a word that is corrected
SURE_LETTERS = 5  # of a word in which any slip is corrected; a shorter one may be an abbreviation ("recd")
WORD = re.compile(r"[^\W\d_]+")
# Without their apostrophe these are one slip away from words of opposite meaning ("dont", "done").
CONTRACTION = re.compile(
    "(are|ca|could|did|do|does|had|has|have|is|might|must|need|should|was|were|wo|would|ai)nt|im|gonna|wanna|gotta"
    "|(i|you|we|they)(ve|d|ll)|(you|we|they)re|(he|she|it|that|there|here|what|where|who|let)(s|d|ll)"
)


class Spelling:
    """`usual`: the words to correct to, the most frequent first. `known`: other words that stay as they are.

    A slip is one letter too many, too few or wrong, or two swapped neighbours (Damerau 1964). Each usual word is
    indexed by its remainders without one letter, as in SymSpell, so a word costs microseconds.
    """

    def __init__(self, usual: Sequence[str], known: Collection[str]) -> None:
        self._rank = {word: rank for rank, word in enumerate(usual)}
        self._known = {*known, *usual}
        self._by_rest = defaultdict[str, list[str]](list)
        for word in usual:
            for rest in _rests(word):
                self._by_rest[rest].append(word)

    def mended(self, text: str) -> str:
        return WORD.sub(lambda found: self._word(found[0]), text)

    def _word(self, word: str) -> str:
        small = word.lower()
        if not LETTERS_MIN <= len(small) <= LETTERS_MAX or small in self._known or CONTRACTION.fullmatch(small):
            return word
        is_near = is_one_slip_away if len(small) >= SURE_LETTERS else is_swapped
        near = {usual for rest in _rests(small) for usual in self._by_rest.get(rest, ()) if is_near(small, usual)}
        return min(near, key=self._rank.__getitem__) if near else word


def is_one_slip_away(word: str, other: str) -> bool:
    """Return whether one letter too many, too few or wrong, or two swapped neighbours, turn one word into the other."""
    start, shorter = 0, min(len(word), len(other))
    while start < shorter and word[start] == other[start]:
        start += 1
    end = 0
    while end < shorter - start and word[-1 - end] == other[-1 - end]:
        end += 1
    left, right = word[start : len(word) - end], other[start : len(other) - end]
    return max(len(left), len(right)) <= 1 or (len(left) == 2 and left == right[::-1])


def is_swapped(word: str, other: str) -> bool:
    """Return whether two swapped neighbours turn one word into the other."""
    return sorted(word) == sorted(other) and is_one_slip_away(word, other)


def _rests(word: str) -> Iterable[str]:
    return {word, *(word[:place] + word[place + 1 :] for place in range(len(word)))}


def written(usual: Sequence[str], known: Sequence[str]) -> bytes:
    """Return the content of a file for `read`."""
    return json.dumps({"usual": list(usual), "known": list(known)}, indent=0).encode()


def read(content: bytes, vocabulary: Collection[str]) -> Spelling:
    """Parse the content from `written`. `vocabulary`: words with a token of their own, known as well. Raises ReaderError."""
    try:
        stated = json.loads(content)
        usual, known = stated["usual"], stated["known"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReaderError("a spelling.json cannot be read", hint="fit it again") from error
    if not all(isinstance(words, list) and all(isinstance(word, str) for word in words) for words in (usual, known)):
        raise ReaderError("a spelling.json has entries that are not words", hint="fit it again")
    return Spelling(usual, {*known, *vocabulary})
