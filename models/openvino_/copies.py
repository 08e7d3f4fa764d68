"""Several copies of one OpenVINO graph in one model, of which each call runs one.

OpenVINO prepares itself for each new number of tokens, at the cost of reading a dozen; a copy for one number never does. The
past is copied for it: 0.5 ms for 350 tokens, 5 ms for 2,000. Copies share weights, laid out once for each place in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino.op.util import BodyOutputDescription, InvariantInputDescription

JOINED = 1, 0  # the axes along which the logits, and the keys and values, are concatenated


def one_of(models: Sequence[ov.Model]) -> ov.Model:
    """Return a model that runs the one of `models` that its last input names. Its outputs are those of all models end
    to end; the others give empty ones.
    """
    inputs = [
        made_input(of.get_friendly_name(), of.partial_shape, of.element_type) for of in models[0].get_parameters()
    ]
    inputs.append(made_input("which", [], ov.Type.i64))
    answers = [_if_named(n, model, inputs) for n, model in enumerate(models)]
    of_tokens, of_kv = zip(*answers, strict=True)
    outputs = [ops.concat(list(each), axis).output(0) for each, axis in zip((of_tokens, of_kv), JOINED, strict=True)]
    return ov.Model(outputs, inputs, models[0].get_friendly_name())


def _if_named(n: int, model: ov.Model, inputs: Sequence[Any]) -> list[ov.Output]:
    *given, which = (each.output(0) for each in inputs)
    chosen = ops.if_op(ops.equal(which, ops.constant(np.int64(n))).output(0))
    empty = [_nothing_like(output, axis) for output, axis in zip(model.outputs, JOINED, strict=True)]
    nothing = ov.Model([each.output(0) for each in empty], [], "nothing")
    chosen.set_then_body(model)
    chosen.set_else_body(nothing)
    # all at once: `set_input` would go through every operation for each input
    chosen.set_arguments([chosen.input_value(0), *given])
    chosen.set_output_size(len(model.outputs))
    chosen.set_input_descriptions(0, [InvariantInputDescription(i + 1, i) for i in range(len(given))])
    chosen.set_input_descriptions(1, [])
    for body in range(2):
        chosen.set_output_descriptions(body, [BodyOutputDescription(i, i) for i in range(len(model.outputs))])
    chosen.constructor_validate_and_infer_types()
    return list(chosen.outputs())


def _nothing_like(output: ov.Output, axis: int) -> Any:
    sizes = [1 if size.is_dynamic else size.get_length() for size in output.partial_shape]
    return ov.op.Constant(output.element_type, ov.Shape([*sizes[:axis], 0, *sizes[axis + 1 :]]), [])


def made_input(name: str, shape: list[int] | ov.PartialShape, kind: ov.Type) -> Any:
    made = ops.parameter(ov.PartialShape(shape), kind, name=name)
    made.output(0).set_names({name})
    return made
