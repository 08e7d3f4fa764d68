"""Reads a JSON object from a foreign file, bounded in size, with errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sds.models.protocol import BackendError, cause_of


def read_json_object(path: Path, *, bytes_max: int) -> dict[str, Any]:
    """Return the object. Raises BackendError where the file cannot be read, is larger, or holds no JSON object."""
    try:
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
        if len(content) > bytes_max:
            raise BackendError(f"`{path}` is larger than {bytes_max} bytes")
        found = json.loads(content.decode())
    except OSError as error:
        raise BackendError(f"`{path}` cannot be read: {cause_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise BackendError(f"`{path}` is not JSON") from error
    if not isinstance(found, dict):
        raise BackendError(f"`{path}` is not a JSON object")
    return found
