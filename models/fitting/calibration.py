"""Fits calibrations on examples that the model never saw.

For several values: a temperature (Guo et al. 2017). For a score: Platt's sigmoid (1999) or isotonic regression
(Zadrozny and Elkan 2002), whichever has the lower log loss when each half of the examples is calibrated on the other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from sds.models.readers.artifact import POINTS_MAX, Isotonic, Sigmoid, Temperature
from sds.models.readers.calibration import Numbers, calibrated_score, softened
from sds.models.readers.protocol import ReaderError

TEMPERATURES = (0.05, 20.0)
SLOPE_MIN = 1e-3
_TINY = 1e-12
Truth = NDArray[np.bool_]


def fit_temperature(logits: Numbers, values: NDArray[np.int64]) -> Temperature:
    """Return the temperature with the lowest log loss. Shapes: logits [N, K], values [N]."""

    def loss(power: float) -> float:
        shares = softened(logits, float(np.exp(power)))
        return -float(np.log(shares[np.arange(len(values)), values] + _TINY).mean())

    found = minimize_scalar(loss, bounds=tuple(np.log(TEMPERATURES)), method="bounded")
    return Temperature(temperature=float(np.exp(found.x)))


def fit_score(scores: Numbers, truth: Truth) -> Sigmoid | Isotonic:
    """Return the calibration of scores [N] for truth [N]. Raises ReaderError where scores do not rise with the truth."""
    if truth.all() or not truth.any():
        raise ReaderError(
            "the examples to calibrate on are all true or all false",
            hint="keep both true and false examples apart from those that are fitted",
        )
    halves = [np.arange(len(scores)) % 2 == part for part in (0, 1)]
    rivals = []
    for fit in (_sigmoid, _isotonic):
        both = all(truth[half].any() and not truth[half].all() for half in halves)
        losses = (
            [_loss(fit(scores[half], truth[half]), scores[~half], truth[~half]) for half in halves] if both else [0.0]
        )
        rivals.append((float(np.mean(losses)), fit))
    _, best = min(rivals, key=lambda rival: rival[0])
    return best(scores, truth)


def _loss(calibration: Sigmoid | Isotonic, scores: Numbers, truth: Truth) -> float:
    shares = np.clip(calibrated_score(calibration, scores), _TINY, 1 - _TINY)
    return -float(np.where(truth, np.log(shares), np.log1p(-shares)).mean())


def _sigmoid(scores: Numbers, truth: Truth) -> Sigmoid:
    fitted = LogisticRegression(C=1e6, max_iter=1000).fit(scores[:, None], truth)
    slope = float(fitted.coef_[0, 0])
    if slope < SLOPE_MIN:
        raise ReaderError(
            "true examples do not get higher scores than false ones", hint="fit on more examples, or on other inputs"
        )
    return Sigmoid(slope=slope, offset=float(fitted.intercept_[0]))


def _isotonic(scores: Numbers, truth: Truth) -> Isotonic:
    """Return an isotonic calibration whose shares stay away from 0 and 1, as far as so few examples can tell."""
    fitted = IsotonicRegression(out_of_bounds="clip").fit(scores, truth.astype(np.float64))
    points, shares = fitted.X_thresholds_, fitted.y_thresholds_
    if len(points) > POINTS_MAX:
        kept = np.linspace(0, len(points) - 1, POINTS_MAX).astype(np.int64)
        points, shares = points[kept], shares[kept]
    least = 1.0 / (len(scores) + 2)
    return Isotonic(scores=tuple(points.tolist()), shares=tuple(np.clip(shares, least, 1 - least).tolist()))
