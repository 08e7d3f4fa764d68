"""The probabilities of a choice at its first token, computed the slow and obvious way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sds.grammars.language import Language
from sds.grammars.mask import Mask
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


def greedy_action(backend: Backend, prompt: Sequence[Sequence[int]], said: Language, *, forced_as_usual: bool) -> str:
    """Return the action that is written when each token is the likeliest of those permitted.

    `forced_as_usual`: what must come next is spelled as the tokenizer would, as llguidance does; without it any spelling
    is permitted, as in llama.cpp. The whole prompt in one batch, then one token a pass; nothing is skipped.
    """
    mask = Mask(backend.grammar_tokenizer(), said)
    pieces = [backend.piece(token) for token in range(backend.vocab_size)]
    starts = [f'{{"action":"{kind.kind}","params":{{'.encode() for kind in said.envelope.kinds]

    def permitted(data: bytes) -> NDArray[np.bool_]:
        if forced_as_usual:
            return mask.allowed()
        return np.array([bool(piece) and _agree(data + piece, starts) for piece in pieces])

    backend.begin([])
    logits = backend.step([token for section in prompt for token in section])
    data = b""
    while data.count(b'"') < 4:  # {"action":"..."
        token = int(np.where(permitted(data), logits, -np.inf).argmax())
        mask.advance([token])
        data += pieces[token]
        logits = backend.step([token])
    return data.split(b'"')[3].decode()


def _agree(written: bytes, starts: Sequence[bytes]) -> bool:
    return any(start.startswith(written) or written.startswith(start) for start in starts)
