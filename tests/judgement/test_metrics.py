"""Each measure against what it is by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sds.judgement import metrics


def test_accuracy_f1_brier_and_confusion_of_an_enumeration() -> None:
    probabilities = np.array([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
    found = metrics.of_enumeration(["a", "b", "b", "a"], probabilities, ("a", "b"))
    assert 0.75 == found["accuracy"]
    assert metrics.interval(3, 4) == found["accuracy_95"]  # rounded only where it is printed
    assert [[2, 0], [1, 1]] == found["confusion"]
    assert {"cases": 2, "precision": 0.6667, "recall": 1.0, "f1": 0.8} == found["classes"]["a"]
    assert found["macro_f1"] == pytest.approx((0.8 + 2 / 3) / 2, abs=1e-4)
    assert found["brier"] == pytest.approx((0.08 + 0.72 + 0.02 + 0.18) / 4)


@pytest.mark.parametrize(
    ("part", "whole", "ends"),
    [
        (0, 28, (0.0, 0.1234)),  # 1 - 0.025 ** (1 / 28)
        (28, 28, (0.8766, 1.0)),
        (17, 28, (0.4058, 0.7850)),  # R: binom.test(17, 28)
        (1, 2, (0.0126, 0.9874)),
        (20, 1000, (0.0123, 0.0307)),
        (0, 0, (0.0, 1.0)),
    ],
)
def test_an_interval_is_that_of_clopper_and_pearson(part: int, whole: int, ends: tuple[float, float]) -> None:
    assert metrics.interval(part, whole) == pytest.approx(ends, abs=1e-4)


def test_an_interval_misses_the_true_share_one_time_in_twenty_at_most() -> None:
    rng = np.random.default_rng(7)
    for share in (0.02, 0.5, 0.9):
        drawn = rng.binomial(60, share, 2_000)
        missed = sum(not low <= share <= high for low, high in (metrics.interval(int(each), 60) for each in drawn))
        assert missed < 2_000 * 0.065


def test_a_value_that_is_never_there_does_not_count_against_the_macro_f1() -> None:
    found = metrics.of_enumeration(["a", "b"], np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]]), ("a", "b", "c"))
    assert 1.0 == found["macro_f1"]


def test_the_calibration_error_is_of_bins_of_equal_mass() -> None:
    confidences = np.repeat([0.2, 0.9], 75)
    right = np.concatenate([np.arange(75) < 15, np.arange(75) < 45])
    assert 15 == len(metrics.bins_of(confidences, right))
    assert metrics.ece(np.repeat([0.2], 15), np.arange(15) < 3) == pytest.approx(
        sum(abs(0.2 - hit) for hit in [1] * 3 + [0] * 12) / 15
    )
    assert [10] * 15 == [count for _, _, count in metrics.bins_of(confidences, right)]


def test_what_chance_explains_of_a_calibration_error_falls_with_the_cases_and_is_the_same_each_time() -> None:
    rng = np.random.default_rng(3)
    few, many = rng.uniform(0.5, 1.0, 250), rng.uniform(0.5, 1.0, 25_000)
    (mean, most), (later, _) = metrics.ece_by_chance(few), metrics.ece_by_chance(many)
    assert 0.05 < mean < most < 0.15
    assert later == pytest.approx(mean / 10, rel=0.15)
    assert (mean, most) == metrics.ece_by_chance(few)
    assert (0.0, 0.0) == metrics.ece_by_chance(np.ones(100))


@pytest.mark.parametrize(("off", "told"), [(0.0, False), (0.15, True)])
def test_a_calibration_error_is_told_from_chance_only_where_there_is_one(off: float, *, told: bool) -> None:
    rng = np.random.default_rng(4)
    confidences = rng.uniform(0.5, 1.0, 600)
    found = metrics.calibration_error(confidences, rng.random(600) < confidences - off)
    assert told == (found["ece"] > found["ece_by_chance_95"])


def test_average_precision_is_that_of_the_steps_of_recall() -> None:
    truth, scores = np.array([True, False, True, False]), np.array([0.9, 0.8, 0.7, 0.1])
    assert metrics.average_precision(truth, scores) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert 0.5 == metrics.average_precision(truth, np.zeros(4))  # equal scores are one step
    assert 0.0 == metrics.average_precision(np.zeros(4, dtype=bool), scores)


def test_average_precision_is_that_of_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(5)
    truth, scores = rng.random(500) < 0.1, rng.random(500).round(2)
    assert metrics.average_precision(truth, scores) == pytest.approx(sklearn.average_precision_score(truth, scores))


def test_money_is_lost_in_what_is_not_held_when_one_in_a_hundred_good_ones_is() -> None:
    scores = np.linspace(1, 0, 204)
    truth = np.zeros(204, dtype=bool)
    truth[[0, 2, 5, 100]] = True
    amounts = np.full(204, 10.0)
    assert 10.0 == metrics.money_lost(
        truth, scores, amounts, held_share=0.015
    )  # 3 of 200: ranks 1, 3, 4; 0, 2 and 5 are held
    assert 20.0 == metrics.money_lost(truth, scores, amounts, held_share=0.005)  # 1 of 200
    assert 40.0 == metrics.money_lost(truth, np.zeros(204), amounts)  # equal scores: all are held, or none


def test_the_curve_of_risk_goes_from_the_most_certain_on() -> None:
    curve = metrics.risk_coverage(np.array([0.5, 0.9, 0.7]), np.array([True, False, False]), 6)
    assert [(1 / 6, 0.0), (2 / 6, 0.0), (3 / 6, 1 / 3)] == [pytest.approx(each) for each in curve]
    assert metrics.POINTS_MAX >= len(metrics.risk_coverage(np.linspace(0, 1, 5000), np.zeros(5000, dtype=bool), 5000))
