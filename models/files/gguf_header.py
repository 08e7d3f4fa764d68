"""The settings and tensors of a GGUF file, as bytes. Its vocabulary is skipped: llama.cpp reads that.

Format: docs/gguf.md of ggml, versions 2 and 3.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize, quant_shape_to_byte_shape
from numpy.typing import NDArray

from sds.models.protocol import BackendError, cause_of

VERSIONS = {2, 3}
DIMENSIONS_MAX = 4
_HEAD, _NUMBER, _LENGTH = struct.Struct("<4sIQQ"), struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = dict(zip((*range(8), 10, 11, 12), (struct.Struct(f"<{form}") for form in "BbHhIif?Qqd"), strict=True))


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape`: rows before columns. `stored`: the bytes as in the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    stored: NDArray[np.uint8]

    def values(self) -> NDArray[np.float32]:
        with np.errstate(all="ignore"):  # NaN shows in the values
            return np.asarray(dequantize(self.stored, self.kind), np.float32)


class GgufFile:
    """`settings`: single values; `lengths`: of lists; `tensors`; each by name. Raises BackendError."""

    def __init__(self, path: Path) -> None:
        self.settings: dict[str, Any] = {}
        self.lengths: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}
        self._at = 0
        try:
            with path.open("rb") as file:
                self._data = mmap(file.fileno(), 0, access=ACCESS_READ)
            self._read()
        except OSError as error:
            raise BackendError(f"`{path}` cannot be read: {cause_of(error)}") from error
        except (ValueError, TypeError, LookupError, ArithmeticError, struct.error) as error:
            raise BackendError(f"`{path}` is damaged, or its kind of GGUF is not supported") from error

    def _read(self) -> None:
        magic, version, tensors, settings = self._taken(_HEAD)
        if magic != b"GGUF" or version not in VERSIONS:
            raise ValueError("no GGUF file of a version that is known")
        for _ in range(settings):
            self._setting()
        found = [self._tensor() for _ in range(tensors)]
        alignment = self.settings.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._stored(kind, shape, start + offset) for name, kind, shape, offset in found}

    def _setting(self) -> None:
        name, kind = self._text(), self._taken(_NUMBER)[0]
        if kind == GGUFValueType.ARRAY:
            (kind,), (self.lengths[name],) = self._taken(_NUMBER), self._taken(_LENGTH)
            self._pass_over(kind, self.lengths[name])
        else:
            self.settings[name] = self._text() if kind == GGUFValueType.STRING else self._taken(_SCALARS[kind])[0]

    def _pass_over(self, kind: int, count: int) -> None:
        if kind != GGUFValueType.STRING:
            self._at += count * _SCALARS[kind].size
            return
        for _ in range(count):
            self._at += _LENGTH.size + _LENGTH.unpack_from(self._data, self._at)[0]

    def _tensor(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name, (dimensions,) = self._text(), self._taken(_NUMBER)
        if dimensions > DIMENSIONS_MAX:
            raise ValueError("a tensor of too many dimensions")
        columns_first = [self._taken(_LENGTH)[0] for _ in range(dimensions)]
        (kind,), (offset,) = self._taken(_NUMBER), self._taken(_LENGTH)
        return name, GGMLQuantizationType(kind), tuple(reversed(columns_first)), offset

    def _stored(self, kind: GGMLQuantizationType, shape: tuple[int, ...], start: int) -> Tensor:
        values, size = GGML_QUANT_SIZES[kind]
        stored = np.frombuffer(self._data, np.uint8, prod(shape) // values * size, start)
        return Tensor(kind, shape, stored.reshape(quant_shape_to_byte_shape(shape, kind)))

    def _taken(self, form: struct.Struct) -> tuple[Any, ...]:
        found = form.unpack_from(self._data, self._at)
        self._at += form.size
        return found

    def _text(self) -> str:
        (length,) = self._taken(_LENGTH)
        start, self._at = self._at, self._at + length
        return self._data[start : self._at].decode("utf-8", "replace")
