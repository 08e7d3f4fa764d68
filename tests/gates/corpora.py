"""Whether two texts of a corpus are nearly the same: by the sequences of five words that they share."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations

GRAM = 5  # words
SHARED_MAX = 0.3  # of the sequences of the shorter of two texts


def words(text: str) -> list[str]:
    return re.findall("[a-z0-9']+", text.lower())


def nearly_the_same(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return every two texts that share more than one sequence, and too many of the shorter one's; or all of their words."""
    found, places = [_sequences(text) for text in texts], defaultdict[tuple[str, ...], list[int]](list)
    for index, each in enumerate(found):
        for sequence in each:
            places[sequence].append(index)
    shared = Counter(pair for where in places.values() for pair in combinations(where, 2))
    near = [
        (a, b)
        for (a, b), count in shared.items()
        if count > 1 and count >= SHARED_MAX * min(len(found[a]), len(found[b]))
    ]
    alike = defaultdict[str, list[int]](list)
    for index, text in enumerate(texts):
        alike[" ".join(words(text))].append(index)
    near += [(where[0], other) for where in alike.values() for other in where[1:]]
    return [(texts[a], texts[b]) for a, b in near]


def _sequences(text: str) -> set[tuple[str, ...]]:
    said = words(text)
    return {tuple(said[start : start + GRAM]) for start in range(len(said) - GRAM + 1)}
