"""Identifies a file: the SHA-256 of a GGUF, and a cheap identity that changes when a file is written or replaced."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sds.models.protocol import FOLDER_HINT, BackendError, cause_of

_GGUF_MAGIC = b"GGUF"


def identity(path: Path) -> tuple[int, ...] | None:
    """Return values that change when a file is written or replaced; None where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def gguf_fingerprint(path: Path) -> str:
    """Return the SHA-256 of a GGUF file, 64 hexadecimal digits. Raises BackendError for any other file."""
    try:
        with path.open("rb") as file:
            if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
                raise BackendError(f"`{path}` is not a GGUF file", hint="name a GGUF file or a checkpoint folder")
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        hint = FOLDER_HINT if isinstance(error, IsADirectoryError) else ""
        raise BackendError(f"`{path}` cannot be read: {cause_of(error)}", hint=hint) from error
