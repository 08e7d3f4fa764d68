"""The int8 engine behind the `Backend` protocol: GGUF weights through our own passes in C++ (`native/`).

Weights are rounded to 8 bits, each row with its own range. States are rounded to 15 bits (`int16`) or, where the
processor multiplies bytes, to 8 (`int8`; the last layer and the head keep 15), each token with its own range. Queries
and keys have some 13 bits, values 11, and attention weights 16 or fewer, with ranges that depend only on what the token
sees. VNNI adds bytes up in 32 bits, AVX2 in 16, so there a token's range is widened (by about a third) until no sum can
overflow. States are first rotated (`files.rotation`), so that no channel stands out.

Products are added up in whole numbers, exactly and in any order, and positions that a token does not see add nothing.
So a token has the same bits whatever shares its batch, wherever passes were cut, and with any number of threads. NaN
stays NaN: a row with NaN has no range. `sds models prepare` measures the distance from the exact weights. Rows that
continue one place, as forks do, are read as one tree.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sds.models.cache.kv_cache import ArrayKVCache, BatchRow
from sds.models.cache.prefix_cache import PrefixCachingBackend
from sds.models.cache.token_tree import TokenTree
from sds.models.files.llama_weights import EMBEDDING, HEAD, NORM, LlamaWeights
from sds.models.files.rotation import block_rotation, rotated_matrix, rotation
from sds.models.int8.library import Pass, Sizes, Tree, in_one_piece, kind_here, library, pointer
from sds.models.int8.sources import DTYPES
from sds.models.llamacpp.weights import opening
from sds.models.protocol import CONTEXT_TOKENS, BackendError, Dtype, cause_of, check_slots

BATCH_TOKENS_MAX = 512  # of several trees in a call
PASS_TOKENS_MAX = 2048  # in several calls: the more cases are read together, the more share the small calls after them
HALF_HEAD = 16  # halves of heads are multiples of this
HEAD_MAX = 512
CONTEXT_MAX = 1 << 17  # tokens whose attention weights fit into 31 bits when added up

Trees = Mapping[tuple[int, int], TokenTree]  # by the place they continue: cache slot and position


class PackedModel:
    """Weights, packed for the passes and shared by all engines. `made`: the packed weights in memory."""

    def __init__(self, path: Path, *, dtype: Dtype, n_ctx: int) -> None:
        weights = LlamaWeights(path, "integer passes")
        self.shape = shape = weights.shape
        self.context = min(n_ctx, shape.context, CONTEXT_MAX)
        self.in_bytes = dtype == "int8"
        # numbers of a token's keys, or values: whole numbers, and two more for each head's scale
        self.kv_width = shape.kv_width + 2 * shape.key_heads
        if shape.head % (2 * HALF_HEAD) or shape.head > HEAD_MAX:
            heads = f"heads of multiples of {2 * HALF_HEAD} numbers, up to {HEAD_MAX}"
            raise BackendError(f"integer passes run {heads}", hint="choose llamacpp")
        self._library, self._weights = library(), weights
        self._rotation, self._block = rotation(shape.width), block_rotation(shape.inner)
        of_model = (shape.layers, shape.heads, shape.key_heads, shape.head, shape.width, shape.inner, shape.vocab_size)
        sizes = Sizes(*of_model, self.context, int(self.in_bytes), self._block.width, shape.epsilon)
        self.made = self._library.made("model", ctypes.byref(sizes))
        self._pack()
        del self._weights

    def _pack(self) -> None:
        weights, width = self._weights, self.shape.width
        of_head = HEAD if HEAD in weights else EMBEDDING
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            head = pool.submit(lambda: rotated_matrix(weights[of_head], self._rotation, scales=weights[NORM]))
            embedding = pool.submit(lambda: rotated_matrix(weights[EMBEDDING], self._rotation))
            for _ in pool.map(self._pack_layer, range(self.shape.layers)):
                pass
        half = self.shape.head // 2
        tables = [in_one_piece(table[:, :half]) for table in weights.rope_tables(self.context)]
        ends = [embedding.result(), np.ones(width, np.float32), head.result(), *tables]
        self._library.call("ends", self.made, *(pointer(array) for array in ends))

    def _pack_layer(self, n: int) -> None:
        """Pack a layer. Scales of norms are folded into the matrices that read the states; all are rotated like states."""
        of, shape, weights = f"blk.{n}.", self.shape, self._weights
        query = weights.rope_halves(f"{of}attn_q.weight", shape.heads) * np.float32(shape.head**-0.5)
        key = weights.rope_halves(f"{of}attn_k.weight", shape.key_heads)
        value, output = weights[f"{of}attn_v.weight"], weights[f"{of}attn_output.weight"]
        gate, up, down = (weights[f"{of}ffn_{name}.weight"] for name in ("gate", "up", "down"))
        norms = [weights[f"{of}{name}_norm.weight"] for name in ("attn", "ffn")]
        if self.in_bytes and n < shape.layers - 1:
            down = rotated_matrix(down, self._block)
        ones = np.ones(shape.width, np.float32)
        read = [rotated_matrix(each, self._rotation, scales=norms[0]) for each in (query, key, value)]
        inner = [rotated_matrix(each, self._rotation, scales=norms[1]) for each in (gate, up)]
        added = [rotated_matrix(each.T, self._rotation).T for each in (output, down)]
        arrays = [in_one_piece(array) for array in (ones, *read, added[0], ones, *inner, added[1])]
        self._library.call("layer", self.made, n, *(pointer(array) for array in arrays))


class IntegerBackend(PrefixCachingBackend):
    """One GGUF model of the architecture `llama`. Give each thread its own (`replica`); call `close()` when done."""

    rows_may_be_cut = False
    lookahead_tokens_max = 40
    _kv_cache: ArrayKVCache

    def __init__(
        self,
        path: Path,
        *,
        dtype: Dtype | None = None,
        n_ctx: int = CONTEXT_TOKENS,
        threads: int | None = None,
        slots: int = 1,
        fingerprint: str | None = None,
        model: PackedModel | None = None,
    ) -> None:
        """Load weights. Raises BackendError when `path` cannot run here.

        `dtype`: what states are rounded to; by default the faster one. `fingerprint`: of the file, where known.
        `model`: the packed weights of the file, for a replica.
        """
        check_slots(slots)
        kind_here()
        dtype = dtype or DTYPES[0]
        if dtype not in DTYPES:
            raise BackendError(f"integer passes do not support the dtype {dtype}", hint=f"choose {' or '.join(DTYPES)}")
        self._path, self._dtype, self.name = path, dtype, path.name
        self._output = np.empty(0, np.int16)
        with (
            opening(path, fingerprint) as (words, template, self._free_words, self.fingerprint),
            _failing(f"integer passes cannot run `{path}`"),
        ):
            self._model = model or PackedModel(path, dtype=dtype, n_ctx=n_ctx)
            planes = 2 * self._model.shape.layers
            kv_cache = ArrayKVCache((planes, self._model.context, self._model.kv_width), np.int16, slots)
            self._engine = library().made("engine", self._model.made, threads or os.cpu_count() or 1)
        self.vocab_size, self.context_tokens_max = words.size, self._model.context
        super().__init__(slots=slots, words=words, template=template, kv_cache=kv_cache)
        self.pass_tokens_max = PASS_TOKENS_MAX

    def replica(self, *, threads: int, slots: int = 1) -> IntegerBackend:
        """Return another backend over the same weights, for another thread."""
        self._ready()
        return self._replica(dtype=self._dtype, threads=threads, slots=slots, model=self._model)

    def prefill(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        self._ready()
        library().wake(self._engine)
        super().prefill(sections, slot=slot)

    def _call(self, rows: Sequence[BatchRow]) -> list[NDArray[np.float32]]:
        trees: dict[tuple[int, int], TokenTree] = {}
        of_tree: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}  # rows, and where their tokens are in the tree
        for n, row in enumerate(rows):
            place = self._kv_cache.prefix(row.slot, row.position)
            path = trees.setdefault(place, TokenTree(*place)).add(row.tokens)
            of_tree.setdefault(place, []).append((n, path))
        logits: dict[int, NDArray[np.float32]] = {}
        for group in _groups(trees):
            starts = accumulate((len(trees[place].tokens) for place in group), initial=0)
            numbered = zip(group, starts, strict=False)
            paths = {n: [at + start for at in path] for place, start in numbered for n, path in of_tree[place]}
            logits |= self._run(rows, paths, [trees[place] for place in group])
        return [logits[n] for n in range(len(rows))]

    def _run(
        self, rows: Sequence[BatchRow], paths: Mapping[int, list[int]], trees: Sequence[TokenTree]
    ) -> dict[int, NDArray[np.float32]]:
        """Run some trees in one call; return the logits of their rows. `paths`: a row's tokens, by index in the call.

        A row without outputs also has its last logits computed: they show whether the keys and values are numbers.
        """
        ends = {n: path[len(path) - max(1, rows[n].outputs) :] for n, path in paths.items()}
        wanted = sorted({at for end in ends.values() for at in end})
        answered, new = self._infer(trees, wanted)
        logits, index = {}, {at: n for n, at in enumerate(wanted)}
        for n, path in paths.items():
            at = [index[token] for token in ends[n]]
            contiguous = at[-1] - at[0] == len(at) - 1  # a slice copies nothing
            found = answered[at[0] : at[-1] + 1] if contiguous else answered[at]
            self._kv_cache.append(rows[n], new, path, found)
            logits[n] = found[len(found) - rows[n].outputs :]
        return logits

    def _infer(
        self, trees: Sequence[TokenTree], wanted: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
        """Return logits of the wanted tokens, [wanted, vocab_size], and keys and values of all, [2 x layers, tokens, width]."""
        self._kv_cache.flush()
        shape = self._model.shape
        ids = np.array([token for tree in trees for token in tree.tokens], np.int64)
        positions = np.concatenate([np.add(tree.depths, tree.position, dtype=np.int64) for tree in trees])
        masks = [np.ascontiguousarray(tree.attention_mask()) for tree in trees]
        pasts = [self._kv_cache.memory(tree.root) for tree in trees]
        of_trees, first = (Tree * len(trees))(), 0
        for made, tree, mask, past in zip(of_trees, trees, masks, pasts, strict=True):
            count, plane = len(tree.tokens), past.shape[1] * past.shape[2]
            made.cells, made.sees, made.plane = pointer(past), pointer(mask), plane
            made.held, made.first, made.count = tree.position, first, count
            first += count
        asked, logits = np.array(wanted, np.int64), np.empty((len(wanted), shape.vocab_size), np.float32)
        new = self._new(2 * shape.layers, len(ids), self._model.kv_width)
        given, made_of = (pointer(ids), pointer(positions)), (pointer(asked), pointer(logits), pointer(new))
        numbers = (len(ids), len(trees), len(asked), shape.layers, int(False))  # no hidden states
        library().call("run", self._engine, ctypes.byref(Pass(*given, ctypes.addressof(of_trees), *made_of, *numbers)))
        return logits, new

    def _new(self, *sizes: int) -> NDArray[np.int16]:
        """Return memory for the keys and values of a call; the next call overwrites it."""
        if self._output.size < (size := prod(sizes)):
            self._output = np.empty(0, np.int16)  # frees the old array first
            self._output = np.empty(size, np.int16)
        return self._output[:size].reshape(sizes)

    def _failing(self, what: str) -> AbstractContextManager[None]:
        return _failing(what)

    def _free(self) -> None:
        self._free_words()
        del self._engine, self._model, self._kv_cache, self._output


def _groups(trees: Trees) -> Iterator[list[tuple[int, int]]]:
    """Split trees into calls, in order, each as large as possible."""
    group, tokens = list[tuple[int, int]](), 0
    for place, tree in trees.items():
        if group and tokens + len(tree.tokens) > BATCH_TOKENS_MAX:
            yield group
            group, tokens = [], 0
        group.append(place)
        tokens += len(tree.tokens)
    if group:
        yield group


@contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise BackendError(f"{what}: no memory", hint="use a smaller model or prompt") from error
    except OSError as error:
        raise BackendError(f"{what}: {cause_of(error)}") from error
