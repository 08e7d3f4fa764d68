"""The least time of a decision's passes: predicted from the device's rates, and measured as bare passes.

A pass reads every weight once and does two operations for each weight and token, so it takes at least as long as the
slower of the two. `device()` measures both rates: memory with numpy; arithmetic in the data type of the products, with numpy
for 32-bit floats, else with one large product in the library itself, since numpy has no other type. So the prediction uses
only the library's data type. For llama.cpp, whose types differ from file to file, 32-bit floats are a guess and no bound.
The bare floor is the passes themselves, run again with nothing around them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sds.benchmarks.lib.measuring import timed_us
from sds.benchmarks.lib.process import PeerProcess
from sds.benchmarks.lib.weights import Weights
from sds.engines.factory import cores
from sds.models.int8.facts import INT8
from sds.models.openvino_.names import INT8_REST
from sds.models.protocol import Backend, Dtype, Row
from sds.models.tokenizer.tokenizer import ModelTokenizer

COPY_BYTES = 1 << 28
MATRIX = 1536
REPEATS = 5
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Device:
    """Rates of this machine: bytes a second read from memory, operations a second in the data type `in_`."""

    bytes_per_s: float
    ops_per_s: float
    in_: Dtype

    @property
    def facts(self) -> dict[str, Any]:
        """The rates as a document has them, in billions a second."""
        rates = {"memory_gb_per_s": self.bytes_per_s, "gop_per_s": self.ops_per_s}
        return {name: round(rate / 1e9, 1) for name, rate in rates.items()} | {"in": self.in_}

    def pass_ms(self, weights_bytes: int, parameters: int, tokens: int) -> float:
        """Return the least time of one pass over `tokens` tokens, in milliseconds."""
        return 1000 * max(weights_bytes / self.bytes_per_s, 2 * parameters * tokens / self.ops_per_s)


def device(weights: Weights) -> Device:
    """Measure the rates of memory, and of arithmetic as these weights are multiplied: the best of REPEATS each."""
    source = np.ones(COPY_BYTES // 8)
    read_s = min(timed_us(source.sum) for _ in range(REPEATS)) / 1e6
    matrix = np.ones((MATRIX, MATRIX), np.float32)
    dtype = weights.multiplies_in
    if weights.library == INT8.name:
        from sds.models.int8.library import product as whole  # noqa: PLC0415  loads the compiled library

        _, multiply_s = whole(matrix, matrix, in_bytes=dtype == "int8", threads=cores(), repeats=REPEATS)
        return Device(COPY_BYTES / read_s, 2 * MATRIX**3 / multiply_s, dtype)
    product = partial(np.matmul, matrix, matrix) if dtype == "fp32" else _product(matrix, dtype)
    product()
    multiply_s = min(timed_us(product) for _ in range(REPEATS)) / 1e6
    return Device(COPY_BYTES / read_s, 2 * MATRIX**3 / multiply_s, dtype)


def _product(matrix: np.ndarray, dtype: Dtype) -> Callable[[], object]:
    """Return a function that multiplies a matrix by itself in OpenVINO, as its backend does in this data type."""
    import openvino as ov  # noqa: PLC0415  only with the extra `openvino`
    import openvino.opset13 as ops  # noqa: PLC0415

    from sds.models.openvino_.int8 import rounded, rounded_matrix  # noqa: PLC0415

    given = ops.parameter(list(matrix.shape), ov.Type.f32)
    in_int8 = dtype in INT8_REST
    factors = (rounded(given), rounded_matrix(matrix)) if in_int8 else (given, ops.constant(matrix))
    rest = INT8_REST.get(dtype, dtype)
    settings = {
        "INFERENCE_NUM_THREADS": cores(),
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "bf16" if rest == "bf16" else "f32",
        "ENABLE_CPU_PINNING": False,
    }
    model = ov.Model([ops.matmul(*factors, False, True)], [given], "product")
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
    request.set_input_tensor(0, ov.Tensor(matrix))
    return partial(_inferred, request, matrix)


def _inferred(request: Any, _matrix: np.ndarray) -> None:
    """Run a request. `_matrix` is kept alive by the caller's `partial`: a tensor does not hold its array."""
    request.infer()


class Recorded:
    """Wraps a backend and records what was run since `clear()`; everything else is the backend's own.

    `kept`: whether the last prompt's sections were in the prefix cache.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.sections: list[Sequence[int]] = []
        self.kept = False
        # a pass: its rows; a fork: (slot, fork); a dropped fork: its number
        self._noted: list[list[Row] | tuple[int, int] | int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.backend, name)

    def clear(self) -> None:
        self._noted = []

    def prefill(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        self.sections = list(sections)
        self.kept = self.backend.is_cached(sections)
        self.backend.prefill(sections, slot=slot)

    def fork(self, slot: int) -> int:
        made = self.backend.fork(slot)
        self._noted.append((slot, made))
        return made

    def drop(self, fork: int) -> None:
        self._noted.append(fork)
        self.backend.drop(fork)

    def run(self, rows: Sequence[Row]) -> list[np.ndarray]:
        self._noted.append([Row(row.slot, list(row.tokens), row.outputs) for row in rows])
        return self.backend.run(rows)

    @property
    def passes(self) -> list[list[Row]]:
        return [noted for noted in self._noted if isinstance(noted, list)]

    @property
    def tokens(self) -> list[int]:
        """The tokens that each pass had to read. What several rows share at their beginning counts once."""
        return [
            len({tuple(row.tokens[: n + 1]) for row in rows for n in range(len(row.tokens))}) for rows in self.passes
        ]

    def bare_ms(self) -> float:
        """Run the recorded passes again, and nothing else; return their time in milliseconds."""
        self.backend.prefill(self.sections)
        forks = dict[int, int]()
        took_s = 0.0
        for noted in self._noted:
            if isinstance(noted, tuple):
                forks[noted[1]] = self.backend.fork(forks.get(noted[0], noted[0]))
            elif isinstance(noted, int):
                self.backend.drop(forks.pop(noted))
            else:
                rows = [Row(forks.get(row.slot, row.slot), row.tokens, row.outputs) for row in noted]
                began = time.perf_counter()
                self.backend.run(rows)
                took_s += time.perf_counter() - began
        for fork in forks.values():
            self.backend.drop(fork)
        return 1000 * took_s


class Prediction:
    """Predicts a decision's time from the shapes of its passes. A process of ours measures each pass.

    `passes`: the tokens that each of ours reads, with those read ahead.
    """

    def __init__(self, request: dict[str, Any], answer: dict[str, Any], words: ModelTokenizer) -> None:
        """`answer`: of our engine to this request, asked with `shape`."""
        self.passes: list[int] = answer["tokens_of_passes"]
        self.tokens: list[int] = request["tokens"]
        self.read_tokens = len(self.tokens) - request["tokens_kept"]
        self.decision_tokens = len(words.tokenize(answer["text"].encode(), special=False))

    def ms(self, process: PeerProcess) -> dict[str, float]:
        """Return the least milliseconds in this process's library: of ours, and of an engine with a pass for every token."""
        *ours, read, single = (self._pass_ms(process, shape) for shape in (*self.passes, self.read_tokens, 1))
        return {"ours": round(sum(ours), 2), "token_by_token": round(read + self.decision_tokens * single, 2)}

    def _pass_ms(self, process: PeerProcess, tokens: int) -> float:
        """Return the milliseconds of one pass over the prompt's last `tokens` tokens, after the rest of the prompt."""
        asked = {"tokens": self.tokens, "pass_tokens": min(tokens, len(self.tokens) - 1)}
        return float(process.ask(asked, timeout_s=TIMEOUT_S)["pass_ms"])
