"""What the scores of a choice say, where they say nothing too."""

from __future__ import annotations

import numpy as np
import pytest

from sds.decoding.probabilities import best_of


@pytest.mark.parametrize("noise", [float("nan"), float("inf")])
def test_under_noise_that_is_no_number_every_choice_is_too_close(noise: float) -> None:
    assert (1, True) == best_of(np.array([-9.0, -0.1]), None, noise)


def test_of_equals_the_first_is_best_and_too_close_under_any_noise() -> None:
    equals = np.array([-1.0, -0.5, -0.5])
    assert (1, False) == best_of(equals, None, 0.0)
    assert (1, True) == best_of(equals, None, 1e-9)
