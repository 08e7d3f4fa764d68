"""llama.cpp's batch over numpy arrays, so that filling it costs microseconds. It does not know what its tokens mean."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

_SEQUENCE = ctypes.POINTER(lib.llama_seq_id)


class TokenBatch:
    """The rows of one run, one after the other, `size_max` tokens at most; `part` hands llama.cpp some of them."""

    def __init__(self, size_max: int) -> None:
        self.size = 0
        self._tokens = np.zeros(size_max, np.int32)
        self._positions = np.zeros(size_max, np.int32)
        self._sequences = np.zeros(size_max, np.int32)
        self._wanted = np.zeros(size_max, np.int8)
        self._ones = np.ones(size_max, np.int32)
        self._counting = np.arange(size_max, dtype=np.int32)
        pointers = self._sequences.ctypes.data + self._sequences.itemsize * np.arange(size_max)
        self._pointers = pointers.astype(
            np.uintp
        )  # one sequence a token: llama.cpp reads it through a pointer of its own

    def clear(self) -> None:
        self.size = 0

    def add(self, tokens: Sequence[int], *, position: int, sequence: int, outputs: int) -> None:
        """Append a row; the outputs of its last `outputs` tokens are wanted."""
        start, end = self.size, self.size + len(tokens)
        self._tokens[start:end] = tokens
        self._positions[start:end] = self._counting[position : position + len(tokens)]
        self._sequences[start:end] = sequence
        self._wanted[start : end - outputs] = 0
        self._wanted[end - outputs : end] = 1
        self.size = end

    def outputs(self, start: int, end: int) -> int:
        return int(np.count_nonzero(self._wanted[start:end]))

    def pad_lone_output(self, start: int, end: int) -> slice:
        """Ask for a second output of these tokens where one is wanted; return which of the outputs are wanted.

        For one output llama.cpp takes another matrix kernel than for several, with other bits.
        """
        if self.outputs(start, end) != 1:
            return slice(None)
        first = bool(self._wanted[start])
        self._wanted[start + 1 if first else start] = 1
        return slice(0, 1) if first else slice(1, 2)

    def part(self, start: int, end: int) -> lib.llama_batch:
        """Return the tokens from `start` to `end`; it points into this object, which must outlive it."""
        return lib.llama_batch(
            end - start,
            _at(self._tokens, start, ctypes.POINTER(lib.llama_token)),
            None,
            _at(self._positions, start, ctypes.POINTER(lib.llama_pos)),
            _at(self._ones, start, ctypes.POINTER(ctypes.c_int32)),
            _at(self._pointers, start, ctypes.POINTER(_SEQUENCE)),
            _at(self._wanted, start, ctypes.POINTER(ctypes.c_int8)),
        )


def _at(array: NDArray[np.generic], index: int, kind: type[ctypes._Pointer[ctypes._CData]]) -> object:
    return ctypes.cast(array.ctypes.data + index * array.itemsize, kind)
