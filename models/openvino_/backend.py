"""OpenVINO behind the `Backend` protocol: the same GGUF weights, on the processor, where its products are the quicker ones.

Keys and values lie in plain memory, a seat for each prompt; a call is handed those of its rows. Rows that go on from one
place, as forks do, are read as one tree. Needs the extra `openvino`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sds.models.cache.kv_cache import ArrayKVCache
from sds.models.cache.prefix_caching import Part, PrefixCachingBackend
from sds.models.cache.token_tree import Call, Inputs, Place, calls_of
from sds.models.files.fingerprint import gguf_fingerprint, identity
from sds.models.files.llama_weights import Shape, Weights
from sds.models.llamacpp.weights import words_of
from sds.models.openvino_.facts import INSTALL_HINT, INT8_REST
from sds.models.protocol import CONTEXT_TOKENS, BackendError, Dtype, Row, check_slots

try:
    import openvino as ov

    from sds.models.openvino_.dtypes import check_dtype, usual_dtype
    from sds.models.openvino_.graph import graph
except ImportError as error:
    raise BackendError("OpenVINO is not installed", hint=INSTALL_HINT) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEPT = {"bf16": (np.uint16, ov.Type.bf16), "fp32": (np.float32, ov.Type.f32)}
MIXED_MAX = {"bf16": inf, "fp32": 512}  # found by trying: in FP32 longer sums are cut by where they lie
HINT_CHARACTERS_MAX = 200
# A line alone of so many tokens has a copy of the graph; one more takes most of a second to open, and some 70 MB.
LENGTHS = (48, 56, 64, 72, 80, 96, 104, 112)
KNOWN_MAX = 64  # places of which a request keeps tensors
COPIED_ENGINES_MAX = 2  # over the same weights
PASS_TOKENS_MAX = 2048  # in several calls: the more cases are read in turn, the more share the small calls after them


class _Programs:
    """One model, compiled; its weights serve every thread that makes a request."""

    def __init__(
        self,
        path: Path,
        seen: tuple[int, ...] | None,
        *,
        dtype: Dtype,
        n_ctx: int,
        threads: int,
        engines: int,
        lengths: Sequence[int],
    ) -> None:
        self._path, self._seen = path, seen
        self._weights = Weights(path, "OpenVINO")
        self.shape: Shape = self._weights.shape
        self.context = min(n_ctx, self.shape.context)
        precision, self._in_int8 = INT8_REST.get(dtype, dtype), dtype in INT8_REST
        self.mixed_max = MIXED_MAX[precision]
        self.lengths = tuple(lengths) if engines <= COPIED_ENGINES_MAX else ()  # each makes its own
        self._settings = {
            "INFERENCE_NUM_THREADS": threads * engines,
            "NUM_STREAMS": engines,
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32",
            "ENABLE_CPU_PINNING": False,
        }
        self._compiled: Any = None
        self._compiling = threading.Lock()  # whoever else needs it waits: twice would take twice the memory
        self.kind, self.vino_kind = KEPT[precision]

    def compiled(self) -> Any:
        """Return what runs calls."""
        with self._compiling:
            return self._compiled or self._compile()

    def _compile(self) -> Any:
        model = graph(
            self._weights,
            kept=self.vino_kind,
            in_int8=self._in_int8,
            context=self.context,
            lengths=self.lengths,
        )
        found = ov.Core().compile_model(model, "CPU", self._settings)
        self.check()  # kept only once it is known of which file it is
        self._compiled = found
        return found

    def cells(self, seats: int) -> ArrayKVCache:
        """Return memory for so many seats, in what keys and values are handed in and out."""
        return ArrayKVCache((2 * self.shape.layers, self.context, self.shape.cell), self.kind, seats)

    def forget(self) -> None:
        """Compile anew, for everybody: a call that failed half-way leaves shapes behind at which later ones fail."""
        self._compiled = None

    def check(self) -> None:
        if identity(self._path) != self._seen:
            raise BackendError(f"`{self._path}` was changed while it was opened", hint="open it again")


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Tensors, and the arrays they are of, which they do not keep."""

    tensors: list[Any]
    of: object


class _Request:
    """What runs calls of one thread, each in the copy that was made for its length, or else in that for all."""

    def __init__(self, compiled: Any, lengths: tuple[int, ...], kind: ov.Type) -> None:
        """`kind`: of keys and values."""
        self.compiled, self.made = compiled, compiled.create_infer_request()
        self._lengths, self._kind = lengths, kind
        self._given: _Held | None = None
        self._known: dict[tuple[int, int], _Held] = {}  # of lines alone, by where a seat lies and how much is handed in

    def copy_for(self, call: Call) -> int | None:
        """Return which copy is to run; None: there is only one."""
        if not self._lengths:
            return None
        alone = len(call.trees) == 1 and call.longest in self._lengths
        return self._lengths.index(call.longest) if alone else len(self._lengths)

    def give(self, first: int, cells: ArrayKVCache, call: Call, count: int) -> None:
        """Let keys and values of the tokens before a call be its inputs, from number `first` on."""
        if len(call.trees) > 1:
            self._given = None  # what it keeps is made anew, perhaps larger: not both at once
        given = self._held(cells, call, count)
        if given is self._given:
            return  # the same memory, whatever stands there now
        self._given = None  # half of it, should one be refused
        for n, tensor in enumerate(given.tensors, first):
            self.made.set_input_tensor(n, tensor)
        self._given = given

    def _held(self, cells: ArrayKVCache, call: Call, count: int) -> _Held:
        """Return what stands before a call, as the library takes it: made once for what comes again."""
        if len(call.trees) > 1:
            return self._made_of(cells.held(call, count))
        seat = cells.seat(call.trees[0].root)
        where = id(seat), call.held
        if where not in self._known:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[where] = self._made_of(cells.held(call, count), seat)
        return self._known[where]

    def _made_of(self, held: Sequence[NDArray[Any]], seat: NDArray[Any] | None = None) -> _Held:
        return _Held([ov.Tensor(array, list(array.shape), self._kind) for array in held], (held, seat))


class OpenvinoBackend(PrefixCachingBackend):
    """One GGUF model of the architecture `llama`. Give each thread its own (`replica`); call `close()` when done."""

    rows_may_be_cut = False
    usual_dtype = staticmethod(usual_dtype)
    lookahead_tokens_max = 40  # in BF16 a pass of its own costs more: the weights, and a shape to prepare for
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
        engines: int = 1,
        lengths: Sequence[int] = LENGTHS,
        programs: _Programs | None = None,
    ) -> None:
        """Load weights; raise `BackendError` when `path` is nothing that runs here.

        `dtype`: left out, `usual_dtype`. `fingerprint`: of the file, where it was just looked at. `engines`: how many
        are going to run side by side over the weights (`replica`), each on `threads` of its own. `lengths`: for which a line
        alone has a copy of the graph; with fewer it opens sooner, with the same bits. `programs`: of the file, where it was
        compiled already.
        """
        check_slots(slots)
        dtype = dtype or usual_dtype()
        check_dtype(dtype)
        seen = identity(path)
        self.name = path.name
        self.fingerprint = fingerprint or gguf_fingerprint(path)
        words, template, self._free_words = words_of(path)
        self._path, self._dtype = path, dtype
        self._request: _Request | None = None
        try:
            with _failing(f"OpenVINO cannot run `{path}`"):
                threads = threads or os.cpu_count() or 1
                self._programs = programs or _Programs(
                    path, seen, dtype=dtype, n_ctx=n_ctx, threads=threads, engines=engines, lengths=lengths
                )
                self._programs.compiled()
                store = self._programs.cells(slots)
            self._programs.check()
        except BaseException:
            self._free_words()
            raise
        self.vocab_size = words.size
        self.context_tokens_max = self._programs.context
        super().__init__(slots=slots, words=words, template=template, store=store)
        self.pass_tokens_max = PASS_TOKENS_MAX
        if programs is None:
            self._warm_up()

    def replica(self, *, threads: int, slots: int = 1) -> OpenvinoBackend:
        """Return another backend over the same weights, for another thread of as many cores as this one."""
        self._ready()
        shared: dict[str, Any] = {"fingerprint": self.fingerprint, "programs": self._programs}
        made = OpenvinoBackend(self._path, dtype=self._dtype, threads=threads, slots=slots, **shared)
        made.name = self.name
        return made

    def _warm_up(self) -> None:
        """Make the first calls, which lay the weights out for the processor: that takes seconds, and no decision pays."""
        try:
            with _failing(f"OpenVINO cannot run `{self._path}`"):
                for count in (8, *self._programs.lengths):
                    self._call([Part(0, 0, [0] * min(count, self.context_tokens_max), 1)])
        except BackendError:
            self.close()
            raise

    def _call(self, parts: Sequence[Part]) -> list[NDArray[np.float32]]:
        rows = ((self._store.place(part.seat, part.position), part.tokens) for part in parts)
        room, lengths = self._store.lines_held_max, self._programs.lengths
        calls, places = calls_of(rows, held_max=room, mixed_max=self._programs.mixed_max, lengths=lengths)
        asked = [max(1, part.outputs) for part in parts]
        found: dict[int, NDArray[np.float32]] = {}
        for number, call in enumerate(calls):
            riding = {n: place for n, place in enumerate(places) if place.call == number}
            inputs = call.inputs()
            ends = {n: inputs.lines[place.line, place.path[-asked[n] :]] for n, place in riding.items()}
            wanted = np.unique(np.concatenate(list(ends.values())))
            answered, cells = self._infer(call, inputs, wanted)
            for n, place in riding.items():
                answers = np.asarray(answered[np.searchsorted(wanted, ends[n])], np.float32)
                self._append(parts[n], cells[:, place.line], place, answers)
                found[n] = answers[len(answers) - parts[n].outputs :]
        return [found[n] for n in range(len(parts))]

    def _append(self, part: Part, cells: NDArray[Any], place: Place, answers: NDArray[np.float32]) -> None:
        """Keep what a part appended, of the cells of its line; of what is no number nothing, for it would show wherever
        cells are only masked.

        Such logits end the decision of whoever asked for them; where nobody did, it raises.
        """
        numbers = bool(np.isfinite(answers).all())
        if not numbers and not part.outputs:
            raise BackendError("the model answered with what is no number")
        kept = cells if numbers else np.zeros_like(cells)
        for start, stretch in place.stretches():
            self._store.note(part.seat, part.position + start, kept[:, stretch])

    def _infer(self, call: Call, inputs: Inputs, wanted: NDArray[np.intp]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return what comes of the wanted tokens, [wanted, .], and the cells of all, [2 x layers, lines, longest, cell]."""
        self._store.settle()
        request, count = self._ready_request(), 2 * self._programs.shape.layers
        asked = [*inputs, wanted]  # a tensor does not keep its array
        copy = request.copy_for(call)
        given = dict(enumerate(asked)) | ({} if copy is None else {len(asked) + count: np.array(copy)})
        for n, array in given.items():
            request.made.set_input_tensor(n, ov.Tensor(array))
        request.give(len(asked), self._store, call, count)
        try:
            request.made.infer()
        except Exception:
            self._programs.forget()
            raise
        answered = request.made.get_output_tensor(0).data[0]
        shape = count, len(call.trees), call.longest, self._programs.shape.cell
        return answered, request.made.get_output_tensor(1).data.view(self._programs.kind).reshape(shape)

    def _groups(self, rows: Mapping[int, Row]) -> Iterator[list[int]]:
        """All at once: `calls_of` puts them into calls."""
        yield list(rows)

    def _ready_request(self) -> _Request:
        compiled = self._programs.compiled()
        if self._request is None or self._request.compiled is not compiled:
            self._request = _Request(compiled, self._programs.lengths, self._programs.vino_kind)
        return self._request

    def _failing(self, what: str) -> AbstractContextManager[None]:
        return _failing(what)

    def _free(self) -> None:
        self._words.release()
        self._free_words()
        del self._programs, self._request, self._store


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
