"""Rotations spread every channel of a state over all, and change no product."""

from __future__ import annotations

import numpy as np
import pytest

from sds.models.files.rotation import block_rotation, rotated_matrix, rotation
from tests.models.comparing import farthest


@pytest.mark.parametrize("width", [1, 2, 9, 64, 128, 576, 896])
def test_a_rotation_keeps_lengths_and_spreads_every_channel(width: int) -> None:
    made = rotation(width)
    matrix, rows = made.matrix, np.random.default_rng(1).standard_normal((5, width)).astype(np.float32)
    assert farthest(made.rotate(rows), rows @ matrix.T) < 1e-5
    assert farthest(matrix @ matrix.T, np.eye(width)) < 1e-5
    assert np.abs(matrix).max() <= np.sqrt(2 / width) + 1e-6


@pytest.mark.parametrize("inner", [1, 2, 24, 64, 96, 1536])
def test_a_rotation_of_blocks_spreads_every_channel_evenly(inner: int) -> None:
    made = block_rotation(inner)
    matrix = made.matrix
    assert 0 == inner % len(matrix)
    assert farthest(matrix @ matrix.T, np.eye(len(matrix))) < 1e-6
    assert farthest(np.abs(matrix), np.full_like(matrix, len(matrix) ** -0.5)) < 1e-6
    weights = np.random.default_rng(2).standard_normal((3, inner)).astype(np.float32)
    states = np.random.default_rng(3).standard_normal((4, inner)).astype(np.float32)
    turned = (states.reshape(-1, len(matrix)) @ matrix.T).reshape(states.shape)
    assert farthest(states @ weights.T, turned @ rotated_matrix(weights, made).T) < 1e-4
