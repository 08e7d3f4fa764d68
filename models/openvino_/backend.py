"""OpenVINO behind the `Backend` protocol: a GGUF of the architecture `llama`, on the processor, where its products are fast.

The graph is ours (`graph`), checked against transformers and llama.cpp in the tests. Keys and values lie in plain memory; a
call gets those of its rows. Rows that continue one place, as forks do, are read as one tree, so a few more tokens in a pass
cost next to nothing (`lookahead_tokens_max`), and a row has the same bits in any batch (`batch`). Needs the extra `openvino`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sds.models.cache.kv_cache import BatchRow
from sds.models.cache.prefix_cache import PrefixCachingBackend
from sds.models.files.fingerprint import identity
from sds.models.files.llama_weights import LlamaWeights
from sds.models.llamacpp.weights import opening
from sds.models.openvino_.batch import Batch, Inputs, PaddedKVCache, batches_of
from sds.models.openvino_.names import INSTALL_HINT, INT8_REST, check_dtype, usual_dtype
from sds.models.protocol import CONTEXT_TOKENS, BackendError, Dtype, check_slots, importing

with importing("OpenVINO is not installed", INSTALL_HINT):
    import openvino as ov

    from sds.models.openvino_.graph import graph

# The type of keys and values: ours, OpenVINO's.
KV_TYPES = {"bf16": (np.uint16, ov.Type.bf16), "fp32": (np.float32, ov.Type.f32)}
MIXED_MAX = {"bf16": inf, "fp32": 512}  # found by experiment: in FP32, the place decides where longer sums are split
HINT_CHARACTERS_MAX = 200
# A row alone with one of these lengths has a copy of the graph. Another copy takes most of a second to open, and 70 MB.
LENGTHS = (48, 56, 64, 72, 80, 96, 104, 112)
TENSORS_MAX = 64  # pasts whose tensors a request caches
COPIED_ENGINES_MAX = 2  # over the same weights; with more engines, no graph has copies
PASS_TOKENS_MAX = 2048  # in several calls: the more cases are read together, the more share the small calls after them


class CompiledGraph:
    """The compiled graph of one file. Its weights serve every thread that makes a request."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: Dtype,
        n_ctx: int,
        threads: int,
        engines: int,
        lengths: Sequence[int],
    ) -> None:
        self._path, self._seen = path, identity(path)
        self._weights = LlamaWeights(path, "OpenVINO")
        self.shape = self._weights.shape
        self.context = min(n_ctx, self.shape.context)
        precision, self._in_int8 = INT8_REST.get(dtype, dtype), dtype in INT8_REST
        self.mixed_max = MIXED_MAX[precision]
        self.lengths = tuple(lengths) if engines <= COPIED_ENGINES_MAX else ()  # each engine makes its own copies
        self._settings = {
            "INFERENCE_NUM_THREADS": threads * engines,
            "NUM_STREAMS": engines,
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32",
            "ENABLE_CPU_PINNING": False,
        }
        self._compiled: Any = None
        self._compiling = threading.Lock()  # others wait: compiling twice would take twice the memory
        self.kind, self.vino_kind = KV_TYPES[precision]

    def compiled(self) -> Any:
        """Return the compiled model, which runs calls."""
        with self._compiling:
            return self._compiled or self._compile()

    def _compile(self) -> Any:
        model = graph(
            self._weights, kv_type=self.vino_kind, in_int8=self._in_int8, context=self.context, lengths=self.lengths
        )
        compiled = ov.Core().compile_model(model, "CPU", self._settings)
        self.check()  # only a model of the right file is kept
        self._compiled = compiled
        return compiled

    def kv_cache(self, slots: int) -> PaddedKVCache:
        return PaddedKVCache((2 * self.shape.layers, self.context, self.shape.kv_width), self.kind, slots)

    def reset(self) -> None:
        """Compile again for all engines: a call that failed half-way leaves shapes behind, at which later calls fail."""
        self._compiled = None

    def check(self) -> None:
        """Raise BackendError where the file was replaced: compiled again, it would be another model than in the record."""
        if identity(self._path) != self._seen:
            raise BackendError(f"`{self._path}` was changed while it was opened", hint="open it again")


@dataclass(frozen=True, slots=True, eq=False)
class _Past:
    """Tensors, and the arrays that they point into but do not keep alive."""

    tensors: list[Any]
    arrays: object


class _Request:
    """Runs the calls of one thread, each in the copy of the graph for its length, else in the copy for all lengths."""

    def __init__(self, compiled: Any, lengths: tuple[int, ...], kind: ov.Type) -> None:
        """`kind`: the type of keys and values."""
        self.compiled, self.made = compiled, compiled.create_infer_request()
        self._lengths, self._kind = lengths, kind
        self._given: _Past | None = None
        self._known: dict[tuple[int, int], _Past] = {}  # for rows alone, by a slot's array and the length of the past

    def copy_for(self, batch: Batch) -> int | None:
        """Return the number of the copy to run; None where there is only one."""
        if not self._lengths:
            return None
        alone = len(batch.trees) == 1 and batch.longest in self._lengths
        return self._lengths.index(batch.longest) if alone else len(self._lengths)

    def give(self, first: int, kv_cache: PaddedKVCache, batch: Batch) -> None:
        """Set the past of a batch as the inputs from number `first` on."""
        if len(batch.trees) > 1:
            self._given = None  # its arrays are made anew, perhaps larger: frees them first
        past = self._past(kv_cache, batch)
        if past is self._given:
            return  # the same memory, whatever its content
        self._given = None  # incomplete, if an input is refused
        for n, tensor in enumerate(past.tensors, first):
            self.made.set_input_tensor(n, tensor)
        self._given = past

    def _past(self, kv_cache: PaddedKVCache, batch: Batch) -> _Past:
        """Return a batch's past as OpenVINO takes it, cached for rows alone."""
        if len(batch.trees) > 1:
            return self._tensors(kv_cache.past(batch))
        memory = kv_cache.memory(batch.trees[0].root)
        key = id(memory), batch.past
        if key not in self._known:
            if len(self._known) >= TENSORS_MAX:
                self._known.clear()
            self._known[key] = self._tensors(kv_cache.past(batch), memory)
        return self._known[key]

    def _tensors(self, past: Sequence[NDArray[Any]], memory: NDArray[Any] | None = None) -> _Past:
        return _Past([ov.Tensor(array, list(array.shape), self._kind) for array in past], (past, memory))


class OpenvinoBackend(PrefixCachingBackend):
    """One GGUF model of the architecture `llama`. Give each thread its own (`replica`); call `close()` when done."""

    rows_may_be_cut = False
    lookahead_tokens_max = 40  # in BF16 another pass costs more: it reads the weights, and prepares for a shape
    _kv_cache: PaddedKVCache

    def __init__(
        self,
        path: Path,
        *,
        dtype: Dtype | None = None,
        n_ctx: int = CONTEXT_TOKENS,
        threads: int | None = None,
        slots: int = 1,
        fingerprint: str | None = None,
        engines: int = 1,
        lengths: Sequence[int] = LENGTHS,
        compiled: CompiledGraph | None = None,
    ) -> None:
        """Load weights. Raises BackendError when `path` cannot run here.

        `dtype`: by default `usual_dtype`. `fingerprint`: of the file, where known. `engines`: how many will run side by side
        over the weights (`replica`), each on `threads` of its own. `lengths`: those for which a row alone has a copy of the
        graph; with fewer it opens sooner, with the same bits. `compiled`: the compiled graph of the file, for a replica.
        """
        check_slots(slots)
        dtype = dtype or usual_dtype()
        check_dtype(dtype)
        self._path, self._dtype, self.name = path, dtype, path.name
        self._request: _Request | None = None
        with (
            opening(path, fingerprint) as (words, template, self._free_words, self.fingerprint),
            _failing(f"OpenVINO cannot run `{path}`"),
        ):
            threads = threads or os.cpu_count() or 1
            self._graph = compiled or CompiledGraph(
                path, dtype=dtype, n_ctx=n_ctx, threads=threads, engines=engines, lengths=lengths
            )
            self._graph.compiled()
            kv_cache = self._graph.kv_cache(slots)
            self._graph.check()
        self.vocab_size, self.context_tokens_max = words.size, self._graph.context
        super().__init__(slots=slots, words=words, template=template, kv_cache=kv_cache)
        self.pass_tokens_max = PASS_TOKENS_MAX
        if compiled is None:
            self._warm_up()

    def replica(self, *, threads: int, slots: int = 1) -> OpenvinoBackend:
        """Return another backend over the same weights, for another thread with as many cores as this one."""
        self._ready()
        return self._replica(dtype=self._dtype, threads=threads, slots=slots, compiled=self._graph)

    def _warm_up(self) -> None:
        """Make the first calls, in which OpenVINO lays out the weights for the processor. That takes seconds."""
        try:
            with _failing(f"OpenVINO cannot run `{self._path}`"):
                for count in (8, *self._graph.lengths):
                    self._call([BatchRow(0, 0, [0] * min(count, self.context_tokens_max), 1)])
        except BackendError:
            self.close()
            raise

    def _call(self, rows: Sequence[BatchRow]) -> list[NDArray[np.float32]]:
        prefixes = ((self._kv_cache.prefix(row.slot, row.position), row.tokens) for row in rows)
        past_max, lengths = self._kv_cache.past_tokens_max, self._graph.lengths
        batches, indices = batches_of(prefixes, past_max=past_max, mixed_max=self._graph.mixed_max, lengths=lengths)
        logits: dict[int, NDArray[np.float32]] = {}
        for number, batch in enumerate(batches):
            scheduled = {n: index for n, index in enumerate(indices) if index.batch == number}
            inputs = batch.inputs()
            # A row without outputs also has its last logits computed: they show whether the keys and values are numbers.
            ends = {
                n: inputs.lines[index.padded_row, index.path[-max(1, rows[n].outputs) :]]
                for n, index in scheduled.items()
            }
            wanted = np.unique(np.concatenate(list(ends.values())))
            answered, new = self._infer(batch, inputs, wanted)
            for n, index in scheduled.items():
                found = np.asarray(answered[np.searchsorted(wanted, ends[n])], np.float32)
                self._kv_cache.append(rows[n], new[:, index.padded_row], index.path.tolist(), found)
                logits[n] = found[len(found) - rows[n].outputs :]
        return [logits[n] for n in range(len(rows))]

    def _infer(self, batch: Batch, inputs: Inputs, wanted: NDArray[np.intp]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return logits of the wanted tokens, [wanted, vocab_size], and keys and values, [2 x layers, rows, longest, width]."""
        self._kv_cache.flush()
        request, planes = self._ready_request(), 2 * self._graph.shape.layers
        arrays = [*inputs, wanted]  # kept alive here, because a tensor does not keep its array
        copy = request.copy_for(batch)
        given = dict(enumerate(arrays)) | ({} if copy is None else {len(arrays) + planes: np.array(copy)})
        for n, array in given.items():
            request.made.set_input_tensor(n, ov.Tensor(array))
        request.give(len(arrays), self._kv_cache, batch)
        try:
            request.made.infer()
        except Exception:
            self._graph.reset()
            raise
        shape = planes, len(batch.trees), batch.longest, self._graph.shape.kv_width
        new = request.made.get_output_tensor(1).data.view(self._graph.kind).reshape(shape)
        return request.made.get_output_tensor(0).data[0], new

    def _ready_request(self) -> _Request:
        compiled = self._graph.compiled()
        if self._request is None or self._request.compiled is not compiled:
            self._request = _Request(compiled, self._graph.lengths, self._graph.vino_kind)
        return self._request

    def _failing(self, what: str) -> AbstractContextManager[None]:
        return _failing(what)

    def _free(self) -> None:
        self._free_words()
        del self._graph, self._request, self._kv_cache


@contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "alloc" in str(error):
            raise BackendError(f"{what}: no memory", hint="use a smaller model or prompt") from error
        hint = " ".join(str(error).split())[:HINT_CHARACTERS_MAX]
        raise BackendError(what, hint=hint) from error
