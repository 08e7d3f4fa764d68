"""Quantized products: both factors are whole numbers from -127 to 127, added up exactly.

A normalised row of states has the length of a row of ones. Rotated by a fixed orthogonal matrix, no channel of it
stands out, so one range suits every layer, row and model, and nothing is calibrated on texts. Three kinds of states
have a range for each row, by which the product is multiplied: those read for queries, keys and values, the results of
the attention, and the inner states. In the inner states single channels stand out by far, so these are rotated, too,
block by block, by a small product. Each row of weights has its own range.

Used for all products with weights, except those of the head and of the last layer. Rounding turns NaN into some number.
In the states, which are only added to, NaN stays, and the last layer makes it visible. Of the head only the weights are
in 8 bits: it multiplies few states, so most of its time goes into reading them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from numpy.typing import NDArray

from sds.models.protocol import BackendError

LARGEST = 127
SMALLEST = 1e-30  # the least divisor
RANGE = 4.0  # of a state, whose mean square is one; the few values beyond are clipped
SLIGHT = np.float32(1e-6)  # share of the mean added to a range, so that NaN stays, which a maximum may drop


def check_epsilon(epsilon: float) -> None:
    """Raise BackendError for a norm that may give NaN for a row of zeros: once rounded, that would not show."""
    if epsilon < SMALLEST:
        raise BackendError("the epsilon of its norms is too small for int8", hint="choose bf16 or fp32")


def rounded(states: Any, largest: float = RANGE) -> Any:
    """Return rotated states, whose mean square is one, or others of at most `largest`, rounded to whole numbers."""
    ends = [ops.constant(np.float32(end)) for end in (-largest, largest, -largest, largest)]
    return ops.fake_quantize(states, *ends, 2 * LARGEST + 1)


def rounded_by_row(states: Any) -> tuple[Any, Any]:
    """Return states divided by the largest of their row and rounded, and that largest, [., 1], NaN if any state is NaN."""
    sizes, last = ops.abs(states), ops.constant(np.array([-1]))
    mean = ops.multiply(ops.reduce_mean(sizes, last, True), ops.constant(SLIGHT))
    largest = ops.add(ops.reduce_max(sizes, last, True), ops.add(mean, ops.constant(np.float32(SMALLEST))))
    return rounded(ops.divide(states, largest), 1.0), largest


def rounded_matrix(matrix: NDArray[np.float32]) -> Any:
    """Return a matrix that is stored in 8 bits. Copies share its memory."""
    scales = np.maximum(np.abs(matrix).max(1, keepdims=True), SMALLEST) / LARGEST
    whole = np.rint(matrix / scales).astype(np.int8)
    kept = ov.op.Constant(ov.Tensor(whole), shared_memory=True)
    return ops.multiply(ops.convert(kept, "f32"), ops.constant(scales.astype(np.float32)))
