"""OpenVINO behind the `Backend` protocol: the same GGUF weights, on the processor, where its products are the quicker ones.

Keys and values lie in plain memory, a seat for each prompt; a call is handed those of its rows. Needs the extra
`openvino`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sds.models.gguf import gguf_fingerprint, identity, words_of
from sds.models.llama import CONTEXT_TOKENS
from sds.models.protocol import BackendError, Dtype
from sds.models.seats import Part, SeatedBackend, check_slots

try:
    import openvino as ov  # type: ignore[import-untyped]

    from sds.models.openvino_graph import Shape, Weights, graph
except ImportError as error:
    raise BackendError("OpenVINO is not installed", hint="pip install 'sovereign-decision-stream[openvino]'") from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

MASKED = -1e9
KEPT = {"bf16": (np.uint16, ov.Type.bf16), "fp32": (np.float32, ov.Type.f32)}
HINT_CHARACTERS_MAX = 200


def computes_in_bf16() -> bool:
    """Return whether this processor multiplies in BF16."""
    return "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


class _Programs:
    """One model, compiled for so many layers as are asked for; its weights serve every thread that makes a request."""

    def __init__(self, path: Path, *, dtype: Dtype, n_ctx: int, threads: int) -> None:
        self._weights = Weights(path)
        self.shape: Shape = self._weights.shape
        self.context = min(n_ctx, self.shape.context)
        self._dtype: Dtype = dtype
        streams = max(1, (os.cpu_count() or 1) // threads)  # requests that run side by side, of so many threads each
        self._settings = {
            "INFERENCE_NUM_THREADS": threads * streams,
            "NUM_STREAMS": streams,
            "INFERENCE_PRECISION_HINT": "bf16" if dtype == "bf16" else "f32",
            "ENABLE_CPU_PINNING": False,
        }
        self._compiled: dict[int | None, Any] = {}
        self.kind, self.vino_kind = KEPT[dtype]

    def request(self, states_at: int | None) -> Any:
        """Return what runs a call: to the logits, or to the states that go into a layer."""
        if states_at not in self._compiled:
            layers = self.shape.layers if states_at is None else states_at
            model = graph(self._weights, dtype=self._dtype, context=self.context, layers=layers, head=states_at is None)
            self._compiled[states_at] = ov.Core().compile_model(model, "CPU", self._settings)
        return self._compiled[states_at].create_infer_request()


class _Cells:
    """Keys and values, [context, cell] for each seat: memory that is committed when it is written."""

    together = True

    def __init__(self, programs: _Programs, seats: int) -> None:
        self._shape = programs.context, programs.shape.cell(programs.shape.layers)
        self._kind = programs.kind
        self._seats = {seat: self._empty() for seat in range(seats)}

    def cut(self, _seat: int, _position: int, _surplus: int) -> bool:
        """What lies beyond a prompt's end is never handed in: there is nothing to do."""
        return True

    def copy(self, source: int, target: int, tokens: int) -> None:
        self._seats.setdefault(target, self._empty())[:tokens] = self._seats[source][:tokens]

    def forget(self, _seat: int) -> None:
        """What is written over needs no wiping; the memory stays for the next prompt or fork."""

    def past(self, parts: Sequence[Part], width: int) -> NDArray[Any]:
        """Return what the parts' seats hold, on the right side: [parts, longest, width]; zero where one holds less."""
        longest = max(part.position for part in parts)
        if len(parts) == 1 and width == self._shape[1]:
            return self._seats[parts[0].seat][None, :longest]
        held = np.zeros((len(parts), longest, width), self._kind)
        for row, part in zip(held, parts, strict=True):
            row[longest - part.position :] = self._seats[part.seat][: part.position, :width]
        return held

    def keep(self, parts: Sequence[Part], new: NDArray[Any]) -> None:
        for row, part in zip(new, parts, strict=True):
            count = len(part.tokens)
            self._seats[part.seat][part.position : part.position + count, : row.shape[1]] = row[len(row) - count :]

    def _empty(self) -> NDArray[Any]:
        return np.zeros(self._shape, self._kind)


class OpenvinoBackend(SeatedBackend):
    """One GGUF model of the architecture `llama`. Give each thread its own (`beside`); call `close()` when done."""

    _store: _Cells

    def __init__(
        self,
        path: Path,
        *,
        dtype: Dtype = "bf16",
        n_ctx: int = CONTEXT_TOKENS,
        threads: int | None = None,
        slots: int = 1,
        fingerprint: str | None = None,
        programs: _Programs | None = None,
    ) -> None:
        """Load weights; raise `BackendError` when `path` is nothing that runs here.

        `fingerprint`: of the file, where it was just looked at. `programs`: of the file, where it was compiled already.
        """
        check_slots(slots)
        if dtype not in KEPT:
            raise BackendError(f"OpenVINO does not compute in {dtype} here", hint="choose bf16 or fp32")
        if dtype == "bf16" and not computes_in_bf16():
            raise BackendError("this processor does not compute in bf16", hint="choose fp32")
        seen = identity(path)
        self.name = path.name
        self.fingerprint = fingerprint or gguf_fingerprint(path)
        words, template, self._free_words = words_of(path)
        self._path, self._dtype = path, dtype
        with _failing(f"OpenVINO cannot run `{path}`"):
            self._programs = programs or _Programs(
                path, dtype=dtype, n_ctx=n_ctx, threads=threads or os.cpu_count() or 1
            )
            self._requests: dict[int | None, Any] = {None: self._programs.request(None)}
        if identity(path) != seen:
            raise BackendError(f"`{path}` was changed while it was opened", hint="open it again")
        self.vocab_size = words.size
        self.context_tokens_max = self._programs.context
        layers = self._programs.shape.layers
        super().__init__(
            slots=slots, layers=layers, words=words, template=template, store=_Cells(self._programs, slots)
        )

    def beside(self, *, threads: int) -> OpenvinoBackend:
        """Return another backend with one slot over the same weights, for another thread of as many cores as this one."""
        self._ready()
        made = OpenvinoBackend(
            self._path, dtype=self._dtype, fingerprint=self.fingerprint, programs=self._programs, threads=threads
        )
        made.name = self.name
        return made

    def _call(self, parts: Sequence[Part], outputs: int, states_at: int | None) -> NDArray[np.float32]:
        if states_at not in self._requests:
            self._requests[states_at] = self._programs.request(states_at)
        request, programs = self._requests[states_at], self._programs
        width = programs.shape.cell(programs.shape.layers if states_at is None else states_at)
        past = np.ascontiguousarray(self._store.past(parts, width))
        ids, positions, mask = _inputs(parts, past.shape[1])
        longest = ids.shape[1]
        request.set_tensor("past", ov.Tensor(past, list(past.shape), programs.vino_kind))
        request.set_tensor("ids", ov.Tensor(ids))
        request.set_tensor("positions", ov.Tensor(positions))
        request.set_tensor("mask", ov.Tensor(mask))
        request.set_tensor("wanted", ov.Tensor(np.arange(longest - max(outputs, 1), longest)))
        request.infer()
        self._store.keep(parts, request.get_output_tensor(1).data.view(programs.kind))
        answered: NDArray[np.float32] = request.get_output_tensor(0).data
        return answered[:, answered.shape[1] - outputs :].astype(np.float32)

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        with _failing(what):
            yield

    def _free(self) -> None:
        self._words.release()
        self._free_words()
        del self._programs, self._requests, self._store


def _inputs(parts: Sequence[Part], held: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return tokens and positions [parts, longest] and what is added to scores, [parts, 1, longest, held + longest].

    Every part ends at the right; padding before it sees everything, is seen by nothing and answers nothing.
    """
    longest = max(len(part.tokens) for part in parts)
    ids, positions = (np.zeros((len(parts), longest), np.int64) for _ in range(2))
    mask = np.zeros((len(parts), 1, longest, held + longest), np.float32)
    later = np.triu(np.full((longest, longest), MASKED, np.float32), 1)
    for row, part in enumerate(parts):
        start = longest - len(part.tokens)
        ids[row, start:] = part.tokens
        positions[row, start:] = np.arange(part.position, part.position + len(part.tokens))
        mask[row, 0, :, held:] = later
        mask[row, 0, start:, held : held + start] = MASKED
        mask[row, 0, :, : held - part.position] = MASKED
    return ids, positions, mask


@contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except BackendError:
        raise
    except MemoryError as error:
        raise BackendError(f"{what}: no memory", hint="use a smaller model or prompt") from error
    except Exception as error:
        hint = " ".join(str(error).split())[:HINT_CHARACTERS_MAX]
        raise BackendError(what, hint=hint) from error
