"""The headers of a checkpoint folder's safetensors files: names, types and shapes. No weight is read."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from sds.models.protocol import BackendError, cause_of

HEADER_BYTES_MAX = 100_000_000
FILES_MAX = 1000
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class SafetensorsInfo:
    """`types`: how many numbers of each type are stored, the most frequent first. `sha256`: of the files end to end."""

    parameters: int
    types: tuple[tuple[str, int], ...]
    bytes: int
    sha256: str


def read_safetensors(folder: Path) -> SafetensorsInfo:
    """Read the headers of all files, by name, and their fingerprint. Raises BackendError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BackendError(
            f"`{folder}` holds no safetensors files",
            hint="write them with save_pretrained(FOLDER): pickles are never loaded",
        )
    if len(files) > FILES_MAX:
        raise BackendError(f"`{folder}` holds more than {FILES_MAX} safetensors files")
    types, digest, size = Counter[str](), hashlib.sha256(), 0
    for file in files:
        try:
            types += _header(file)
            size += file.stat().st_size
            with file.open("rb") as stream:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
        except OSError as error:
            raise BackendError(f"`{file}` cannot be read: {cause_of(error)}") from error
    return SafetensorsInfo(types.total(), tuple(types.most_common()), size, digest.hexdigest())


def _header(file: Path) -> Counter[str]:
    """Count the numbers of each type in one file, whose data must be complete."""
    total = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > min(HEADER_BYTES_MAX, total - _LENGTH_BYTES):
            raise BackendError(f"`{file}` is not a safetensors file, or is cut short")
        text = stream.read(length)
    types, end = Counter[str](), 0
    try:
        for name, tensor in json.loads(text.decode()).items():
            if name != "__metadata__":
                types[str(tensor["dtype"])] += prod(map(int, tensor["shape"]))
                end = max(end, int(tensor["data_offsets"][1]))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise BackendError(f"`{file}` is not a safetensors file") from error
    if types.total() > 8 * total:
        raise BackendError(f"`{file}` is not a safetensors file")
    if total != _LENGTH_BYTES + length + end:
        raise BackendError(f"`{file}` is cut short: {total} of {_LENGTH_BYTES + length + end} bytes")
    return types
