"""An encoder and its head as one ONNX graph: standard operators, eight-bit weights, one text a run.

    tokens [T] int64 -> features [H] (mean over the T tokens) -> logits [K], and distance [1] of the middle layer from the fitted texts

A head that was fitted to smoothed labels has learned to leave each value a share; this is undone before the logits.

Weights are stored as whole numbers from -64 to 64, one scale a column, and a token's embedding with one scale a row:
with seven bits no product of two neighbours overflows 16 bits, so every processor computes the same sums. Nothing is
masked or padded: a run reads one text, and its numbers do not depend on any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from sds.models.fitting.base import Array, BaseEncoder, BertSizes, layer_names
from sds.models.fitting.familiarity import Region

OPSET = 20  # the first with Gelu
IR_VERSION = 10
STEPS = 64  # a weight is a whole number of steps, from -64 to 64
TABLE_STEPS = 127
SHARE_MIN = 1e-3  # of a value, once smoothing is undone


class _Graph:
    """Collects operators and constants. Every method returns the name of what it computes."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, value: NDArray[np.generic]) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def apply(self, operator: str, *inputs: str, outputs: int = 1, named: str = "", **attributes: Any) -> list[str]:
        names = [named or f"n{len(self.nodes)}_{place}" for place in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names

    def one(self, operator: str, *inputs: str, named: str = "", **attributes: Any) -> str:
        return self.apply(operator, *inputs, named=named, **attributes)[0]

    def linear(self, given: Sequence[str], weight: Array, bias: Array) -> str:
        """Multiply the result of `quantized` by `weight` [out, in] in whole numbers, and add the bias."""
        columns = weight.T
        scale = np.maximum(np.abs(columns).max(axis=0), 1e-12) / STEPS
        steps = np.rint(columns / scale).astype(np.int8)
        numbers, step, zero = given
        product = self.one("MatMulInteger", numbers, self.constant(steps), zero)
        scales = self.one("Mul", step, self.constant(scale.astype(np.float32)))
        scaled = self.one("Mul", self.one("Cast", product, to=TensorProto.FLOAT), scales)
        return self.one("Add", scaled, self.constant(bias))

    def quantized(self, given: str) -> list[str]:
        """Return the numbers as bytes, their step and their zero."""
        return self.apply("DynamicQuantizeLinear", given, outputs=3)

    def mean(self, given: str, *, named: str) -> str:
        """Return the mean over the tokens. [T, H] -> [H]."""
        return self.one("ReduceMean", given, self.constant(np.array([0], np.int64)), keepdims=0, named=named)

    def norm(self, given: str, encoder: BaseEncoder, name: str) -> str:
        weight, bias = (self.constant(encoder.weights[f"{name}.{part}"]) for part in ("weight", "bias"))
        return self.one("LayerNormalization", given, weight, bias, axis=-1, epsilon=encoder.sizes.epsilon)


@dataclass(frozen=True, slots=True)
class Head:
    """`features @ weight.T + bias`: weight [K, H], bias [K]. `smoothing`: of its labels (Szegedy et al. 2016)."""

    weight: Array
    bias: Array
    smoothing: float = 0.0


def encoder_graph(encoder: BaseEncoder, head: Head, region: Region, *, tokens_max: int) -> bytes:
    """Return `encoder` with its head and the region of the fitted texts as an ONNX model."""
    graph = _Graph()
    hidden = _embedded(graph, encoder, tokens_max)
    for layer in range(encoder.sizes.layers):
        hidden = _layer(graph, encoder, layer, hidden)
        if layer + 1 == max(1, encoder.sizes.layers // 2):
            _distance(graph, graph.mean(hidden, named="middle"), region)
    features = graph.mean(hidden, named="features")
    _logits(graph, features, head)
    return _model(graph, encoder.sizes, len(head.bias))


def _logits(graph: _Graph, features: str, head: Head) -> None:
    """Add the head. For shares q of smoothed labels: log((q - smoothing / K) / (1 - smoothing)), none below SHARE_MIN. [K]."""
    product = graph.one("MatMul", features, graph.constant(head.weight.T))
    if not head.smoothing:
        graph.one("Add", product, graph.constant(head.bias), named="logits")
        return
    smoothed = graph.one("Softmax", graph.one("Add", product, graph.constant(head.bias)), axis=-1)
    left, kept, least = (
        graph.constant(np.array([share], np.float32))
        for share in (head.smoothing / len(head.bias), 1 - head.smoothing, SHARE_MIN)
    )
    shares = graph.one("Div", graph.one("Sub", smoothed, left), kept)
    graph.one("Log", graph.one("Max", shares, least), named="logits")


def _distance(graph: _Graph, features: str, region: Region) -> None:
    """Add the distance of the features [H] from the region's centre. [1]."""
    first = graph.constant(np.array([0], np.int64))
    apart = graph.one("Sub", features, graph.constant(region.centre))
    seen = graph.one("MatMul", apart, graph.constant(region.directions))
    squares = graph.one("Mul", graph.one("Mul", seen, seen), graph.constant(region.weights))
    whole = graph.one(
        "Mul", graph.one("ReduceSumSquare", apart, first), graph.constant(np.array([region.rest], np.float32))
    )
    graph.one("Add", graph.one("ReduceSum", squares, first), whole, named="distance")


def _model(graph: _Graph, sizes: BertSizes, values: int) -> bytes:
    inputs = [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["T"])]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, [values]),
        helper.make_tensor_value_info("features", TensorProto.FLOAT, [sizes.hidden]),
        helper.make_tensor_value_info("middle", TensorProto.FLOAT, [sizes.hidden]),
        helper.make_tensor_value_info("distance", TensorProto.FLOAT, [1]),
    ]
    whole = helper.make_graph(graph.nodes, "reader", inputs, outputs, graph.constants)
    model = helper.make_model(whole, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))


def _embedded(graph: _Graph, encoder: BaseEncoder, tokens_max: int) -> str:
    """Add a token's embedding, its position's and the first segment's; then the norm. [T, H]."""
    words = encoder.weights["embeddings.word_embeddings.weight"]
    scale = np.maximum(np.abs(words).max(axis=1, keepdims=True), 1e-12) / TABLE_STEPS
    steps = graph.one("Gather", graph.constant(np.rint(words / scale).astype(np.int8)), "tokens", axis=0)
    scales = graph.one("Gather", graph.constant(scale.astype(np.float32)), "tokens", axis=0)
    found = graph.one("Mul", graph.one("Cast", steps, to=TensorProto.FLOAT), scales)
    places = encoder.weights["embeddings.position_embeddings.weight"][:tokens_max]
    segments = encoder.weights.get("embeddings.token_type_embeddings.weight")
    if segments is not None:
        places = places + segments[0]
    zero, axis = (graph.constant(np.array([0], np.int64)) for _ in range(2))
    placed = graph.one("Slice", graph.constant(places.astype(np.float32)), zero, graph.one("Shape", "tokens"), axis)
    return graph.norm(graph.one("Add", found, placed), encoder, "embeddings.LayerNorm")


def _layer(graph: _Graph, encoder: BaseEncoder, layer: int, hidden: str) -> str:
    names, weights = layer_names(layer), encoder.weights
    context = _attention(graph, encoder, names, hidden)
    mixed = graph.linear(
        graph.quantized(context), weights[names["context"] + ".weight"], weights[names["context"] + ".bias"]
    )
    hidden = graph.norm(graph.one("Add", mixed, hidden), encoder, names["attention_norm"])
    risen = graph.linear(graph.quantized(hidden), weights[names["rise"] + ".weight"], weights[names["rise"] + ".bias"])
    bent = graph.one("Gelu", risen)
    fallen = graph.linear(graph.quantized(bent), weights[names["fall"] + ".weight"], weights[names["fall"] + ".bias"])
    return graph.norm(graph.one("Add", fallen, hidden), encoder, names["output_norm"])


def _attention(graph: _Graph, encoder: BaseEncoder, names: dict[str, str], hidden: str) -> str:
    """Let every token attend to every token, in `heads` heads. [T, H] -> [T, H]."""
    sizes, weights = encoder.sizes, encoder.weights
    width = sizes.hidden // sizes.heads
    scales = {"query": float(width) ** -0.5, "key": 1.0, "value": 1.0}
    weight, bias = (
        np.concatenate([weights[f"{names[part]}.{kind}"] * np.float32(scale) for part, scale in scales.items()])
        for kind in ("weight", "bias")
    )
    whole = graph.linear(graph.quantized(hidden), weight, bias)
    split = graph.one("Reshape", whole, graph.constant(np.array([-1, 3, sizes.heads, width], np.int64)))
    parts = graph.apply("Split", graph.one("Transpose", split, perm=[1, 2, 0, 3]), outputs=3, axis=0, num_outputs=3)
    first = graph.constant(np.array([0], np.int64))
    query, key, value = (graph.one("Squeeze", part, first) for part in parts)
    share = graph.one("Softmax", graph.one("MatMul", query, graph.one("Transpose", key, perm=[0, 2, 1])), axis=-1)
    heads = graph.one("Transpose", graph.one("MatMul", share, value), perm=[1, 0, 2])
    return graph.one("Reshape", heads, graph.constant(np.array([-1, sizes.hidden], np.int64)))
