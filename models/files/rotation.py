"""Orthogonal rotations of states, so that no channel of them stands out where they are rounded to few bits (quantized).

A rotation costs nothing at run time: it is folded into the weights on either side. It is a Kronecker product of small
matrices, which makes the folding cheap. As in QuaRot (arXiv 2404.00456), with fixed signs and without calibration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd

import numpy as np
from numpy.typing import NDArray

from sds.models.protocol import BackendError

ONE = np.float32(1)
BLOCK_MAX = 64


@dataclass(frozen=True, slots=True)
class Rotation:
    """Signs, [width], then the Kronecker product of orthogonal matrices."""

    signs: NDArray[np.float32]
    factors: tuple[NDArray[np.float32], ...]

    @property
    def width(self) -> int:
        return len(self.signs)

    @property
    def matrix(self) -> NDArray[np.float32]:
        """The whole rotation, [width, width]."""
        whole: NDArray[np.float32] = reduce(np.kron, self.factors, np.ones((1, 1), np.float32)) * self.signs
        return whole

    def rotate(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return `rows @ matrix.T`, [., width]."""
        return _multiplied(rows * self.signs, self.factors)


def _multiplied(rows: NDArray[np.float32], factors: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return each row times the Kronecker product of these factors."""
    found, behind = rows, 1
    for factor in reversed(factors):
        size = len(factor)
        if behind == 1:  # many small products, which BLAS computes in the calling thread
            found = found.reshape(len(rows), -1, size) @ factor.T
        else:
            found = factor @ found.reshape(-1, size, behind)
        behind *= size
    return found.reshape(rows.shape)


def rotation(width: int) -> Rotation:
    """Return a rotation that spreads every channel over all: fixed pseudo-random signs, then Hadamard matrices and, for
    the odd factor of the width, a cosine transform (DCT-II).
    """
    bits = np.frombuffer(hashlib.shake_256(b"signs").digest((width + 7) // 8), np.uint8)
    signs = (1.0 - 2.0 * np.unpackbits(bits)[:width]).astype(np.float32)
    even = width & -width
    factors = [_cosines(width // even)]
    while even > 1:
        factors.append(_hadamard(min(even, BLOCK_MAX)))
        even //= len(factors[-1])
    return Rotation(signs, tuple(each for each in factors if len(each) > 1))


def block_rotation(inner: int) -> Rotation:
    """Return a Hadamard rotation that spreads each channel of a block of inner states evenly over the block."""
    block = gcd(inner, BLOCK_MAX)
    return Rotation(np.ones(block, np.float32), (_hadamard(block),))


def _cosines(size: int) -> NDArray[np.float32]:
    rows, columns = np.mgrid[:size, :size]
    waves = np.cos(np.pi / size * (columns + 0.5) * rows) * np.sqrt(2 / size)
    waves[0] /= np.sqrt(2)
    cosines: NDArray[np.float32] = waves.astype(np.float32)
    return cosines


def _hadamard(size: int) -> NDArray[np.float32]:
    found = np.ones((1, 1), np.float32)
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    matrix: NDArray[np.float32] = found / np.sqrt(np.float32(size))
    return matrix


def rotated_matrix(
    matrix: NDArray[np.float32], by: Rotation, *, scales: NDArray[np.float32] | np.float32 = ONE
) -> NDArray[np.float32]:
    """Return a matrix [., width] for rotated states, block by block as wide as the rotation, after dividing each
    channel by its scale. Raises BackendError where a result is not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = matrix if scales is ONE else matrix * scales
        found = by.rotate(scaled.reshape(-1, by.width)).reshape(matrix.shape)
    if not np.isfinite(found).all():
        raise BackendError(
            "some weights are too large to be rotated", hint="choose openvino in bf16 or fp32, or llamacpp"
        )
    return found
