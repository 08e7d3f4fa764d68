"""Where a gate keeps its files: `$SDS_HOME`, or `.sds` in the working folder. One folder a gate.

What can be made again, prepared weights, is in `$SDS_CACHE` or the user's cache folder, for all homes alike.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from sds.kernel.errors import SdsError, StoreError, UsageError
from sds.kernel.executor import Signer
from sds.kernel.keyring import Keyring
from sds.kernel.store import Store

GATES = ("refund",)  # the gates that ship with this package
KEY_BYTES = 32


def home() -> Path:
    return Path(os.environ.get("SDS_HOME") or ".sds")


def model_cache() -> Path:
    """Return where prepared weights are kept: `$SDS_CACHE`, or `sds` in the user's cache folder; `models` in it."""
    named = os.environ.get("SDS_CACHE")
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else (Path(users) if users else _users_home() / ".cache") / "sds") / "models"


def _users_home() -> Path:
    """Whoever has none has no cache either: there is nothing at this path."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def gate_home(gate: str) -> Path:
    return home() / gate


def decisions_path(folder: Path) -> Path:
    return folder / "decisions.db"


def key_path(folder: Path) -> Path:
    return folder / "kernel.key"


def open_record(folder: Path) -> Store:
    """Open a gate's record, made on first use. Raises StoreError when it is gone but its key is there.

    A fresh record would not know what has been paid. Every command comes through here: a file that was emptied and
    merely looked at would otherwise be a fresh record, too.
    """
    refuse_lost(folder)
    store = Store(decisions_path(folder))
    _unlock(store, folder)
    return store


def _unlock(store: Store, folder: Path) -> None:
    """Let the texts of cases be read where the kernel's key is there; without it everything else can be read."""
    if key_path(folder).exists():
        with suppress(SdsError):  # whoever needs the key says what is wrong with it
            store.unlock(Keyring(Signer(read_key(key_path(folder)))))


def refuse_lost(folder: Path) -> None:
    """Raise StoreError when a gate's record is gone or empty but its key is there."""
    path = decisions_path(folder)
    if key_path(folder).exists() and not (path.exists() and path.stat().st_size):
        raise StoreError(f"the record `{path}` is gone, but its key is there", hint="restore it, or use another folder")


def make_private(folder: Path, *, hint: str = "set SDS_HOME to a folder that can be written") -> None:
    """Make a folder that only this user can look into; one that is there already stays as it is."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"`{folder}` cannot be made: {error.strerror}", hint=hint) from error


def signer(folder: Path) -> Signer:
    """Return the kernel's signer, its key made on first use in a file that only this user can read."""
    path = key_path(folder)
    make_private(folder)
    try:
        if not path.exists():
            _write_key(path)
    except OSError as error:
        raise StoreError(f"`{path}` cannot be used: {error.strerror}") from error
    return Signer(read_key(path))


def read_key(path: Path) -> bytes:
    """Return the kernel's key. Raises StoreError when it is damaged, UsageError when others can read it."""
    try:
        if path.stat().st_mode & 0o077:
            raise UsageError(f"`{path}` can be read by others", hint=f"chmod 600 {path}")
        key = path.read_bytes()
    except OSError as error:
        raise StoreError(f"`{path}` cannot be used: {error.strerror}") from error
    if len(key) < KEY_BYTES:
        hint = "put the key back from a backup, or start anew with another folder: orders in the air need the old key"
        raise StoreError(f"`{path}` is damaged: it has {len(key)} bytes, a key has {KEY_BYTES}", hint=hint)
    return key


def _write_key(path: Path) -> None:
    """Give `path` a new key, whole and on disk before it has its name; a key that is there by then stays."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="kernel.key.") as file:  # mode 0600
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
        with suppress(FileExistsError):
            path.hardlink_to(file.name)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
