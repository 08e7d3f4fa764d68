"""States turned by a fixed orthogonal matrix, so that no channel of them stands out where they are rounded.

The turn costs nothing: it is folded into the matrices on either side.
"""

from __future__ import annotations

import hashlib
from math import gcd

import numpy as np
from numpy.typing import NDArray

from sds.models.protocol import BackendError

ONE = np.float32(1)
BLOCK_MAX = 64


def turn(width: int) -> NDArray[np.float32]:
    """Return an orthogonal matrix that spreads every channel over all: signs by chance, always the same, then a cosine
    transform (DCT-II), [width, width].
    """
    bits = np.frombuffer(hashlib.shake_256(b"signs").digest((width + 7) // 8), np.uint8)
    signs = 1.0 - 2.0 * np.unpackbits(bits)[:width]
    rows, columns = np.mgrid[:width, :width]
    waves = np.cos(np.pi / width * (columns + 0.5) * rows) * np.sqrt(2 / width)
    waves[0] /= np.sqrt(2)
    turned: NDArray[np.float32] = (waves * signs).astype(np.float32)
    return turned


def block_turn(inner: int) -> NDArray[np.float32]:
    """Return an orthogonal matrix (of Hadamard) that spreads each channel of a block of inner states evenly over it,
    [block, block].
    """
    found = np.ones((1, 1), np.float32)
    while len(found) < gcd(inner, BLOCK_MAX):
        found = np.block([[found, found], [found, -found]])
    turned: NDArray[np.float32] = found / np.sqrt(np.float32(len(found)))
    return turned


def turned_matrix(
    matrix: NDArray[np.float32], by: NDArray[np.float32], *, scales: NDArray[np.float32] | np.float32 = ONE
) -> NDArray[np.float32]:
    """Return a matrix [., width] for states that are turned, block by block of [block, block], and, each channel, divided
    by its scale.

    Raises BackendError where it is no numbers any more.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        blocks = (matrix * scales).reshape(-1, len(by)) @ by.T
    found: NDArray[np.float32] = blocks.reshape(matrix.shape).astype(np.float32, copy=False)
    if not np.isfinite(found).all():
        raise BackendError("weights are too large to be turned", hint="choose openvino in bf16 or fp32, or llamacpp")
    return found
