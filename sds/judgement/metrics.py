"""Measures of readings and decisions, from arrays alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sds.judgement.thresholds import Flags, Floats, p_value

BINS = 15
POINTS_MAX = 200  # points of a curve
DRAWS, DRAWN_BY = 200, 261  # draws of chance, and their seed
OUTSIDE, INTERVAL_STEP = 0.05, 1e-6  # the probability that an interval misses the true share; how exact its ends are
HELD_SHARE = 0.01  # of the good cases, at most this share is held when money is counted


def of_enumeration(truth: Sequence[str], probabilities: Floats, values: Sequence[str]) -> dict[str, Any]:
    """Return the measures of an enumeration. `probabilities`: shape (cases, values); each row sums to 1."""
    places = np.array([values.index(each) for each in truth], dtype=np.intp)
    said = probabilities.argmax(axis=1)
    confusion = np.zeros((len(values), len(values)), dtype=np.int64)
    np.add.at(confusion, (places, said), 1)
    right = places == said
    classes = {value: _of_class(confusion, place) for place, value in enumerate(values)}
    there = [classes[value]["f1"] for place, value in enumerate(values) if confusion[place].sum()]
    hot = np.eye(len(values))[places]
    return {
        "cases": len(places),
        "accuracy": _rounded(right.mean()),
        "accuracy_95": interval(int(right.sum()), len(right)),
        "macro_f1": _rounded(float(np.mean(there))),
        "brier": _rounded(((probabilities - hot) ** 2).sum(axis=1).mean()),
        **calibration_error(probabilities.max(axis=1), right),
        "classes": classes,
        "confusion": confusion.tolist(),
    }


def interval(part: int, whole: int) -> tuple[float, float]:
    """Return the 95 % interval of a share that was measured on `whole` independent cases (Clopper and Pearson 1934): exact,
    and rather too wide than too narrow. (0, 1) without cases.
    """
    return (1 - _upper(whole - part, whole), _upper(part, whole)) if whole else (0.0, 1.0)


def _upper(part: int, whole: int) -> float:
    """Return the share with which at most `part` of `whole` cases have a probability of 0.025, by bisection."""
    low, high = part / whole, 1.0
    while high - low > INTERVAL_STEP:
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(part, whole, middle) > OUTSIDE / 2 else (low, middle)
    return high


def _at_most(part: int, whole: int, share: float) -> float:
    """Return the binomial probability of at most `part`, summed over the shorter tail."""
    return p_value(part, whole, share) if 2 * part <= whole else 1 - p_value(whole - part - 1, whole, 1 - share)


def of_score(truth: Flags, scores: Floats) -> dict[str, Any]:
    """Return the measures of a score. `truth`: the positive cases."""
    return {
        "cases": len(truth),
        "positive": int(truth.sum()),
        "average_precision": _rounded(average_precision(truth, scores)),
        "brier": _rounded(((scores - truth) ** 2).mean()),
        **calibration_error(scores, truth),
    }


def _of_class(confusion: NDArray[np.int64], place: int) -> dict[str, Any]:
    right, said, there = int(confusion[place, place]), int(confusion[:, place].sum()), int(confusion[place].sum())
    precision, recall = (right / of if of else 0.0 for of in (said, there))
    f1 = 2 * right / (said + there) if said + there else 0.0
    return {"cases": there, "precision": _rounded(precision), "recall": _rounded(recall), "f1": _rounded(f1)}


def bins_of(confidences: Floats, right: Flags) -> list[tuple[float, float, int]]:
    """Return (mean confidence, share right, cases) of 15 bins of equal mass, the least certain first."""
    order = np.argsort(confidences, kind="stable")
    parts = [part for part in np.array_split(order, BINS) if len(part)]
    return [(float(confidences[part].mean()), float(right[part].mean()), len(part)) for part in parts]


def ece(confidences: Floats, right: Flags) -> float:
    """Return the expected calibration error: the mean distance between confidence and share right in 15 bins of equal mass."""
    found = bins_of(confidences, right)
    return sum(count * abs(mean - share) for mean, share, count in found) / max(1, len(confidences))


def ece_by_chance(confidences: Floats) -> tuple[float, float]:
    """Return the calibration error that perfectly calibrated confidences would show on so many cases: its mean, and the
    value that only one draw in twenty exceeds. An error below the second is no evidence of miscalibration.
    """
    rng, exact = np.random.default_rng(DRAWN_BY), np.asarray(confidences)
    drawn = [ece(exact, rng.random(len(exact)) < exact) for _ in range(DRAWS)]
    return float(np.mean(drawn)), float(np.quantile(drawn, 0.95))


def calibration_error(confidences: Floats, right: Flags) -> dict[str, float]:
    """Return the expected calibration error, and the part of it that chance alone explains."""
    mean, most = ece_by_chance(confidences)
    return {
        "ece": _rounded(ece(confidences, right)),
        "ece_by_chance": _rounded(mean),
        "ece_by_chance_95": _rounded(most),
    }


def average_precision(truth: Flags, scores: Floats) -> float:
    """Return the area under precision over recall, summed over steps of recall; equal scores are one step."""
    if not truth.any():
        return 0.0
    order, ends = _ranked(scores)
    hits = np.cumsum(truth[order])
    recall, precision = hits[ends] / hits[-1], hits[ends] / (ends + 1)
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def money_lost(truth: Flags, scores: Floats, amounts: Floats, held_share: float = HELD_SHARE) -> float:
    """Return the amounts of missed true cases when the highest scores are held until `held_share` of the others are held.

    Cases with equal scores are held together or not at all.
    """
    others = int((~truth).sum())
    order, ends = _ranked(scores)
    held_others = np.cumsum(~truth[order])
    may = [int(end) for end in ends if held_others[end] <= held_share * others]
    held = order[: may[-1] + 1] if may else order[:0]
    return float(amounts[truth].sum() - amounts[held][truth[held]].sum())


def _ranked(scores: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the places of the scores, the highest first, and where in that order each run of equal scores ends."""
    order = np.argsort(-scores, kind="stable")
    return order, np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)


def risk_coverage(confidences: Floats, wrong: Flags, cases: int) -> list[tuple[float, float]]:
    """Return at most 200 points (decided share of all `cases`, wrong share of the decided), from the most certain on."""
    order = np.argsort(-confidences, kind="stable")
    errors = np.cumsum(wrong[order])
    counts = np.unique(np.linspace(1, len(order), min(len(order), POINTS_MAX)).round().astype(int))
    return [(float(count / cases), float(errors[count - 1] / count)) for count in counts]


def _rounded(number: Any) -> float:
    return round(float(number), 4)
