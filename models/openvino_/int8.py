"""Quantized products: both factors as whole numbers from -127 to 127, added up exactly.

A row of states that was normalised has the length of a row of ones. Rotated by a fixed orthogonal matrix no channel of it
stands out, so that one range suits every layer, row and model, and nothing is measured on texts beforehand. For queries, keys and values, of what the attention found and of the
inner states each row has a range of its own, by which the product is multiplied; of the inner states single channels stand
out by far, so that they are rotated, too, block by block, which is a small product of its own. Of weights each row has one.

Used for all products with weights but those of the head and of the last layer. Rounding makes some number of NaN;
in the states, which are only added to, it stays NaN, and in the last layer it spoils what is seen of it. Of the
head only the weights are in 8 bits: it multiplies few states, so that most of its time goes into reading them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from numpy.typing import NDArray

from sds.models.protocol import BackendError

LARGEST = 127
SMALLEST = 1e-30  # nothing is divided by less
RANGE = 4.0  # of a state, whose mean square is one; what few values lie beyond are taken for its end
SLIGHT = np.float32(
    1e-6
)  # of the mean is added to a range: next to nothing, but no number stays none, which a maximum may drop


def check_epsilon(epsilon: float) -> None:
    """Refuse a norm that may make no number of a row of zeros: rounded, that would not show. Raises BackendError."""
    if epsilon < SMALLEST:
        raise BackendError("the epsilon of its norms is too small for int8", hint="choose bf16 or fp32")


def rounded(states: Any, largest: float = RANGE) -> Any:
    """Return rotated states, whose mean square is one, or others that are `largest` at most, on the nearest whole numbers."""
    ends = [ops.constant(np.float32(end)) for end in (-largest, largest, -largest, largest)]
    return ops.fake_quantize(states, *ends, 2 * LARGEST + 1)


def rounded_by_row(states: Any) -> tuple[Any, Any]:
    """Return states divided by the largest of their row and rounded, and that largest, [., 1]: no number if one is none."""
    sizes, last = ops.abs(states), ops.constant(np.array([-1]))
    mean = ops.multiply(ops.reduce_mean(sizes, last, True), ops.constant(SLIGHT))
    largest = ops.add(ops.reduce_max(sizes, last, True), ops.add(mean, ops.constant(np.float32(SMALLEST))))
    return rounded(ops.divide(states, largest), 1.0), largest


def rounded_matrix(matrix: NDArray[np.float32]) -> Any:
    """Return a matrix that is kept in 8 bits. Copies share its memory."""
    scales = np.maximum(np.abs(matrix).max(1, keepdims=True), SMALLEST) / LARGEST
    whole = np.rint(matrix / scales).astype(np.int8)
    kept = ov.op.Constant(ov.Tensor(whole), shared_memory=True)
    return ops.multiply(ops.convert(kept, "f32"), ops.constant(scales.astype(np.float32)))
