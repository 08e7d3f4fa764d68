"""A GGUF of the architecture `llama` as an OpenVINO graph: one pass over tokens, which gets their past as input.

The graph holds no state. Inputs: ids and positions [1, tokens]; the mask [rows, 1, longest, past + longest], added to
the attention's scores; the token at each place of the padded rows [rows, longest], and the place of each token on these
rows, end to end [1, tokens]; the tokens whose logits are wanted [outputs]; keys and values of each layer in turn, of
the tokens before [rows, past, width]; with several copies of the graph, the number of the copy to run. Outputs: logits
[1, outputs, vocabulary]; keys and values on the padded rows, end to end [2 x layers, rows, longest, width].

Operations are joined where possible: queries, keys and values are one product, and the last layer continues with the
wanted tokens alone. Only the attention uses padded rows; all else is computed for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from numpy.typing import NDArray

from sds.models.files.llama_weights import ARCHITECTURE, EMBEDDING, HEAD, NORM, LlamaWeights
from sds.models.files.rotation import Rotation, block_rotation, rotated_matrix, rotation
from sds.models.openvino_.copies import made_input, one_of
from sds.models.openvino_.int8 import check_epsilon, rounded, rounded_by_row, rounded_matrix


def graph(
    weights: LlamaWeights,
    *,
    kv_type: ov.Type,
    context: int,
    in_int8: bool = False,
    lengths: Sequence[int] = (),
) -> ov.Model:
    """Return the model, whose output is logits.

    `kv_type`: the type of keys and values. `in_int8`: products with weights are in 8 bits, except those of the last
    layer, and so are the weights of the head (`int8`). `lengths`: a row alone of so many tokens has a copy of its own,
    in this order; the last copy is for all else, and one more input [] says which copy runs.
    """
    drawing = _Graph(weights, kv_type, in_int8=in_int8)
    for_all = drawing.build(context)
    alone = [drawing.build(context, tokens=tokens).clone() for tokens in lengths]
    return one_of([*alone, for_all.clone()]) if lengths else for_all


class _Graph:
    def __init__(self, weights: LlamaWeights, kv_type: ov.Type, *, in_int8: bool) -> None:
        self._weights, self._shape, self._kv_type = weights, weights.shape, kv_type
        if in_int8:
            check_epsilon(weights.shape.epsilon)
        self._rotation = rotation(self._shape.width) if in_int8 else None  # of the states
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Any] = {}
        self._made: dict[str, list[Any]] = {}

    def build(self, context: int, *, tokens: int | None = None) -> ov.Model:
        """Build one copy. `tokens`: of a row alone, so that sizes are known when the graph is compiled."""
        layers = self._shape.layers
        inputs = {
            "ids": made_input("ids", [1, -1], ov.Type.i64),
            "positions": made_input("positions", [1, -1], ov.Type.i64),
            "mask": made_input("mask", [-1, 1, -1, -1], ov.Type.f32),
            "lines": made_input("lines", [-1, -1], ov.Type.i64),
            "places": made_input("places", [1, -1], ov.Type.i64),
            "wanted": made_input("wanted", [-1], ov.Type.i64),
        }
        past = [made_input(f"past.{n}", [-1, -1, self._shape.kv_width], self._kv_type) for n in range(2 * layers)]
        parameters = [*inputs.values(), *past]
        ids, positions, mask, *packed, wanted = inputs.values()
        if tokens is not None:
            ids, positions, packed = self._reshape(ids, 1, tokens), self._reshape(positions, 1, tokens), []
            mask = self._reshape(mask, 1, 1, tokens, -1)
            past = [self._reshape(each, 1, -1, self._shape.kv_width) for each in past]
        padded = self._pad(positions, packed)
        tables = self._once("rope", lambda: [ops.constant(each) for each in self._weights.rope_tables(context)])
        rope = [ops.unsqueeze(ops.gather(table, padded, self._axis(0)), self._ints(2)) for table in tables]
        per_query = ops.concat([mask] * (self._shape.heads // self._shape.key_heads), 2)
        (embedding,) = self._once("embedding", lambda: [_matrix(self._weights[EMBEDDING])])
        states, kept = ops.gather(embedding, ids, self._axis(0)), []
        by = self._rotation
        if by is not None:
            states = _product(states, *self._once("rotated", lambda: [_matrix(by.matrix)]))
        for n in range(layers):
            before = [ops.convert(each, "f32") for each in past[2 * n : 2 * n + 2]]
            last = wanted if n == layers - 1 else None
            states, new = self._layer(n, states, before, per_query, rope, packed, last)
            kept += [ops.convert(each, self._kv_type) for each in new]
        outputs = [self._logits(states, embedding), ops.reshape(ops.concat(kept, 0), self._ints(-1), False)]
        return ov.Model(outputs, parameters, ARCHITECTURE)

    def _logits(self, states: Any, embedding: Any) -> Any:
        """Return the logits. With rotated states the head has 8-bit weights: with few tokens, reading them is what costs."""
        weights, by = self._weights, self._rotation
        scales = weights[NORM]
        if by is None:
            (matrix,) = self._once("head", lambda: [_matrix(weights[HEAD]) if HEAD in weights else embedding])
            return _product(self._norm(states, scales), matrix)

        def rotated() -> list[Any]:
            return [rounded_matrix(rotated_matrix(weights[HEAD if HEAD in weights else EMBEDDING], by, scales=scales))]

        return _product(self._norm(states, np.ones_like(scales)), *self._once("head", rotated))

    def _layer(
        self, n: int, states: Any, past: list[Any], mask: Any, rope: list[Any], packed: list[Any], wanted: Any
    ) -> tuple[Any, list[Any]]:
        """Return the states after layer `n`, only of the `wanted` tokens if these are given, and the keys and values of all."""
        of, shape, weights = f"blk.{n}.", self._shape, self._weights
        queries_keys, values = (shape.heads + shape.key_heads) * shape.head, shape.kv_width

        def projections() -> list[NDArray[np.float32]]:
            query = weights.rope_halves(f"{of}attn_q.weight", shape.heads) * np.float32(shape.head**-0.5)
            key = weights.rope_halves(f"{of}attn_k.weight", shape.key_heads)
            return [np.concatenate([query, key, weights[f"{of}attn_v.weight"]])]

        def inner() -> list[NDArray[np.float32]]:
            """Each by itself, because the operation after the gate is then fused into its product."""
            return [weights[f"{of}{name}.weight"] for name in ("ffn_gate", "ffn_up")]

        rounding = n < shape.layers - 1  # if all layers rounded, NaN would no longer show
        (together,) = self._read(states, f"{of}attn_norm.weight", projections, rounding=rounding, by_row=True)
        to_rope, value = self._cut(self._pad(together, packed), 2, queries_keys, values)
        heads = self._reshape(to_rope, 0, 0, shape.heads + shape.key_heads, shape.head)
        queries, keys = self._cut(self._roped(heads, rope, shape.head), 2, shape.heads, shape.key_heads)
        new = [self._reshape(keys, 0, 0, -1), value]
        attended = self._unpad(self._attention(queries, past, new, mask), packed)
        if wanted is not None:
            states, attended = self._picked(states, wanted), self._picked(attended, wanted)
        states = self._added(states, attended, f"{of}attn_output.weight", rounding=rounding)
        gate, up = self._read(states, f"{of}ffn_norm.weight", inner, rounding=rounding)
        block = block_rotation(shape.inner) if rounding else None
        return self._added(
            states, ops.multiply(ops.swish(gate), up), f"{of}ffn_down.weight", block, rounding=rounding
        ), new

    def _pad(self, each: Any, packed: list[Any]) -> Any:
        """Return the values of tokens, [1, tokens, .], at their places on the padded rows, [rows, longest, .]."""
        return ops.gather(ops.squeeze(each, self._ints(0)), packed[0], self._axis(0)) if packed else each

    def _unpad(self, each: Any, packed: list[Any]) -> Any:
        """Return the values on the padded rows, as wide as all heads, for each token, [1, tokens, .]."""
        if not packed:
            return each
        return ops.gather(self._reshape(each, -1, self._shape.heads * self._shape.head), packed[1], self._axis(0))

    def _read(
        self,
        states: Any,
        norm: str,
        matrices: Callable[[], list[NDArray[np.float32]]],
        *,
        rounding: bool,
        by_row: bool = False,
    ) -> list[Any]:
        """Return the products of the normalised states with these matrices; `rounding`: in 8 bits, where states are rotated.

        `by_row`: with a range for each row, for values that are cut afterwards. Otherwise OpenVINO defers the weights'
        ranges until after the cut, where it knows all sizes, and rounds BF16 values in between once more, which gives
        other bits than in the copy for all.
        """
        scales, by = self._weights[norm], self._rotation
        if by is None:
            read = self._norm(states, scales)
            return [_product(read, each) for each in self._once(norm, lambda: [_matrix(each) for each in matrices()])]
        read = self._norm(states, np.ones(self._shape.width, np.float32))
        made = rounded_matrix if rounding else _matrix
        rotated = self._once(norm, lambda: [made(rotated_matrix(each, by, scales=scales)) for each in matrices()])
        if rounding and by_row:
            small, largest = rounded_by_row(read)
            return [ops.multiply(_product(small, each), largest) for each in rotated]
        read = rounded(read) if rounding else read
        return [_product(read, each) for each in rotated]

    def _added(self, states: Any, found: Any, name: str, block: Rotation | None = None, *, rounding: bool) -> Any:
        """Return the states plus the product of `found` with a matrix. `rounding`: as in `_read`, after `found` is
        rotated block by `block`.
        """
        weights, by = self._weights, self._rotation
        if by is None:
            return ops.add(states, _product(found, *self._once(name, lambda: [_matrix(weights[name])])))

        def matrix() -> NDArray[np.float32]:
            of = weights[name] if block is None else rotated_matrix(weights[name], block)
            return np.ascontiguousarray(rotated_matrix(of.T, by).T)

        if not rounding:
            return ops.add(states, _product(found, *self._once(name, lambda: [_matrix(matrix())])))
        if block is not None and block.width > 1:
            blocks = self._reshape(found, 1, -1, block.width)
            found = self._reshape(_product(blocks, self._same(block.matrix)), 1, -1, self._shape.inner)
        small, largest = rounded_by_row(found)
        product = _product(small, *self._once(name, lambda: [rounded_matrix(matrix())]))
        return ops.add(states, ops.multiply(product, largest))

    def _once(self, name: str, make: Callable[[], list[Any]]) -> list[Any]:
        """Return nodes that every copy shares, made with the first."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def _attention(self, query: Any, past: list[Any], new: list[Any], mask: Any) -> Any:
        """Return the attended values. Queries that share a key's head are stacked, so that no key is copied for them."""
        shape = self._shape
        sharing = shape.heads // shape.key_heads
        key, value = (
            ops.transpose(
                self._reshape(ops.concat([*both], 1), 0, 0, shape.key_heads, shape.head), self._ints(0, 2, 1, 3)
            )
            for both in zip(past, new, strict=True)
        )
        grouped = self._reshape(query, 0, 0, shape.key_heads, sharing, shape.head)
        rows = self._reshape(ops.transpose(grouped, self._ints(0, 2, 3, 1, 4)), 0, shape.key_heads, -1, shape.head)
        scores = ops.matmul(rows, key, False, True)
        found = ops.matmul(ops.softmax(ops.add(scores, mask), -1), value, False, False)
        split = self._reshape(found, 0, shape.key_heads, sharing, -1, shape.head)
        return self._reshape(ops.transpose(split, self._ints(0, 3, 1, 2, 4)), 0, -1, shape.heads * shape.head)

    def _norm(self, states: Any, scales: NDArray[np.float32]) -> Any:
        mean = ops.reduce_mean(ops.power(states, self._number(2)), self._ints(-1), True)
        scale = ops.divide(self._number(1), ops.sqrt(ops.add(mean, self._number(self._shape.epsilon))))
        return ops.multiply(ops.multiply(states, scale), self._same(scales[None, None]))

    def _roped(self, heads: Any, rope: list[Any], size: int) -> Any:
        """Return heads with their rotary embedding, written in the form that OpenVINO fuses into one operation."""
        low, high = self._cut(heads, 3, size // 2, size // 2)
        crossed = ops.concat([ops.multiply(high, self._number(-1)), low], -1)
        return ops.add(ops.multiply(heads, rope[0]), ops.multiply(crossed, rope[1]))

    def _picked(self, states: Any, wanted: Any) -> Any:
        """Return the states of the wanted tokens of all rows, [1, outputs, .]."""
        return ops.gather(self._reshape(states, 1, -1, 0), wanted, self._axis(1))

    def _cut(self, node: Any, axis: int, *lengths: int) -> Any:
        return ops.variadic_split(node, self._axis(axis), self._ints(*lengths)).outputs()

    def _reshape(self, node: Any, *shape: int) -> Any:
        """Return a reshaped node; 0 keeps a size."""
        return ops.reshape(node, self._ints(*shape), True)

    def _ints(self, *numbers: int) -> Any:
        return self._same(np.array(numbers, np.int64))

    def _axis(self, number: int) -> Any:
        return self._same(np.array(number, np.int64))

    def _number(self, number: float) -> Any:
        return self._same(np.array(number, np.float32))

    def _same(self, value: NDArray[Any]) -> Any:
        """Return one node for each constant: with a third fewer nodes, compiling the graph is faster."""
        key = value.dtype.char, value.shape, value.tobytes()
        if key not in self._constants:
            self._constants[key] = ops.constant(value)
        return self._constants[key]


def _product(states: Any, matrix: Any) -> Any:
    return ops.matmul(states, matrix, False, True)


def _matrix(weights: NDArray[np.float32]) -> Any:
    """Return a matrix as a constant; copies of a constant in OpenVINO's own memory share it."""
    return ov.op.Constant(ov.Tensor(weights), shared_memory=True)
