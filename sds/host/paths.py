"""Where a gate's files lie: `$SDS_HOME`, or `.sds` in the working folder. One folder for each gate.

A gate's record is a file in it; or, where `$SDS_STORE` is the address of a PostgreSQL database, a schema there.

Prepared weights can be made again. They lie in `$SDS_CACHE` or the user's cache folder, shared by all homes.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, closing, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

from sds.host import keys
from sds.host.clock import now_ms
from sds.kernel.canonical import one_line
from sds.kernel.errors import SdsError, StoreError, UsageError, cause_of
from sds.kernel.storage import ledger
from sds.kernel.storage.keyring import Keyring, Signer
from sds.kernel.storage.ledger import CheckpointWitness, Head, LedgerKey, PublicKeys
from sds.kernel.storage.sqlite import SqliteStore, look_at
from sds.kernel.storage.store import UPGRADABLE, Reader, Store
from sds.models.protocol import extra_hint, missing_package

BACKUP_MANIFEST = "manifest.json"  # in every backup, and in no gate's folder
SCHEMA_PREFIX = "sds_"  # of a gate's record in PostgreSQL
_NAMES_A_SCHEMA = re.compile("[a-z][a-z0-9_]{0,58}")
_COPY = "copy kernel.key from a machine whose processes use the record; if it is lost there, too"
OTHER_HOME = "check that this user may read and write there, or set SDS_HOME to another folder"


def home() -> Path:
    return Path(os.environ.get("SDS_HOME") or ".sds")


def model_cache() -> Path:
    """Return the folder of prepared weights: `models` in `$SDS_CACHE`, or in `sds` in the user's cache folder."""
    named = os.environ.get("SDS_CACHE")
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else (Path(users) if users else _users_home() / ".cache") / "sds") / "models"


def _users_home() -> Path:
    """Return the user's home; for a user without one a path at which there is nothing."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def gate_home(gate: str) -> Path:
    return home() / gate


def service_path() -> Path:
    """Return the service's own database, where records are files. It serves all gates, so it lies in no gate's folder."""
    return home() / "service.db"


def fitted_home(gate: str) -> Path:
    """Return where `sds fit` puts a gate's readers: outside the gate's folder, which may be begun anew."""
    return home() / "fitted" / gate


def labels_path(gate: str) -> Path:
    """Return the file that `sds label` appends to. It holds customers' texts: private, and kept when a record is begun anew."""
    return home() / "labels" / f"{gate}.jsonl"


def fitted_readers(gate: str, shipped: Path | None) -> Path | None:
    """Return the folder of a gate's readers: those fitted here, else those that came with it; None without either."""
    here = fitted_home(gate)
    return next((folder for folder in (here, shipped) if folder is not None and is_there(folder)), None)


def is_there(path: Path) -> bool:
    """Return whether a path exists. Raises StoreError where that cannot be seen, which is not the same as absent."""
    try:
        return path.exists()
    except OSError as error:
        raise StoreError(f"`{path}` cannot be accessed: {cause_of(error)}", hint=OTHER_HOME) from error


def decisions_path(folder: Path) -> Path:
    return folder / "decisions.db"


def key_path(folder: Path) -> Path:
    return folder / keys.KEY_FILE


def log_path(folder: Path) -> Path:
    return folder / "log.jsonl"


def open_record(folder: Path) -> Store:
    """Open a gate's record, made on first use, with a signed ledger. Raises StoreError when it is gone but its key is there.

    A fresh record would not know what has been paid. Every command opens the record here, so that a file that was
    emptied never passes for a fresh record. Where only the key is gone, the record opens all the same, to be read,
    verified and halted; all that decides asks for its `signer`.
    """
    refuse_lost(folder)
    return open_record_at(folder, store_url())


def open_record_at(folder: Path, url: str | None) -> Store:
    """Open the record of a folder, in PostgreSQL with `url`, else in its file; make it where there is none."""
    witness = CheckpointWitness(lambda since: _key_or_none(folder, since), now_ms)
    if url is None:
        store: Store = SqliteStore(decisions_path(folder), witness=witness)
    else:
        store = _postgres().PostgresStore(url, schema_name(folder), witness=witness)
    with ExitStack() as opened:
        opened.callback(store.close)
        if url is not None and is_there(key_path(folder)):
            keys.refuse_other_ledger_keys(folder, store)
        _unlock(store, folder)
        opened.pop_all()
    return store


def store_url() -> str | None:
    """Return `$SDS_STORE`, the address of the PostgreSQL that holds records; None: records are files. Raises UsageError."""
    url = os.environ.get("SDS_STORE") or None
    if url is not None and not url.startswith(("postgresql://", "postgres://")):
        raise UsageError("SDS_STORE is not the address of a PostgreSQL", hint="postgresql://USER@HOST/DATABASE")
    return url


def schema_name(folder: Path) -> str:
    """Return the schema of a gate's record in PostgreSQL. Raises UsageError for a folder that cannot name one."""
    if not _NAMES_A_SCHEMA.fullmatch(folder.name):
        message = f"the folder name `{folder.name}` cannot name a schema of PostgreSQL"
        raise UsageError(message, hint="use at most 59 lower-case letters, digits and `_`, beginning with a letter")
    return f"{SCHEMA_PREFIX}{folder.name}"


def _postgres() -> ModuleType:
    try:
        return import_module("sds.kernel.storage.postgres.store")
    except ImportError as error:
        if missing_package(error):
            message = "a record in PostgreSQL needs packages that are not installed"
            raise UsageError(message, hint=extra_hint("service")) from error
        message = f"the PostgreSQL store cannot be imported: {one_line(error, 200)}"
        raise StoreError(message, retryable=False) from error


def record_name(folder: Path) -> str:
    """Return the name of a gate's record in messages."""
    return f"schema {schema_name(folder)} of $SDS_STORE" if store_url() else str(decisions_path(folder))


def has_record(folder: Path) -> bool:
    """Return whether a gate has a record. Raises StoreError where PostgreSQL cannot be reached."""
    if store_url() is None:
        return is_there(decisions_path(folder))
    found = look_at_record(folder)
    if found is not None:
        found.close()
    return found is not None


def look_at_record(folder: Path) -> Reader | None:
    """Open a gate's record for reading only; None where there is none. Raises StoreError."""
    if (url := store_url()) is None:
        path = decisions_path(folder)
        return look_at(path) if is_there(path) else None
    found: Reader | None = _postgres().look_at(url, schema_name(folder))
    return found


def is_of_older_version(folder: Path) -> bool:
    """Tell whether opening a gate's record would raise the number of its schema. False for a record that cannot be read."""
    with suppress(StoreError):
        if (found := look_at_record(folder)) is not None:
            with closing(found) as record:
                return record.value("SELECT value FROM meta WHERE key = 'schema_version'") in UPGRADABLE
    return False


def recorded() -> list[str]:
    """Return the names of all folders, or schemas, with a record. A backup is none, also where it lies beside them."""
    if (url := store_url()) is None:
        folders = (path.parent for path in home().glob("*/decisions.db"))
        return sorted(folder.name for folder in folders if not is_there(folder / BACKUP_MANIFEST))
    return [name.removeprefix(SCHEMA_PREFIX) for name in _postgres().records_in(url, SCHEMA_PREFIX)]


def _unlock(store: Store, folder: Path) -> None:
    """Make the texts of cases readable where the kernel's keys are there. Everything else is readable without them."""
    if is_there(key_path(folder)):
        with suppress(SdsError):  # a fault is reported where the keys are needed
            if keys.read_ring(key_path(folder)).secrets:
                store.unlock(Keyring(keys.signer_of(folder)))


def _key_or_none(folder: Path, since: Head | None) -> LedgerKey | None:
    try:
        return _ledger_key(folder, since)
    except SdsError:  # entries are then unsigned, which `sds ledger verify` and `sds doctor` report
        return None


def _ledger_key(folder: Path, since: Head | None) -> LedgerKey:
    refuse_lost_key(folder)
    return keys.ledger_key(folder, since, now_ms=now_ms())


def ledger_key(folder: Path, record: Reader) -> LedgerKey:
    """Return the key that signs a record's ledger, made on first use. Raises StoreError when it is lost."""
    return _ledger_key(folder, None if ledger.newest_checkpoint(record) else ledger.head(record))


def refuse_lost(folder: Path) -> None:
    """Raise StoreError when a gate's record is gone or empty but its key is there."""
    if is_there(key_path(folder)) and not _is_begun(folder):
        message = f"the record `{record_name(folder)}` is gone, but its key is there"
        raise StoreError(message, hint="restore the record from a backup, or use another folder")


def _is_begun(folder: Path) -> bool:
    """Return whether there is a record that is more than an empty file."""
    return has_record(folder) and (store_url() is not None or bool(decisions_path(folder).stat().st_size))


def make_private(folder: Path, *, hint: str = "set SDS_HOME to a folder that can be written") -> None:
    """Make a folder that only this user can read, and its parent likewise; existing folders stay as they are.

    The parent is private too, because a user who can write there could replace the folder.
    """
    try:
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"`{folder}` cannot be created: {cause_of(error)}", hint=hint) from error


def refuse_lost_key(folder: Path) -> None:
    """Raise StoreError when the keys that signed a record are gone: new keys would verify none of it."""
    key = key_path(folder)
    if not _is_begun(folder):
        return
    orders, checkpoints = _has_signatures(folder)
    if (orders or checkpoints) and not is_there(key):
        if store_url():
            message = f"the record was signed with keys that are not in `{folder}`"
            raise StoreError(message, hint=f"{_COPY}: {keys.SAY_LOST}")
        raise StoreError(f"the key `{key}` is gone, but its record is there", hint=keys.LOST)
    if checkpoints and keys.read_ring(key).ledger is None:
        raise StoreError(f"`{key}` is older than its record: it has no key for the ledger", hint=keys.LOST)


def _has_signatures(folder: Path) -> tuple[bool, bool]:
    """Return whether a record holds orders, and checkpoints. An old record may lack either table."""
    found = look_at_record(folder)
    if found is None:
        return False, False
    with closing(found) as reader:
        known = reader.schema
        orders, checkpoints = (
            table in known and reader.value(f"SELECT EXISTS (SELECT 1 FROM {table})") == 1
            for table in ("execution_log", "checkpoints")
        )
    return orders, checkpoints


def refuse_altered(folder: Path, record: Reader) -> None:
    """Raise StoreError when a record's ledger differs from what was signed last: it must not be decided with."""
    if is_there(key_path(folder)) and (ring := keys.read_ring(key_path(folder))).ledger is not None:
        ledger.refuse_altered_ledger(record, ring.ledger.public)


def signer(folder: Path) -> Signer:
    """Return the kernel's signer. Its key is made on first use, in a file that only this user can read."""
    kernel_keys(folder)
    return keys.signer_of(folder)


def kernel_keys(folder: Path) -> tuple[bytes, ...]:
    """Return the kernel's secrets, at least 32 bytes each: the newest, which signs, then older ones.

    The first is made on first use. Raises StoreError when they are lost or damaged, UsageError when other users can read them.
    """
    make_private(folder)
    refuse_lost_key(folder)
    return keys.order_keys(folder, now_ms=now_ms())


def public_keys_of(folder: Path) -> PublicKeys | None:
    """Return the keys that verify a folder's ledger; None where nothing was ever signed."""
    found = known_public_keys(folder)
    return found[0] if found else None


def known_public_keys(folder: Path) -> tuple[PublicKeys, Path] | None:
    """Return the keys that verify a folder's ledger, and their file: `kernel.key` where it has them, else `ledger.pub`."""
    path = key_path(folder)
    ring = keys.read_ring(path) if is_there(path) else keys.Ring()
    if ring.ledger is not None:
        return ring.ledger.public, path
    path = folder / keys.PUBLIC_FILE
    return (keys.read_public(path), path) if is_there(path) else None
