"""What a reader knows: how far a text's features lie from those that were fitted, and which letters those were written in.

The distance is Mahalanobis' to the nearest value's mean, with one covariance for all values (Lee et al. 2018). It is
computed in the model; how far is too far is set on texts that the fit never saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sds.models.fitting.base import Array
from sds.models.readers.artifact import Familiarity
from sds.models.readers.encoder import plain_letters, strange_share

FAMILIAR_SHARE = 0.99  # of the held-out texts, by their distance
STRANGE_LEAST = 0.05
RIDGE = 0.01  # of the mean variance, added to each: few texts do not fix a covariance
AXES_MAX = 128  # that the distance is measured along: those in which the fitted texts differ most


@dataclass(frozen=True, slots=True)
class Region:
    """`axes` [H, R] makes features comparable; `centres` [K, R] are the values' means, so seen."""

    axes: Array
    centres: Array


def nowhere(width: int, values: int) -> Region:
    """Return a region before anything was fitted."""
    return Region(np.zeros((width, 1), np.float32), np.zeros((values, 1), np.float32))


def fit_region(features: Array, values: NDArray[np.int64], count: int) -> Region:
    """Find means and covariance of features [N, H]; `values` [N] are among `count`."""
    centres = np.stack([features[values == value].mean(axis=0) for value in range(count)]).astype(np.float64)
    apart = features - centres[values]
    covariance = apart.T @ apart / len(features)
    lengths, directions = np.linalg.eigh(
        covariance + RIDGE * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    )
    axes = (directions / np.sqrt(np.maximum(lengths, 1e-12)))[:, ::-1][:, :AXES_MAX]
    return Region(axes.astype(np.float32), (centres @ axes).astype(np.float32))


def letters_of(texts: Sequence[str]) -> str:
    """Return every letter of the texts, small and without accents, in order."""
    return "".join(sorted({letter for text in texts for letter in plain_letters(text)}))[:4096]


def fit_familiarity(distances: NDArray[np.float64], texts: Sequence[str], letters: str) -> Familiarity:
    """Set the limits by held-out texts and their distances [N]."""
    strange = [strange_share(text, letters) for text in texts]
    return Familiarity(
        distance_max=float(np.quantile(distances, FAMILIAR_SHARE, method="higher")) + 1e-6,
        letters=letters,
        strange_max=max(STRANGE_LEAST, float(np.quantile(strange, FAMILIAR_SHARE))),
    )
