"""Where a gate keeps its files: `$SDS_HOME`, or `.sds` in the working folder. One folder a gate."""

from __future__ import annotations

import os
import secrets
import time
import uuid
from pathlib import Path

from sds.kernel.errors import StoreError, UsageError
from sds.kernel.executor import Signer

KEY_BYTES = 32


def home() -> Path:
    return Path(os.environ.get("SDS_HOME") or ".sds")


def gate_home(gate: str) -> Path:
    return home() / gate


def decisions_path(folder: Path) -> Path:
    return folder / "decisions.db"


def signer(folder: Path) -> Signer:
    """Return the kernel's signer, its key made on first use in a file that only this user can read."""
    path = folder / "kernel.key"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if path.stat().st_mode & 0o077:
                raise UsageError(f"`{path}` can be read by others", hint=f"chmod 600 {path}") from None
        else:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
        return Signer(path.read_bytes())
    except OSError as error:
        raise StoreError(f"`{path}` cannot be used: {error.strerror}") from error


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def new_id() -> str:
    return str(uuid.uuid4())
