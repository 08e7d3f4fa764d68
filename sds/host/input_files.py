"""Files that people name: read whole, and no longer than a limit, because a device has no end. Raises UsageError alone."""

from __future__ import annotations

from pathlib import Path

from sds.kernel.errors import UsageError, cause_of


def read_bytes(path: Path, bytes_max: int, *, hint: str = "") -> bytes:
    """Return the bytes of a file. `hint`: how to mend what is wrong with it."""
    try:
        with path.open("rb") as file:
            raw = file.read(bytes_max + 1)
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {cause_of(error)}", hint=hint) from error
    if len(raw) > bytes_max:
        raise UsageError(f"`{path}` is larger than {bytes_max} bytes", hint=hint)
    return raw


def read_text(path: Path, bytes_max: int) -> str:
    """Return the text of a file, which is in UTF-8."""
    try:
        return read_bytes(path, bytes_max).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"`{path}` is not UTF-8 at byte {error.start}", hint="save it as UTF-8") from error
