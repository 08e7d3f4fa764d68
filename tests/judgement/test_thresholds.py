"""Learn then test with a fixed sequence: what it promises, and that it would not without its parts."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from sds.judgement.thresholds import choose, needed, p_value, sequence


@pytest.mark.parametrize(("wrong", "accepted", "alpha"), [(0, 10, 0.1), (3, 40, 0.05), (7, 200, 0.02), (10, 10, 0.5)])
def test_the_p_value_is_the_binomial_tail(wrong: int, accepted: int, alpha: float) -> None:
    exact = sum(comb(accepted, k) * alpha**k * (1 - alpha) ** (accepted - k) for k in range(wrong + 1))
    assert exact == pytest.approx(p_value(wrong, accepted, alpha))


@pytest.mark.parametrize(("alpha", "least"), [(0.02, 149), (0.05, 59), (0.01, 299)])
def test_so_many_accepted_cases_are_needed(alpha: float, least: int) -> None:
    assert least == needed(alpha, 0.05)
    assert p_value(0, least, alpha) <= 0.05 < p_value(0, least - 1, alpha)


def draw(rng: np.random.Generator, cases: int, rate: float, slope: float) -> tuple[np.ndarray, np.ndarray]:
    """Confidences, and errors the likelier the less confident: above c, rate + slope * (1 - c) of them are wrong.

    They are not calibrated: what is promised does not rest on that.
    """
    confidences = rng.random(cases)
    return confidences, rng.random(cases) < rate + 2 * slope * (1 - confidences)


def calibrated(rng: np.random.Generator, cases: int) -> tuple[np.ndarray, np.ndarray]:
    """Confidences that are right as often as they say, three in a hundred wrong of all."""
    errors = 0.25 * rng.random(cases) ** 8
    return 1 - errors, rng.random(cases) < errors


@pytest.mark.parametrize(("rate", "slope"), [(0.051, 0.0), (0.0, 0.2), (0.0, 0.06), (0.04, 0.03)])
def test_the_error_stays_below_the_bound_as_often_as_promised(rate: float, slope: float) -> None:
    """Of 1,000 draws of labels at most delta may give a threshold whose true rate is above alpha."""
    rng, alpha, delta, broken = np.random.default_rng(7), 0.05, 0.1, 0
    for _ in range(1000):
        tested = sequence(*draw(rng, 100, rate, slope), 4.0, alpha=alpha, delta=delta)
        least = choose(*draw(rng, 400, rate, slope), tested, alpha=alpha, delta=delta).least
        broken += least is not None and rate + slope * (1 - least) > alpha
    assert broken / 1000 <= delta


def test_it_is_not_kept_by_never_deciding() -> None:
    rng, covered = np.random.default_rng(7), list[float]()
    for _ in range(300):
        tested = sequence(*calibrated(rng, 100), 4.0, alpha=0.02, delta=0.05)
        confidences, wrong = calibrated(rng, 400)
        least = choose(confidences, wrong, tested, alpha=0.02, delta=0.05).least
        covered.append(0.0 if least is None else float((confidences >= least).mean()))
    assert np.mean(covered) > 0.6


def test_going_on_after_a_failure_would_break_the_bound() -> None:
    """The most permissive threshold of all that pass on their own: this is what must not be done."""
    rng, alpha, delta, broken = np.random.default_rng(7), 0.05, 0.1, 0
    for _ in range(1000):
        confidences, wrong = draw(rng, 400, 0.051, 0.0)
        for each in np.linspace(0.9, 0.0, 46):
            accepted = confidences >= each
            if p_value(int(wrong[accepted].sum()), int(accepted.sum()), alpha) <= delta:
                broken += 1
                break
    assert broken / 1000 > 2 * delta


def test_it_stops_at_the_first_threshold_that_fails() -> None:
    confidences = np.concatenate([np.full(100, 0.9), np.full(100, 0.8), np.full(2000, 0.7)])
    wrong = np.zeros(2200, dtype=bool)
    wrong[100:140] = True  # between 0.8 and 0.9 it is bad, and over all again good enough
    assert p_value(40, 2200, 0.05) < 0.05
    found = choose(confidences, wrong, (0.9, 0.8, 0.7), alpha=0.05, delta=0.05)
    assert (0.9, 100, 0, 0) == found


def test_the_sequence_begins_where_enough_are_accepted_and_ends_at_everything() -> None:
    tuning = np.linspace(0, 1, 1000)
    tested = sequence(tuning, np.zeros(1000, dtype=bool), 4.0, alpha=0.02, delta=0.05)
    assert tested == tuple(sorted(tested, reverse=True))
    assert 0.0 == tested[-1]
    assert 4 * (tuning >= tested[0]).sum() >= needed(0.02, 0.05)


def test_the_sequence_begins_before_the_errors_of_the_cases_it_is_read_off() -> None:
    tuning = np.linspace(0, 1, 200)
    tested = sequence(0.9 + tuning / 10, tuning < 0.5, 4.0, alpha=0.02, delta=0.05)
    assert 0.95 <= tested[0] <= 0.98


def test_where_nearly_all_is_certain_the_errors_of_the_rest_are_not_taken_in_at_once() -> None:
    """A score: one case in a hundred is not certain, and all errors are among these."""
    rng = np.random.default_rng(7)

    def scored(cases: int) -> tuple[np.ndarray, np.ndarray]:
        errors = np.where(rng.random(cases) < 0.01, rng.uniform(0.0, 0.8, cases), 0.0)
        return 1 - errors, rng.random(cases) < errors

    tested = sequence(*scored(20_000), 0.25, alpha=0.002, delta=0.05)
    assert sum(0.2 < each < 1 for each in tested) > 10
    confidences, wrong = scored(5_000)
    least = choose(confidences, wrong, tested, alpha=0.002, delta=0.05).least
    assert least is not None
    assert 0.3 < least < 1  # decides part of what is not certain
    assert 0.992 < (confidences >= least).mean() < 1


@pytest.mark.parametrize(("tuning", "of_each"), [([], 4.0), ([0.5], 0.0), ([0.9, 0.8], 1.0)])
def test_with_too_little_to_read_a_sequence_off_everything_is_tested_at_once(
    tuning: list[float], of_each: float
) -> None:
    given = np.array(tuning), np.zeros(len(tuning), dtype=bool)
    assert (0.0,) == sequence(*given, of_each, alpha=0.02, delta=0.05)


def test_too_few_labels_give_no_threshold_and_say_how_many_are_missing() -> None:
    found = choose(np.full(60, 0.99), np.zeros(60, dtype=bool), (0.0,), alpha=0.02, delta=0.05)
    assert (None, 60, 0, 89) == found


def test_a_few_errors_among_too_few_labels_need_more_than_none_would() -> None:
    wrong = np.arange(100) < 1
    found = choose(np.full(100, 0.99), wrong, (0.0,), alpha=0.02, delta=0.05)
    assert found.least is None
    assert found.missing > needed(0.02, 0.05) - 100


@pytest.mark.parametrize(("wrong", "accepted", "missing"), [(1, 12, 47), (0, 12, 47), (3, 12, 0), (2, 12, 47)])
def test_a_few_errors_among_a_few_labels_are_no_evidence_that_labels_do_not_help(
    wrong: int, accepted: int, missing: int
) -> None:
    """One error in twelve is more than 0.05, but happens to a reader that errs at 0.05 every other time."""
    found = choose(np.full(accepted, 0.99), np.arange(accepted) < wrong, (0.0,), alpha=0.05, delta=0.05)
    assert (None, accepted, wrong, missing) == found


def test_where_errors_are_more_than_permitted_no_number_of_labels_helps() -> None:
    found = choose(np.full(100, 0.99), np.arange(100) < 10, (0.0,), alpha=0.02, delta=0.05)
    assert (None, 100, 10, 0) == found


def test_no_case_at_all_gives_no_threshold() -> None:
    assert (None, 0, 0, 149) == choose(np.empty(0), np.empty(0, dtype=bool), (0.5, 0.0), alpha=0.02, delta=0.05)
