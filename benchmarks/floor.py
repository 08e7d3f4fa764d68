"""The least that a decision's passes must cost: predicted from the device's own rates, and measured bare.

A pass reads every weight once and does two operations for each weight and token; it cannot be faster than the slower of
the two. `device()` measures both rates with numpy, so the prediction knows nothing of the library that runs the model.
The bare floor is the passes themselves, run again without anything around them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sds.models.protocol import Backend, Row

COPY_BYTES = 1 << 28
MATRIX = 1536
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Device:
    """Rates of this machine: bytes a second read from memory, 32-bit operations a second."""

    bytes_per_s: float
    flops_per_s: float

    def pass_ms(self, weights_bytes: int, parameters: int, tokens: int) -> float:
        """Return the least time of one pass over `tokens` tokens."""
        return 1000 * max(weights_bytes / self.bytes_per_s, 2 * parameters * tokens / self.flops_per_s)


def device() -> Device:
    """Measure memory and arithmetic with numpy: the best of a few tries each."""
    source = np.ones(COPY_BYTES // 8)
    read_s = min(_seconds(source.sum) for _ in range(REPEATS))
    matrix = np.ones((MATRIX, MATRIX), np.float32)
    multiply_s = min(_seconds(lambda: matrix @ matrix) for _ in range(REPEATS))
    return Device(COPY_BYTES / read_s, 2 * MATRIX**3 / multiply_s)


def _seconds(call: object) -> float:
    began = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - began


class Recorded:
    """A backend that notes what was run since `clear()`; all else is the backend's own.

    `kept`: whether the sections that the last prompt began with had been read before.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.sections: list[list[int]] = []
        self.kept = False
        # rows of a pass; a fork (of which slot, its own); one dropped
        self._noted: list[list[Row] | tuple[int, int] | int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.backend, name)

    def clear(self) -> None:
        self._noted = []

    def begin(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        self.sections = [list(section) for section in sections]
        self.kept = self.backend.keeps(sections)
        self.backend.begin(sections, slot=slot)

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
        """How many tokens each pass had to read: of forks, which go on from one place, what they share counts once."""
        return [
            len({tuple(row.tokens[: n + 1]) for row in rows for n in range(len(row.tokens))}) for rows in self.passes
        ]

    def bare_ms(self) -> float:
        """Run the noted passes once more, and nothing else; return what they took."""
        self.backend.begin(self.sections)
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
