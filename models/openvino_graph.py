"""A GGUF of the architecture `llama` as an OpenVINO graph: one pass over tokens whose past is handed in.

The graph holds no state. Inputs: ids and positions [lines, tokens]; the mask [lines, 1, tokens, held + tokens], added to
the attention's scores; which tokens are answered [outputs], of all lines end to end; then keys and values of each layer in
turn, of the tokens before, [lines, held, cell]; last, of a graph in several copies, which of them runs. Outputs: logits
[1, outputs, vocabulary] (or, of fewer layers, the states that would go into the next one), then keys and values of these
tokens, one behind the other, [2 x layers, lines, tokens, cell].

What may stand together does, for fewer operations: queries, keys and values are one product, and the last layer goes on
with the answered tokens alone.

A file is refused unless every tensor in it is used here and every setting of its architecture is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from numpy.typing import NDArray

from sds.models.gguf_header import GgufFile
from sds.models.openvino_copies import made_input, one_of
from sds.models.openvino_int8 import rounded, rounded_matrix, turn, turned_matrix
from sds.models.protocol import BackendError

ARCHITECTURE = "llama"
KNOWN = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
}
HEAD, ROPE_FACTORS = "output.weight", "rope_freqs.weight"  # a file may lack these
BF16_MAX = 3.38953139e38
_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model: numbers of layers, of query and key heads, of values in a head, of a token's state outside
    and `inner`, of words and positions. Raises ValueError for what is no model.
    """

    layers: int
    heads: int
    key_heads: int
    head: int
    width: int
    inner: int
    words: int
    context: int
    rope_base: float
    epsilon: float

    def __post_init__(self) -> None:
        sizes = self.layers, self.heads, self.key_heads, self.head, self.width, self.inner, self.words, self.context
        if min(sizes) < 1:
            raise ValueError("one of its sizes is not positive")
        if self.heads % self.key_heads or self.head % 2:
            raise ValueError("heads cannot be shared evenly or halved")
        if not (0 < self.rope_base < inf and 0 <= self.epsilon < inf):
            raise ValueError("the base of its rotation or the epsilon of its norms is no number")

    @property
    def cell(self) -> int:
        """How many numbers are the keys of one token in one layer, and how many its values."""
        return self.key_heads * self.head

    def tensors(self, layers: int) -> dict[str, tuple[int, ...]]:
        """Return what a file of so many layers holds, by name, each with its shape."""
        queries, keys, width, inner = self.heads * self.head, self.key_heads * self.head, self.width, self.inner
        of_layer = {
            "attn_norm": (width,),
            "attn_q": (queries, width),
            "attn_k": (keys, width),
            "attn_v": (keys, width),
            "attn_output": (width, queries),
            "ffn_norm": (width,),
            "ffn_gate": (inner, width),
            "ffn_up": (inner, width),
            "ffn_down": (width, inner),
        }
        embedding = {"token_embd.weight": (self.words, width), HEAD: (self.words, width)}
        vectors = {"output_norm.weight": (width,), ROPE_FACTORS: (self.head // 2,)}
        layered = {f"blk.{n}.{part}.weight": shape for n in range(layers) for part, shape in of_layer.items()}
        return embedding | vectors | layered


class Weights:
    """What a GGUF file holds, read as it is asked for. Raises BackendError for what this graph cannot be."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        try:
            self.shape = self._shape()
        except ValueError as error:
            raise BackendError(f"`{path}` does not say what its model is like", hint=str(error)) from error
        self._check()

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        """Return a tensor, de-quantised."""
        values = self._file.tensors[name].values()
        if not -BF16_MAX <= values.min() <= values.max() <= BF16_MAX:
            raise BackendError(f"the weights `{name}` hold what is no number")
        return values

    def rotations(self, context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return cosines and sines by which heads turn at every position, [context, head]."""
        half = self.shape.head // 2
        turns = self.shape.rope_base ** -(np.arange(half, dtype=np.float64) / half)
        if ROPE_FACTORS in self:
            factors = self[ROPE_FACTORS]
            if not factors.all():
                raise BackendError(f"the weights `{ROPE_FACTORS}` hold a zero, by which no rotation is divided")
            turns /= factors
        angles = np.tile(np.outer(np.arange(context), turns), 2)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def turned(self, name: str, heads: int) -> NDArray[np.float32]:
        """Return a projection into heads that turn by halves; GGUF keeps these to turn by neighbours."""
        weights = self[name]
        return weights.reshape(heads, -1, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)

    def _shape(self) -> Shape:
        said = self._settings()

        def number(name: str, kind: type[_N], default: _N | None = None) -> _N:
            value = said.get(name, default)
            if type(value) is not kind:
                raise ValueError(f"its setting `{ARCHITECTURE}.{name}` is {'no number' if name in said else 'missing'}")
            return value

        heads, width = number("attention.head_count", int), number("embedding_length", int)
        head = number("attention.key_length", int, width // max(heads, 1))
        shape = Shape(
            layers=number("block_count", int),
            heads=heads,
            key_heads=number("attention.head_count_kv", int, heads),
            head=head,
            width=width,
            inner=number("feed_forward_length", int),
            words=self._file.lengths.get("tokenizer.ggml.tokens", 0),
            context=number("context_length", int),
            rope_base=number("rope.freq_base", float, 10000.0),
            epsilon=number("attention.layer_norm_rms_epsilon", float),
        )
        if {number(name, int, head) for name in ("rope.dimension_count", "attention.value_length")} != {head}:
            raise _other("its heads turn in part, or keys and values are of two sizes")
        return shape

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the architecture, which must all be known."""
        found = self._file.settings.get("general.architecture", "")
        if found != ARCHITECTURE:
            raise BackendError(
                f"OpenVINO runs GGUF files of the architecture `{ARCHITECTURE}` here, not `{found}`",
                hint="llama.cpp runs it",
            )
        prefix = f"{ARCHITECTURE}."
        names = {name for name in (*self._file.settings, *self._file.lengths) if name.startswith(prefix)}
        if unknown := sorted(name for name in names if name[len(prefix) :] not in KNOWN):
            raise _other(f"its setting `{unknown[0]}` is not known")
        return {name[len(prefix) :]: self._file.settings.get(name) for name in names}

    def _check(self) -> None:
        """Refuse a file with other tensors than are used: it would be another model."""
        # One layer more than there are tensors is lacking in any case: what a file claims costs no more than that.
        needed = self.shape.tensors(min(self.shape.layers, len(self._file.tensors) + 1))
        found = {name: tensor.shape for name, tensor in self._file.tensors.items()}
        if lacking := sorted(needed.keys() - found.keys() - {HEAD, ROPE_FACTORS}):
            raise _other(f"it lacks `{lacking[0]}`")
        if surplus := sorted(found.keys() - needed.keys()):
            raise _other(f"no use for `{surplus[0]}`")
        if wrong := sorted(name for name in found if found[name] != needed[name]):
            raise _other(f"`{wrong[0]}` is of another shape than its settings say")


def _other(why: str) -> BackendError:
    return BackendError(f"OpenVINO does not run this model here: {why}", hint="llama.cpp runs it")


def graph(
    weights: Weights,
    *,
    kept: ov.Type,
    context: int,
    layers: int,
    head: bool,
    in_int8: bool = False,
    copies: int = 1,
) -> ov.Model:
    """Return the model of the first `layers` layers; `head`: it answers with logits, else with states.

    `kept`: in what keys and values are handed in and out. `in_int8`: half of all products are in 8 bits (`openvino_int8`).
    `copies`: several have an input more, which of them runs [].
    """
    drawn = _Graph(weights, kept, in_int8=in_int8).build(context, layers, head=head)
    return one_of([drawn.clone() for _ in range(copies)]) if copies > 1 else drawn


class _Graph:
    def __init__(self, weights: Weights, kept: ov.Type, *, in_int8: bool) -> None:
        self._weights, self._shape, self._kept = weights, weights.shape, kept
        self._turn = turn(self._shape.width) if in_int8 else None  # by which states are turned
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Any] = {}

    def build(self, context: int, layers: int, *, head: bool) -> ov.Model:
        ids, positions = (made_input(name, [-1, -1], ov.Type.i64) for name in ("ids", "positions"))
        mask, wanted = made_input("mask", [-1, 1, -1, -1], ov.Type.f32), made_input("wanted", [-1], ov.Type.i64)
        held = [made_input(f"held.{n}", [-1, -1, self._shape.cell], self._kept) for n in range(2 * layers)]
        turn = [
            ops.unsqueeze(self._rows(table, positions), self._ints(2)) for table in self._weights.rotations(context)
        ]
        per_query = ops.tile(mask, self._ints(1, 1, self._shape.heads // self._shape.key_heads, 1))
        embedding = _matrix(self._weights["token_embd.weight"])
        states, kept = ops.gather(embedding, ids, self._axis(0)), []
        if self._turn is not None and layers:
            states = _product(states, self._turn)
        for n in range(layers):
            before = [ops.convert(each, "f32") for each in held[2 * n : 2 * n + 2]]
            last = wanted if n == layers - 1 else None
            states, new = self._layer(n, states, before, per_query, turn, last)
            kept += [ops.convert(each, self._kept) for each in new]
        answered = states if layers else self._picked(states, wanted)
        if self._turn is not None and layers:
            answered = _product(answered, self._turn.T)
        if layers == self._shape.layers:
            answered = self._norm(answered, self._weights["output_norm.weight"])
        if head:
            matrix = _matrix(self._weights[HEAD]) if HEAD in self._weights else embedding
            answered = ops.matmul(answered, matrix, False, True)
        outputs = [answered, ops.reshape(ops.concat(kept, 0), self._ints(-1), False)] if kept else [answered]
        return ov.Model(outputs, [ids, positions, mask, wanted, *held], ARCHITECTURE)

    def _layer(
        self, n: int, states: Any, held: list[Any], mask: Any, turn: list[Any], wanted: Any
    ) -> tuple[Any, list[Any]]:
        """Return the states after layer `n`, where `wanted` is given of those tokens only, and keys and values of all."""
        of, shape, weights = f"blk.{n}.", self._shape, self._weights
        query = weights.turned(f"{of}attn_q.weight", shape.heads)
        key = weights.turned(f"{of}attn_k.weight", shape.key_heads)
        value = weights[f"{of}attn_v.weight"]
        together, *_ = self._read(states, f"{of}attn_norm.weight", np.concatenate([query, key, value]))
        turning, value = self._cut(together, 2, len(query) + len(key), len(value))
        heads = self._reshape(turning, 0, 0, shape.heads + shape.key_heads, shape.head)
        queries, keys = self._cut(self._turned(heads, turn, shape.head), 2, shape.heads, shape.key_heads)
        new = [self._reshape(keys, 0, 0, -1), value]
        attended = self._attention(queries, held, new, mask)
        if wanted is not None:
            states, attended = self._picked(states, wanted), self._picked(attended, wanted)
        states = self._added(states, attended, weights[f"{of}attn_output.weight"])
        # each by itself, for what follows the gate is then done within its product
        inner = (weights[f"{of}{name}.weight"] for name in ("ffn_gate", "ffn_up"))
        gate, up = self._read(states, f"{of}ffn_norm.weight", *inner, rounding=True)
        return self._added(states, ops.multiply(ops.swish(gate), up), weights[f"{of}ffn_down.weight"]), new

    def _read(self, states: Any, norm: str, *matrices: NDArray[np.float32], rounding: bool = False) -> list[Any]:
        """Return the products of the normalised states with these matrices; `rounding`: in 8 bits, where states are turned."""
        scales = self._weights[norm]
        if self._turn is None:
            read = self._norm(states, scales)
            return [_product(read, matrix) for matrix in matrices]
        read = self._norm(states, np.ones(self._shape.width, np.float32))
        turned = [turned_matrix(matrix, self._turn, scales=scales) for matrix in matrices]
        if not rounding:
            return [_product(read, matrix) for matrix in turned]
        read = rounded(read)
        return [ops.matmul(read, rounded_matrix(matrix), False, True) for matrix in turned]

    def _added(self, states: Any, found: Any, matrix: NDArray[np.float32]) -> Any:
        """Return the states, the product of what was found with this matrix added."""
        if self._turn is not None:
            matrix = np.ascontiguousarray(turned_matrix(matrix.T, self._turn).T)
        return ops.add(states, _product(found, matrix))

    def _attention(self, query: Any, held: list[Any], new: list[Any], mask: Any) -> Any:
        """Queries that share a key's head stand one below the other, so that no key is copied for them."""
        shape = self._shape
        sharing = shape.heads // shape.key_heads
        key, value = (
            ops.transpose(
                self._reshape(ops.concat([*both], 1), 0, 0, shape.key_heads, shape.head), self._ints(0, 2, 1, 3)
            )
            for both in zip(held, new, strict=True)
        )
        grouped = self._reshape(query, 0, 0, shape.key_heads, sharing, shape.head)
        rows = self._reshape(ops.transpose(grouped, self._ints(0, 2, 3, 1, 4)), 0, shape.key_heads, -1, shape.head)
        scores = ops.matmul(ops.multiply(rows, self._number(shape.head**-0.5)), key, False, True)
        found = ops.matmul(ops.softmax(ops.add(scores, mask), -1), value, False, False)
        split = self._reshape(found, 0, shape.key_heads, sharing, -1, shape.head)
        return self._reshape(ops.transpose(split, self._ints(0, 3, 1, 2, 4)), 0, -1, shape.heads * shape.head)

    def _norm(self, states: Any, scales: NDArray[np.float32]) -> Any:
        mean = ops.reduce_mean(ops.power(states, self._number(2)), self._ints(-1), True)
        scale = ops.divide(self._number(1), ops.sqrt(ops.add(mean, self._number(self._shape.epsilon))))
        return ops.multiply(ops.multiply(states, scale), ops.constant(scales[None, None]))

    def _turned(self, heads: Any, turn: list[Any], size: int) -> Any:
        """Written just as OpenVINO knows it, which makes one operation of it."""
        low, high = self._cut(heads, 3, size // 2, size // 2)
        crossed = ops.concat([ops.multiply(high, self._number(-1)), low], -1)
        return ops.add(ops.multiply(heads, turn[0]), ops.multiply(crossed, turn[1]))

    def _rows(self, table: NDArray[np.float32], at: Any) -> Any:
        return ops.gather(ops.constant(table), at, self._axis(0))

    def _picked(self, states: Any, wanted: Any) -> Any:
        """Return the states of these tokens of all lines, [1, outputs, .]."""
        return ops.gather(self._reshape(states, 1, -1, 0), wanted, self._axis(1))

    def _cut(self, node: Any, axis: int, *lengths: int) -> Any:
        return ops.variadic_split(node, self._axis(axis), self._ints(*lengths)).outputs()

    def _reshape(self, node: Any, *shape: int) -> Any:
        """Zero: as long as it was."""
        return ops.reshape(node, self._ints(*shape), True)

    def _ints(self, *numbers: int) -> Any:
        return self._same(np.array(numbers, np.int64))

    def _axis(self, number: int) -> Any:
        return self._same(np.array(number, np.int64))

    def _number(self, number: float) -> Any:
        return self._same(np.array(number, np.float32))

    def _same(self, value: NDArray[Any]) -> Any:
        """Return one node for each constant: a third fewer to look at, again and again, when the graph is compiled."""
        key = value.dtype.char, value.shape, value.tobytes()
        if key not in self._constants:
            self._constants[key] = ops.constant(value)
        return self._constants[key]


def _product(states: Any, weights: NDArray[np.float32]) -> Any:
    return ops.matmul(states, _matrix(weights), False, True)


def _matrix(weights: NDArray[np.float32]) -> Any:
    """Copies of what stands in memory of OpenVINO's own share it."""
    return ov.op.Constant(ov.Tensor(weights), shared_memory=True)
