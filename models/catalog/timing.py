"""Measures how fast a file of weights is in a library on the passes of a decision, and how far it is from the exact weights.

A decision's passes: common sections are cached; one pass reads the rest of the case and the forced opening; one goes on
to a choice; some single tokens follow. A library with lookahead reads what may be written along with the case, and
after that rarely more than a few tokens. The texts are fixed: nothing here knows what is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sds.models.catalog.backends import BACKENDS
from sds.models.catalog.batch_variance import batch_variance
from sds.models.facts import Opening
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import Backend, BackendError, Dtype, Library

STATIC_TOKENS, PASSES_TOKENS, AHEAD_TOKENS = 240, (60, 12, 1, 1, 1, 1), (84, 8)
VARIANCE_SLOTS, VARIANCE_CONTEXT = 16, 512
DECISIONS = 6  # timed in a round, after one that is not
PARTS = 12  # of each text, after which next-token distributions are compared
_TEXT = (  # fixed, so that two preparations of the same weights compare the same positions
    "You decide claims of passengers. Choose what the contract permits, and nothing else. Flight UA 1714 from Newark "
    "to Fort Lauderdale was cancelled two hours before departure. The ticket cost 389.40 and was not used.\n"
    "The arrival was 214 minutes late. The airline names thunderstorms over the airport of departure; the weather of "
    "that hour says wind of 12 knots, visibility of ten miles and no precipitation.\n"
    '{"action":"REFUND_TICKET","params":{"amount":389.40},"reason":"CANCELLATION"} '
    '{"action":"DENY","reason":"EXTRAORDINARY"} {"action":"ESCALATE","reason":"UNCERTAIN"}\n'
    "I missed my sister's wedding and nobody at the desk could tell us anything for six hours. Please give me back "
    "what I paid, and for the hotel as well. I have been a customer of yours for eleven years."
)
TEXTS = _TEXT.splitlines()  # four kinds of text that a decision reads or writes

Distributions = list[NDArray[np.float64]]


def decision_times_ms(
    path: Path, library: Library, dtype: Dtype | None, threads: int, clock_s: Callable[[], float]
) -> list[float]:
    """Return the times of the passes of some decisions with cached common sections, after one that is not timed."""
    backend = _open(path, library, dtype, threads, case_tokens=AHEAD_TOKENS[0])
    try:
        text = cycle([token for each in TEXTS for token in backend.tokenize(each.encode(), special=False)])
        shape = AHEAD_TOKENS if backend.lookahead_tokens_max else PASSES_TOKENS
        static, *passes = (list(islice(text, count)) for count in (STATIC_TOKENS, *shape))
        times = [_decision_ms(backend, static, passes, clock_s) for _ in range(1 + DECISIONS)]
    finally:
        backend.close()
    return times[1:]


def _decision_ms(
    backend: Backend, static: list[int], passes: Sequence[list[int]], clock_s: Callable[[], float]
) -> float:
    backend.prefill([static])
    began = clock_s()
    for tokens in passes:
        backend.forward_one(tokens)
    return (clock_s() - began) * 1000


def distributions(path: Path, library: Library, dtype: Dtype | None, threads: int) -> Distributions:
    """Return log-probabilities of the next token at fixed positions of fixed texts, each [vocab_size].

    Raises BackendError where the library does not run these weights on this machine.
    """
    backend = _open(path, library, dtype, threads)
    try:
        return [row for text in TEXTS for row in _next_token_logps(backend, text)]
    finally:
        backend.close()


def _next_token_logps(backend: Backend, text: str) -> Distributions:
    tokens = backend.tokenize(text.encode(), special=False)
    first, *rest = (part.tolist() for part in np.array_split(np.asarray(tokens), PARTS + 1))
    backend.prefill([first])
    return [_log_softmax(backend.forward_one(part)) for part in rest]


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    logp: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return logp


def divergence(exact: Distributions, found: Distributions) -> float:
    """Return the mean KL(exact || found) over all positions, in nats; infinite where one is no distribution."""
    each = [float(np.sum(np.exp(p) * (p - q))) for p, q in zip(exact, found, strict=True)]
    mean = float(np.mean(each))
    return max(0.0, mean) if np.isfinite(mean) else float("inf")


def variance_logp(path: Path, threads: int) -> float | None:
    """Return the batch variance of these weights in llama.cpp, in nats; None where it cannot be measured."""
    try:
        backend = LlamaBackend(path, threads=threads, slots=VARIANCE_SLOTS, n_ctx=VARIANCE_CONTEXT)
    except BackendError:
        return None
    try:
        return round(batch_variance(backend), 6)
    except BackendError:
        return None
    finally:
        backend.close()


def _open(
    path: Path, library: Library, dtype: Dtype | None, threads: int, *, case_tokens: int | None = None
) -> Backend:
    """Open a backend. `case_tokens`: of the pass that is timed; preparations for other passes are left out."""
    backend, warm_up = BACKENDS[library], [case_tokens] if case_tokens else []
    return backend.open(Opening(path=path, dtype=dtype or backend.unsaid_dtype, threads=threads, warm_up=warm_up))
