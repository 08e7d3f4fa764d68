"""What is familiar to a reader: how far a text lies from the fitted ones, and the letters and words of those.

The last layer has learned to forget all but the values, and finds one in any text; the middle one still knows what a text
is about. There the distance is Mahalanobis' along the directions in which the fitted texts differ most, plus the remainder
outside them, each as a share of its mean. The model computes it; the limit is set on texts that the fit never saw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sds.models.fitting.base import Array
from sds.models.readers.artifact import Familiarity
from sds.models.readers.encoder import plain_letters, strange_share
from sds.models.readers.spelling import LETTERS_MIN, WORD, written

FAMILIAR_SHARE = 0.99  # of the held-out texts, by their distance
STRANGE_LEAST = 0.05
RIDGE = 0.01  # share of the mean variance that is added to each
DIRECTIONS_MAX = 32
USUAL_MIN = 5  # texts with a word, before others are corrected to it
KNOWN_MIN = 2  # texts with a word, before it is left as it is: the same slip rarely happens twice


@dataclass(frozen=True, slots=True)
class Region:
    """For features x [H]: t = (x - centre) @ directions; the distance is weights @ t**2 + rest * |x - centre|**2.

    Shapes: centre [H], directions [H, R], weights [R].
    """

    centre: Array
    directions: Array
    weights: Array
    rest: float


def nowhere(width: int) -> Region:
    """Return an empty region, before anything is fitted."""
    return Region(np.zeros(width, np.float32), np.zeros((width, 1), np.float32), np.zeros(1, np.float32), 0.0)


def fit_region(features: NDArray[np.float64]) -> Region:
    """Return the region of features [N, H]."""
    centre = features.mean(axis=0)
    count = max(1, min(DIRECTIONS_MAX, features.shape[1] // 2, len(features) - 1))
    _, lengths, rows = np.linalg.svd(features - centre, full_matrices=False)
    variances = lengths**2 / len(features)
    along = variances[:count] + RIDGE * variances[:count].mean()
    rest = 1.0 / max(float(variances[count:].sum()), 1e-9)
    weights = 1.0 / np.maximum(along * count, 1e-9) - rest
    return Region(centre.astype(np.float32), rows[:count].T.astype(np.float32), weights.astype(np.float32), rest)


def letters_of(texts: Sequence[str]) -> str:
    """Return every letter of the texts, in lower case and without accents, sorted."""
    return "".join(sorted({letter for text in texts for letter in plain_letters(text)}))[:4096]


def fit_familiarity(distances: NDArray[np.float64], texts: Sequence[str], letters: str) -> Familiarity:
    """Return the limits by held-out texts and their distances [N]."""
    strange = [strange_share(text, letters) for text in texts]
    return Familiarity(
        distance_max=float(np.quantile(distances, FAMILIAR_SHARE, method="higher")) + 1e-6,
        letters=letters,
        strange_max=max(STRANGE_LEAST, float(np.quantile(strange, FAMILIAR_SHARE))),
    )


def fit_spelling(texts: Sequence[str], vocabulary: Collection[str]) -> bytes:
    """Return the `spelling.json` of texts. `vocabulary`: words with a token of their own; only these are corrected to."""
    counts = Counter(word for text in texts for word in set(WORD.findall(text.lower())) if len(word) >= LETTERS_MIN)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    usual = [word for word in ranked if counts[word] >= USUAL_MIN and word in vocabulary]
    known = [word for word in ranked if counts[word] >= KNOWN_MIN and word not in vocabulary]
    return written(usual, known)
