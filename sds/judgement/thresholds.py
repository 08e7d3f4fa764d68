"""Chooses the confidence from which decisions are made, so that no more are wrong than a contract permits. Pure.

Learn then test (Angelopoulos, Bates, Candes, Jordan, Lei 2021, arXiv:2110.01052) with fixed-sequence testing:
thresholds are tested from the most to the least cautious, in a sequence fixed beforehand, and the first that fails ends
it. A threshold must refute "among accepted cases more than alpha are wrong". Its p-value is the exact binomial tail,
because the number of wrong cases, given the number of accepted ones, is binomial. So the whole sequence is tested at
the one level delta: with probability 1 - delta over the labels, no threshold passes that should not (section 3 there).
Going on after a failure would give wrong thresholds more than one chance.

A threshold that accepts few cases cannot pass for lack of data: even without any error it needs log(delta) / log(1 -
alpha) of them. So the sequence begins where enough cases are accepted, and where it is most likely to pass. To choose
that from the tested labels would bias the test. Therefore it is chosen from other cases, those that calibrated the
readers, which the test never sees: the sequence is fixed when the test begins, and the guarantee is exact (split
fixed-sequence testing, section 4 there).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil, exp, fsum, lgamma, log, log1p, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STEPS = 24  # thresholds in a sequence, by cases and again by errors; each further one may end the sequence
# Expected errors in a step by errors, at least: in finer steps chance decides which threshold is the last to pass.
ERRORS_OF_STEP = 4
NEEDED_MAX = 20_000  # accepted cases; a gate that needs more needs a better reader
RATE_MIN = 1e-6
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Found(NamedTuple):
    """`least`: the smallest threshold that passed, or None. `accepted`, `wrong`: of the tested cases, at `least`, else
    at the first threshold. `missing`: how many accepted cases were lacking; 0 where more would not help.
    """

    least: float | None
    accepted: int
    wrong: int
    missing: int


def p_value(wrong: int, accepted: int, alpha: float) -> float:
    """Return the probability of at most `wrong` errors in `accepted` cases if each is wrong with probability `alpha`."""
    if wrong >= accepted:
        return 1.0
    whole = lgamma(accepted + 1)
    terms = (
        whole - lgamma(k + 1) - lgamma(accepted - k + 1) + k * log(alpha) + (accepted - k) * log1p(-alpha)
        for k in range(wrong + 1)
    )
    return min(1.0, fsum(exp(term) for term in terms))


def needed(alpha: float, delta: float) -> int:
    """Return the least number of accepted cases, all of them right, that refutes a rate above `alpha` at level `delta`."""
    return ceil(log(delta) / log1p(-alpha))


def sequence(confidences: Floats, wrong: Flags, of_each: float, *, alpha: float, delta: float) -> tuple[float, ...]:
    """Return the thresholds to test, the most cautious first; the last accepts everything.

    `confidences`, `wrong`: of cases that will not be tested, decided in the same way. `of_each`: tested cases for each of
    these. The thresholds lie at equal steps of cases and, where there are many errors, of errors: where most cases are nearly
    certain, as with a score, nearly all errors are among the last few, and a single step of cases would include all of them.
    """
    order = np.argsort(-confidences, kind="stable")
    known = confidences[order]
    first = needed(alpha, delta) / (of_each * len(known)) if len(known) and of_each > 0 else 1.0
    if first >= 1:
        return (0.0,)
    by_cases = np.ceil(np.linspace(first, 1.0, STEPS) * len(known)).astype(int)
    expected = (np.cumsum(wrong[order]) + np.cumsum(1 - known)) / 2  # mean of observed errors and those by confidence
    steps = min(STEPS, int(expected[-1] / ERRORS_OF_STEP))
    by_errors = np.searchsorted(expected, np.linspace(expected[by_cases[0] - 1], expected[-1], steps)) + 1
    counts = np.unique(np.concatenate([by_cases, np.minimum(by_errors, len(known))]))
    chances = [_pass_chance(of_each * count, expected[count - 1] / count, alpha, delta) for count in counts]
    begin = int(np.argmax(chances))
    return (*dict.fromkeys(float(known[count - 1]) for count in counts[begin:-1]), 0.0)


def _pass_chance(accepted: float, rate: float, alpha: float, delta: float) -> float:
    """Return the probability that a threshold passes with this error rate, if it accepts two standard deviations fewer
    cases than expected, because that number varies.
    """
    fewer = int(accepted - 2 * sqrt(accepted))
    most = _most_errors(fewer, alpha, delta)
    return p_value(most, fewer, min(max(rate, RATE_MIN), 1 - RATE_MIN)) if most >= 0 else 0.0


@cache
def _most_errors(accepted: int, alpha: float, delta: float) -> int:
    """Return the most errors with which so many accepted cases pass; -1 where they cannot pass without errors either."""
    most = -1
    while most < accepted and p_value(most + 1, accepted, alpha) <= delta:
        most += 1
    return most


def choose(confidences: Floats, wrong: Flags, thresholds: Sequence[float], *, alpha: float, delta: float) -> Found:
    """Return the last threshold that passes before the first that fails. `thresholds`: fixed before the test, see above."""
    passed: Found | None = None
    for each in thresholds:
        accepted = confidences >= each
        count, errors = int(accepted.sum()), int(wrong[accepted].sum())
        if p_value(errors, count, alpha) > delta:
            return passed or Found(None, count, errors, _missing(count, errors, alpha, delta))
        passed = Found(float(each), count, errors, 0)
    return passed or Found(None, 0, 0, needed(alpha, delta))


def _missing(accepted: int, wrong: int, alpha: float, delta: float) -> int:
    """Return how many more accepted cases are needed, at least, at the same error rate; 0 where no number is enough.

    Where so few cases are no evidence that the true rate exceeds `alpha`: how many there must be without any error.
    """
    if wrong == 0:
        return max(1, needed(alpha, delta) - accepted)
    rate = wrong / accepted
    count = accepted
    while rate < alpha and count <= NEEDED_MAX:
        count = ceil(count * 1.1)
        if p_value(ceil(rate * count), count, alpha) <= delta:
            return count - accepted
    exceeds = 1 - p_value(wrong - 1, accepted, alpha) <= delta
    return 0 if exceeds else max(1, needed(alpha, delta) - accepted)
