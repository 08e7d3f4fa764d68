"""Turns a model's outputs into calibrated probabilities. The calibration is fitted in `models.fitting.calibration`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sds.models.readers.artifact import Calibration, Isotonic, Sigmoid

Numbers = NDArray[np.float64]


def softened(logits: Numbers, temperature: float) -> Numbers:
    """Return the probabilities of logits that are divided by `temperature`. [..., K] -> [..., K]."""
    scaled = logits / temperature
    powers = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    shares: Numbers = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def calibrated_score(calibration: Calibration, scores: Numbers) -> Numbers:
    """Return the probability at each score, a logit as the model gives it. [N] -> [N]."""
    if isinstance(calibration, Sigmoid):
        return 1.0 / (1.0 + np.exp(-np.clip(calibration.slope * scores + calibration.offset, -500, 500)))
    if isinstance(calibration, Isotonic):
        return np.interp(scores, calibration.scores, calibration.shares)
    return 1.0 / (1.0 + np.exp(-np.clip(scores / calibration.temperature, -500, 500)))
