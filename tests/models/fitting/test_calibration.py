"""Calibration finds back what made the truth; familiarity tells its own texts from others."""

from __future__ import annotations

import numpy as np
import pytest

from sds.models.fitting.calibration import fit_score, fit_temperature
from sds.models.fitting.familiarity import fit_familiarity, fit_region, letters_of
from sds.models.readers.artifact import Isotonic, Sigmoid
from sds.models.readers.calibration import calibrated_score, softened
from sds.models.readers.protocol import ReaderError


def test_the_temperature_that_made_the_values_is_found() -> None:
    draw = np.random.default_rng(1)
    logits = draw.standard_normal((4000, 5)) * 6
    shares = softened(logits, 3.0)
    values = np.array([draw.choice(5, p=row) for row in shares])
    assert 3.0 == pytest.approx(fit_temperature(logits, values).temperature, rel=0.1)


def test_a_sigmoid_is_found_where_one_made_the_truth() -> None:
    draw = np.random.default_rng(2)
    scores = draw.standard_normal(400) * 2
    truth = draw.random(400) < 1 / (1 + np.exp(-(0.5 * scores - 1)))
    found = fit_score(scores, truth)
    assert isinstance(found, Sigmoid)
    assert (0.5, -1.0) == pytest.approx((found.slope, found.offset), abs=0.3)


def test_isotonic_regression_is_taken_where_a_sigmoid_does_not_fit() -> None:
    draw = np.random.default_rng(3)
    scores = draw.uniform(-3, 3, 4000)
    found = fit_score(scores, draw.random(4000) < np.where(scores > 0, 0.4, 0.1))
    assert isinstance(found, Isotonic)
    assert [0.1, 0.4] == pytest.approx(calibrated_score(found, np.array([-1.5, 1.5])).tolist(), abs=0.05)
    assert 0 < min(found.shares)
    assert max(found.shares) < 1


def test_scores_that_fall_with_the_truth_or_a_truth_of_one_kind_are_refused() -> None:
    scores = np.linspace(-1, 1, 100)
    with pytest.raises(ReaderError, match="all true or all false"):
        fit_score(scores, np.ones(100, np.bool_))
    with pytest.raises(ReaderError, match="do not get higher scores than false ones"):
        fit_score(scores, scores < 0)


def test_the_region_is_where_the_fitted_features_lie() -> None:
    """As far along a direction in which features hardly differ is farther than along one in which they do."""
    draw = np.random.default_rng(4)
    spread = np.array([5, 4, 1, 0.1, 0.1, 0.1])
    region = fit_region(draw.standard_normal((600, 6)) * spread + 20)

    def distance(feature: np.ndarray) -> float:
        apart = feature - region.centre
        return float(region.weights @ (apart @ region.directions) ** 2 + region.rest * (apart @ apart))

    fitted = [distance(draw.standard_normal(6) * spread + 20) for _ in range(400)]
    along, across = np.full(6, 20.0), np.full(6, 20.0)
    along[0] += 5
    across[5] += 5
    assert 2.0 == pytest.approx(np.mean(fitted), rel=0.15)  # one for the directions, one for what is beside them
    assert distance(np.full(6, 20.0)) < 0.1 < distance(along) < max(fitted) < distance(across)


def test_ninety_nine_of_a_hundred_held_out_texts_are_within_the_limits() -> None:
    distances = np.arange(1000, dtype=np.float64)
    found = fit_familiarity(distances, ["late"] * 1000, letters_of(["late"]))
    assert 991 == int((distances <= found.distance_max).sum())
    assert "aelt" == found.letters
