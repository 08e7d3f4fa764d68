"""Calls this project's own passes (`native/`, in C++) from Python.

They are compiled when the package is installed, once for each supported kind of processor. A library that was compiled
from other sources than the present ones is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sds.models.files.cpu import cpu_features
from sds.models.int8.sources import PASSES, passes_sources
from sds.models.protocol import BackendError

KINDS = {  # the features that a processor needs for each, the fastest first
    "avx512vnni": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma"},
    "avx2": {"avx2", "fma"},
}
INSTALL_HINT = "run `make install` in the source folder: it needs a C++ compiler"
_Pointer = ctypes.c_void_p


class Sizes(ctypes.Structure):
    """As in passes.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("layers", "heads", "key_heads", "head", "width", "inner", "words")),
        *((name, ctypes.c_int32) for name in ("context", "bytes", "block")),
        ("epsilon", ctypes.c_float),
    ]


class Tree(ctypes.Structure):
    """As in passes.h."""

    _fields_ = [
        ("cells", _Pointer),
        ("sees", _Pointer),
        ("plane", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("held", "first", "count")),
    ]


class Pass(ctypes.Structure):
    """As in passes.h."""

    _fields_ = [
        *((name, _Pointer) for name in ("ids", "positions", "trees", "wanted", "answers", "cells")),
        *((name, ctypes.c_int32) for name in ("tokens", "tree_count", "answering", "layers", "states")),
    ]


_ARGUMENTS: dict[str, Sequence[Any]] = {
    "passes_model": (ctypes.POINTER(Sizes), ctypes.POINTER(_Pointer)),
    "passes_layer": (_Pointer, ctypes.c_int32, *[_Pointer] * 9),
    "passes_ends": (_Pointer, *[_Pointer] * 5),
    "passes_product": (*[_Pointer] * 2, *[ctypes.c_int32] * 6, _Pointer, ctypes.POINTER(ctypes.c_double)),
    "passes_engine": (_Pointer, ctypes.c_int32, ctypes.POINTER(_Pointer)),
    "passes_run": (_Pointer, ctypes.POINTER(Pass)),
}


class Made:
    """An object of the passes, freed with its last reference, before the objects that it was made from (`held`)."""

    def __init__(self, pointer: _Pointer, free: Callable[[_Pointer], None], held: Sequence[Any]) -> None:
        self._as_parameter_, self._free, self._held = pointer, free, held

    def __del__(self) -> None:
        self._free(self._as_parameter_)


class PassesLibrary:
    """The compiled passes. A call that runs out of memory raises MemoryError."""

    def __init__(self, path: Path) -> None:
        """Load the library. Raises BackendError where it was not compiled from the sources beside it."""
        try:
            self._calls = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendError(f"`{path.name}` cannot be loaded", hint=INSTALL_HINT) from error
        for name, arguments in _ARGUMENTS.items():
            getattr(self._calls, name).argtypes = arguments
        for name in ("passes_model_free", "passes_engine_free", "passes_engine_wake"):
            getattr(self._calls, name).argtypes, getattr(self._calls, name).restype = (_Pointer,), None
        self._calls.passes_sources.restype = ctypes.c_char_p
        if self._calls.passes_sources() != passes_sources().encode():
            raise BackendError(f"`{path.name}` was compiled from other sources", hint=INSTALL_HINT)

    def call(self, name: str, *arguments: Any) -> None:
        if getattr(self._calls, f"passes_{name}")(*arguments):
            raise MemoryError

    def made(self, name: str, *arguments: Any) -> Made:
        found = _Pointer()
        self.call(name, *arguments, ctypes.byref(found))
        return Made(found, getattr(self._calls, f"passes_{name}_free"), arguments)

    def wake(self, engine: Made) -> None:
        """Wake an engine's threads for a pass that comes soon."""
        self._calls.passes_engine_wake(engine)


def kind_here() -> str:
    """Return the kind of processor that the passes run on here. Raises BackendError."""
    features = cpu_features()
    found = next((kind for kind, needed in KINDS.items() if needed <= features), None)
    if found is None:
        raise BackendError(
            "integer passes need a processor with AVX2, or with AVX-512 and VNNI",
            hint="choose llamacpp or openvino",
        )
    return found


@cache
def library() -> PassesLibrary:
    """Return the library for this processor. Raises BackendError."""
    path = PASSES / f"passes-{kind_here()}.so"
    if not path.exists():
        raise BackendError("the integer passes are not compiled", hint=INSTALL_HINT)
    return PassesLibrary(path)


def product(
    states: NDArray[np.float32], weights: NDArray[np.float32], *, in_bytes: bool, threads: int, repeats: int = 1
) -> tuple[NDArray[np.float32], float]:
    """Return states [rows, depth] times weights [columns, depth], multiplied as in the passes, and the seconds that it
    took: the shortest of `repeats`, without the time for rounding.
    """
    (rows, depth), columns = states.shape, len(weights)
    given = [in_one_piece(each) for each in (states, weights)]
    answers, seconds = np.empty((rows, columns), np.float32), ctypes.c_double()
    numbers = (rows, columns, depth, int(in_bytes), threads, repeats)
    library().call("product", *(pointer(each) for each in given), *numbers, pointer(answers), ctypes.byref(seconds))
    return answers, seconds.value


def pointer(array: NDArray[Any]) -> int:
    """Return the address of an array, which must stay alive and contiguous during the call."""
    return array.ctypes.data


def in_one_piece(array: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(array, np.float32)
