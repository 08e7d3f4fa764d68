"""GGUF weights through passes of this project's own, behind the `Backend` protocol: products added up in whole numbers.

Weights are rounded to 8 bits, each row with a range of its own; states to 15 bits or, where the processor multiplies bytes,
to 8, each token with a range of its own; queries, keys, values and what weight they have likewise. What is multiplied is then
added up exactly, in any order, and what a token does not see adds nothing: so a token's numbers are the same bits whatever
else stands in its pass, wherever the passes were cut, and however many threads ran it. Rows that go on from one place, as
forks do, are read as one tree.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sds.models.cache.kv_cache import ArrayKVCache
from sds.models.cache.prefix_caching import Part, PrefixCachingBackend
from sds.models.cache.token_tree import TokenTree
from sds.models.files.fingerprint import gguf_fingerprint, identity
from sds.models.files.llama_weights import EMBEDDING, HEAD, NORM, Weights
from sds.models.files.rotation import block_turn, turn, turned_matrix
from sds.models.int8.library import Pass, Sizes, Tree, in_one_piece, kind_here, library, pointer
from sds.models.llamacpp.weights import words_of
from sds.models.protocol import CONTEXT_TOKENS, BackendError, Dtype, Row, check_slots

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES: tuple[Dtype, ...] = ("int8", "int16")
CALL_TOKENS_MAX = 512  # of several trees in a call
PASS_TOKENS_MAX = 2048  # in several calls: the more cases are read in turn, the more share the small calls after them
HALF_HEAD = 16  # halves of heads are multiples of these
HEAD_MAX = 512
CONTEXT_MAX = 1 << 17  # tokens whose weights are added up in 31 bits


def usual_dtype() -> Dtype:
    """Return in what states are rounded where nobody says it: the quicker one."""
    return DTYPES[0]


def check_dtype(dtype: Dtype) -> None:
    """Raises BackendError for what is not computed in here."""
    if dtype not in DTYPES:
        raise BackendError(f"integer passes do not compute in {dtype}", hint=f"choose {' or '.join(DTYPES)}")


class _Model:
    """Weights, packed, which serve every engine."""

    def __init__(self, path: Path, *, dtype: Dtype, n_ctx: int) -> None:
        weights = Weights(path, "integer passes")
        self.shape = shape = weights.shape
        self.context = min(n_ctx, shape.context, CONTEXT_MAX)
        self.in_bytes = dtype == "int8"
        # of a token's keys, or values: whole numbers, and two for each head's scale
        self.kept = shape.cell + 2 * shape.key_heads
        if shape.head % (2 * HALF_HEAD) or shape.head > HEAD_MAX:
            heads = f"heads of multiples of {2 * HALF_HEAD} numbers, up to {HEAD_MAX}"
            raise BackendError(f"integer passes run {heads}", hint="llama.cpp runs it")
        self._library, self._weights = library(), weights
        self.turn, self._block = turn(shape.width), block_turn(shape.inner)
        sizes = Sizes(
            *(
                shape.layers,
                shape.heads,
                shape.key_heads,
                shape.head,
                shape.width,
                shape.inner,
                shape.words,
                self.context,
            ),
            *(int(self.in_bytes), self._block.width, shape.epsilon),
        )
        self.made = self._library.made("model", ctypes.byref(sizes))
        try:
            self._pack()
        except BaseException:
            self.free()
            raise
        del self._weights
        self._packed = True

    def free(self) -> None:
        self._library.free("model", self.made)

    def __del__(self) -> None:
        if hasattr(self, "_packed"):
            self.free()

    def _pack(self) -> None:
        weights, width = self._weights, self.shape.width
        of_head = HEAD if HEAD in weights else EMBEDDING
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            head = pool.submit(lambda: turned_matrix(weights[of_head], self.turn, scales=weights[NORM]))
            turned = pool.submit(lambda: turned_matrix(weights[EMBEDDING], self.turn))
            for _ in pool.map(self._pack_layer, range(self.shape.layers)):
                pass
        half = self.shape.head // 2
        tables = [in_one_piece(table[:, :half]) for table in weights.rotations(self.context)]
        ends = [turned.result(), np.ones(width, np.float32), head.result(), *tables]
        self._library.call("ends", self.made, *(pointer(array) for array in ends))

    def _pack_layer(self, n: int) -> None:
        """Norms' scales are folded into what reads the states, and all is turned as these are."""
        of, shape, weights = f"blk.{n}.", self.shape, self._weights
        query = weights.turned(f"{of}attn_q.weight", shape.heads) * np.float32(shape.head**-0.5)
        key = weights.turned(f"{of}attn_k.weight", shape.key_heads)
        value, output = weights[f"{of}attn_v.weight"], weights[f"{of}attn_output.weight"]
        gate, up, down = (weights[f"{of}ffn_{name}.weight"] for name in ("gate", "up", "down"))
        norms = [weights[f"{of}{name}_norm.weight"] for name in ("attn", "ffn")]
        if self.in_bytes and n < shape.layers - 1:
            down = turned_matrix(down, self._block)
        ones = np.ones(shape.width, np.float32)
        read = [turned_matrix(each, self.turn, scales=norms[0]) for each in (query, key, value)]
        inner = [turned_matrix(each, self.turn, scales=norms[1]) for each in (gate, up)]
        added = [turned_matrix(each.T, self.turn).T for each in (output, down)]
        arrays = [in_one_piece(array) for array in (ones, *read, added[0], ones, *inner, added[1])]
        self._library.call("layer", self.made, n, *(pointer(array) for array in arrays))


class IntegerBackend(PrefixCachingBackend):
    """One GGUF model of the architecture `llama`. Give each thread its own (`beside`); call `close()` when done."""

    rows_may_be_cut = False
    usual_dtype = staticmethod(usual_dtype)
    lookahead_tokens_max = 40
    _store: ArrayKVCache

    def __init__(
        self,
        path: Path,
        *,
        dtype: Dtype | None = None,
        n_ctx: int = CONTEXT_TOKENS,
        threads: int | None = None,
        slots: int = 1,
        fingerprint: str | None = None,
        model: _Model | None = None,
    ) -> None:
        """Load weights; raise `BackendError` when `path` is nothing that runs here.

        `dtype`: what states are rounded to, left out: `usual_dtype`. `fingerprint`: of the file, where it was just looked
        at. `model`: of the file, where it was packed already.
        """
        check_slots(slots)
        kind_here()
        dtype = dtype or usual_dtype()
        check_dtype(dtype)
        seen = identity(path)
        self.name = path.name
        self.fingerprint = fingerprint or gguf_fingerprint(path)
        words, template, self._free_words = words_of(path)
        self._path, self._dtype = path, dtype
        self._cells = np.empty(0, np.int16)
        try:
            with _failing(f"integer passes cannot run `{path}`"):
                self._model = model or _Model(path, dtype=dtype, n_ctx=n_ctx)
                shape = self._model.shape
                store = ArrayKVCache((2 * shape.layers, self._model.context, self._model.kept), np.int16, slots)
                if identity(path) != seen:
                    raise BackendError(f"`{path}` was changed while it was opened", hint="open it again")
                self._engine = library().made("engine", self._model.made, threads or os.cpu_count() or 1)
        except BaseException:
            self._free_words()
            raise
        self.vocab_size = words.size
        self.context_tokens_max = self._model.context
        super().__init__(slots=slots, words=words, template=template, store=store)
        self.pass_tokens_max = PASS_TOKENS_MAX

    def replica(self, *, threads: int, slots: int = 1) -> IntegerBackend:
        """Return another backend over the same weights, for another thread."""
        self._ready()
        shared: dict[str, Any] = {"fingerprint": self.fingerprint, "model": self._model}
        made = IntegerBackend(self._path, dtype=self._dtype, threads=threads, slots=slots, **shared)
        made.name = self.name
        return made

    def prefill(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        self._ready()
        library().wake(self._engine)
        super().prefill(sections, slot=slot)

    def _call(self, parts: Sequence[Part]) -> list[NDArray[np.float32]]:
        trees: dict[tuple[int, int], TokenTree] = {}
        riding: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
        for n, part in enumerate(parts):
            place = self._store.place(part.seat, part.position)
            path = trees.setdefault(place, TokenTree(*place)).add(part.tokens)
            riding.setdefault(place, []).append((n, path))
        found: dict[int, NDArray[np.float32]] = {}
        for group in _groups(trees):
            starts = accumulate((len(trees[place].tokens) for place in group), initial=0)
            every = zip(group, starts, strict=False)
            paths = {n: [at + start for at in path] for place, start in every for n, path in riding[place]}
            found |= self._run(parts, paths, [trees[place] for place in group])
        return [found[n] for n in range(len(parts))]

    def _run(
        self, parts: Sequence[Part], paths: Mapping[int, list[int]], trees: Sequence[TokenTree]
    ) -> dict[int, NDArray[np.float32]]:
        """Run some trees in a call; return what each part on them is answered. `paths`: where its tokens are in the call."""
        ends = {n: path[len(path) - max(1, parts[n].outputs) :] for n, path in paths.items()}
        wanted = sorted({at for end in ends.values() for at in end})
        answered, cells = self._infer(trees, wanted)
        found, numbers = {}, {at: n for n, at in enumerate(wanted)}
        for n, path in paths.items():
            places = [numbers[at] for at in ends[n]]
            answers = answered[places[0] : places[-1] + 1] if _in_one_piece(places) else answered[places]
            self._append(parts[n], cells, path, answers)
            found[n] = answers[len(answers) - parts[n].outputs :]
        return found

    def _append(self, part: Part, cells: NDArray[np.int16], path: list[int], answers: NDArray[np.float32]) -> None:
        """Keep what a part appended; of what is no number nothing.

        Such logits end the decision of whoever asked for them; where nobody did, it raises.
        """
        numbers = bool(np.isfinite(answers).all())
        if not numbers and not part.outputs:
            raise BackendError("the model answered with what is no number")
        kept = cells if numbers else np.zeros_like(cells)
        breaks = [] if _in_one_piece(path) else [n for n in range(1, len(path)) if path[n] != path[n - 1] + 1]
        for start, end in pairwise([0, *breaks, len(path)]):
            self._store.note(part.seat, part.position + start, kept[:, path[start] : path[start] + end - start])

    def _infer(
        self, trees: Sequence[TokenTree], wanted: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
        """Return what comes of the wanted tokens, [wanted, .], and the cells of all, [2 x layers, tokens, kept]."""
        self._store.settle()
        shape = self._model.shape
        ids = np.array([token for tree in trees for token in tree.tokens], np.int64)
        positions = np.concatenate([np.add(tree.depths, tree.position, dtype=np.int64) for tree in trees])
        sees = [np.ascontiguousarray(tree.sees()) for tree in trees]
        seats = [self._store.seat(tree.root) for tree in trees]
        of_trees, first = (Tree * len(trees))(), 0
        for made, tree, seen, seat in zip(of_trees, trees, sees, seats, strict=True):
            count, plane = len(tree.tokens), seat.shape[1] * seat.shape[2]
            made.cells, made.sees, made.plane = pointer(seat), pointer(seen), plane
            made.held, made.first, made.count = tree.position, first, count
            first += count
        asked = np.array(wanted, np.int64)
        answers = np.empty((len(asked), shape.words), np.float32)
        cells = self._room(2 * shape.layers, len(ids), self._model.kept)
        places = (
            pointer(ids),
            pointer(positions),
            ctypes.addressof(of_trees),
            pointer(asked),
            pointer(answers),
            pointer(cells),
        )
        numbers = (len(ids), len(trees), len(asked), shape.layers, int(False))
        library().call("run", self._engine, ctypes.byref(Pass(*places, *numbers)))
        return answers, cells

    def _room(self, *sizes: int) -> NDArray[np.int16]:
        """Return memory for the cells of a call, over which the next one writes."""
        if self._cells.size < (size := prod(sizes)):
            self._cells = np.empty(0, np.int16)  # not both at once
            self._cells = np.empty(size, np.int16)
        return self._cells[:size].reshape(sizes)

    def _groups(self, rows: Mapping[int, Row]) -> Iterator[list[int]]:
        """All at once: `_call` puts them into calls."""
        yield list(rows)

    def _failing(self, what: str) -> AbstractContextManager[None]:
        return _failing(what)

    def _free(self) -> None:
        self._words.release()
        self._free_words()
        library().free("engine", self._engine)
        del self._model, self._store, self._cells


def _in_one_piece(places: Sequence[int]) -> bool:
    """Tell of places that rise whether they follow one another."""
    return places[-1] - places[0] == len(places) - 1


def _groups(trees: Mapping[tuple[int, int], TokenTree]) -> Iterator[list[tuple[int, int]]]:
    """Split trees into calls: in their order, each as large as it may be."""
    group, tokens = list[tuple[int, int]](), 0
    for place, tree in trees.items():
        if group and tokens + len(tree.tokens) > CALL_TOKENS_MAX:
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
        raise BackendError(f"{what}: {(error.strerror or 'no memory').lower()}") from error
