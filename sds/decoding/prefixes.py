"""Texts of tokens and their beginnings: what must be read of them, so that each gets its probability. Purely tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sds.decoding.probabilities import log_mass

Logits = NDArray[np.float32]
Text = tuple[int, ...]


def follows(texts: Sequence[Text]) -> dict[Text, set[int]]:
    """Return for every beginning of these texts the tokens that come next in one of them."""
    found: dict[Text, set[int]] = {}
    for text in texts:
        for i, token in enumerate(text):
            found.setdefault(text[:i], set()).add(token)
    return found


def longest(beginnings: Iterable[Text]) -> list[Text]:
    """Return those that are no beginning of another."""
    ordered = sorted(filter(None, beginnings))
    return [one for one, other in pairwise([*ordered, ()]) if other[: len(one)] != one]


def note(logp: dict[Text, float], following: dict[Text, set[int]], written: Text, logits: Logits) -> None:
    """Note the log-probability of each token that may follow what was written, once."""
    wanted = following.pop(written, None)
    if wanted is not None:
        mass = log_mass(logits)
        logp.update({(*written, token): float(logits[token]) - mass for token in wanted})
