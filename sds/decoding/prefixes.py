"""Prefixes of token texts: which of them a model must read so that every text gets its probability. Purely tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sds.decoding.probabilities import log_mass

Logits = NDArray[np.float32]
Text = tuple[int, ...]


def continuations(texts: Sequence[Text]) -> dict[Text, set[int]]:
    """Return for every proper prefix of these texts, the empty one included, the tokens that follow it in one of them."""
    found: dict[Text, set[int]] = {}
    for text in texts:
        for i, token in enumerate(text):
            found.setdefault(text[:i], set()).add(token)
    return found


def maximal_prefixes(prefixes: Iterable[Text]) -> list[Text]:
    """Return those that are no prefix of another, without the empty one."""
    ordered = sorted(filter(None, prefixes))
    return [one for one, other in pairwise([*ordered, ()]) if other[: len(one)] != one]


def record_logp(logp: dict[Text, float], following: dict[Text, set[int]], written: Text, logits: Logits) -> None:
    """Put into `logp` the log-probability of each continuation of `written`, and take these out of `following`.

    `logits`: what the model says after `written`, shape [vocab_size].
    """
    wanted = following.pop(written, None)
    if wanted is not None:
        mass = log_mass(logits)
        logp.update({(*written, token): float(logits[token]) - mass for token in wanted})
