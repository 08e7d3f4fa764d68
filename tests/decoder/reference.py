"""The probabilities of a choice at its first token, computed the slow and obvious way."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sds.models.protocol import Backend


def first_token_probabilities(
    backend: Backend, prompt: Sequence[Sequence[int]], written: Sequence[int], options: Sequence[str]
) -> tuple[dict[str, float], float]:
    """Return the share of every option, and Z, where `options` differ in their first byte.

    A token belongs to an option when one of the two is the beginning of the other. One pass, plain loops, no mask.
    """
    backend.begin([])
    backend.begin(prompt[:-1])
    logits = [float(value) for value in backend.step([*prompt[-1], *written])]
    peak = max(logits)
    weights = [math.exp(value - peak) for value in logits]
    mass = dict.fromkeys(options, 0.0)
    for token, weight in enumerate(weights):
        piece = backend.piece(token).decode("utf-8", "replace")
        for option in options:
            if piece and (option.startswith(piece) or piece.startswith(option)):
                mass[option] += weight
    permitted = math.fsum(mass.values())
    return {option: share / permitted for option, share in mass.items()}, permitted / math.fsum(weights)
