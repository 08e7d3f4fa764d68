"""Puts a backup in the place of a record that is gone, or that has no entries beyond the backup.

Everything is verified first, and one rename puts the record in place: after a kill at any moment there is the old
record or the new one. The restored record lacks the decisions since the backup. Its order keys and the executor's
statement keep it from paying twice (`kernel.executor.wholeness`).
"""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from sds.host import keys, paths
from sds.host.backup import (
    A_BACKUP,
    MESSAGE_CHARS_MAX,
    BackupManifest,
    Unpacked,
    keys_in,
    refuse_damaged,
    unpacked,
    verified,
)
from sds.kernel.audit import verify
from sds.kernel.canonical import one_line
from sds.kernel.errors import SdsError, StoreError, UsageError, cause_of
from sds.kernel.storage import copying
from sds.kernel.storage.ledger import Head, PublicKeys, head
from sds.kernel.storage.private_files import replace_private_file, sync_folder
from sds.kernel.storage.sqlite import SqliteReader, SqliteStore, look_at
from sds.kernel.storage.sqlite_schema import foreign
from sds.kernel.storage.store import Reader

LOCKED_S = 1.0
_DAMAGED = "restore another backup; if other keys than those here signed this one, name them with --public-key"


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored, and whether the kernel's keys are there now: without them nothing is decided."""

    manifest: BackupManifest
    has_key: bool


def restore(source: Path, folder: Path, *, gate: str, public: PublicKeys | None = None) -> Restored:
    """Put a backup of a gate's record in the gate's folder.

    `public`: whose signatures it must have; by default the keys in the folder, else those in the backup. Raises UsageError
    where the existing record has more entries, is another's or is in use; StoreError where the backup is not as it was made.
    """
    with suppress(OSError):  # an unreadable path is reported below
        if not source.exists():
            raise UsageError(f"`{source}` is not a whole backup", hint=A_BACKUP)
    with _folder_of_gate(folder), unpacked(source, folder) as backup:
        if backup.manifest.gate != gate:
            hint = f"sds restore --gate {shlex.quote(backup.manifest.gate)} --from {shlex.quote(str(source))}"
            raise UsageError(f"`{source}` is a backup of gate `{backup.manifest.gate}`, not of `{gate}`", hint=hint)
        key = _key_to_put(backup, folder)
        known = public or _public_of(key, backup, folder)
        _refuse_foreign(backup.record)
        verified(backup.record, known, lambda _: None, backup.manifest.expected, hint=_DAMAGED)
        with _placing(folder, backup, known) as replace:
            if key is not None:
                replace_private_file(paths.key_path(folder), key.read_bytes())
            if (made := backup.folder / keys.PUBLIC_FILE).exists() and not paths.is_there(paths.key_path(folder)):
                replace_private_file(folder / keys.PUBLIC_FILE, made.read_bytes())
            replace()
        sync_folder(folder)
    if paths.is_there(paths.key_path(folder)) and (ring := keys.read_ring(paths.key_path(folder))).ledger is not None:
        replace_private_file(folder / keys.PUBLIC_FILE, ring.ledger.model_dump_json().encode() + b"\n")
    return Restored(backup.manifest, paths.is_there(paths.key_path(folder)))


@contextmanager
def _folder_of_gate(folder: Path) -> Iterator[None]:
    """Make the gate's folder for one block, and remove it again where the block raises before anything is in it."""
    is_new = not paths.is_there(folder)
    paths.make_private(folder)
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


def _key_to_put(backup: Unpacked, folder: Path) -> Path | None:
    """Return the backup's key file where it must be put in place; None: the existing one stays. Raises UsageError."""
    there = paths.key_path(folder)
    if backup.key is None or not paths.is_there(there):
        return backup.key
    ours, theirs = keys.read_ring(backup.key), keys.read_ring(there)
    if _holds(theirs, ours):
        return None
    if _holds(ours, theirs):
        return backup.key
    hint = f"check that the backup is of this gate; if its keys are the right ones, move `{there}` away"
    raise UsageError(f"the keys in `{there}` differ from those of the backup", hint=hint)


def _holds(ring: keys.Ring, other: keys.Ring) -> bool:
    """Return whether a ring has every key of another."""
    public = {each.key for each in ring.ledger.keys} if ring.ledger else set()
    wanted = {each.key for each in other.ledger.keys} if other.ledger else set()
    return set(ring.secrets) >= set(other.secrets) and public >= wanted


def _public_of(key: Path | None, backup: Unpacked, folder: Path) -> PublicKeys | None:
    if key is None and (found := paths.known_public_keys(folder)) is not None:
        return found[0]
    return keys_in(backup.folder)


def _refuse_foreign(record: Path) -> None:
    """Raise StoreError for a record with tables, views or triggers that are not this program's, before anything runs that is in them."""
    with closing(look_at(record)) as found:
        if names := foreign(found):
            raise StoreError(f"the record is damaged: schema: `{names[0]}` is not this program's", hint=_DAMAGED)


def _placing(folder: Path, backup: Unpacked, public: PublicKeys | None) -> AbstractContextManager[Callable[[], None]]:
    """Return a context that makes ready and yields the function which puts the record in place."""
    url = paths.store_url()
    if url is None:
        return _replacing_file(paths.decisions_path(folder), backup)
    paths.has_record(folder)  # raises UsageError where packages for PostgreSQL are missing
    return _making_schema(url, paths.schema_name(folder), backup, public)


@contextmanager
def _making_schema(url: str, schema: str, backup: Unpacked, public: PublicKeys | None) -> Iterator[Callable[[], None]]:
    """Copy the record to a temporary schema, and yield the function that renames it. Raises UsageError: the name is taken."""
    from sds.kernel.storage.postgres.putting import drop, put_in_place  # noqa: PLC0415  an option
    from sds.kernel.storage.postgres.store import PostgresStore  # noqa: PLC0415  an option

    aside = f"restoring_{token_hex(6)}"
    try:
        with closing(SqliteStore(backup.record)) as copy, closing(PostgresStore(url, aside)) as made:
            with copy.frozen() as source:
                copying.copy(source, made)
            refuse_damaged(verify.verify(made, backup.manifest.expected, public), _DAMAGED)
        yield lambda: put_in_place(url, aside, schema)
    finally:
        drop(url, aside)


@contextmanager
def _replacing_file(there: Path, backup: Unpacked) -> Iterator[Callable[[], None]]:
    """Lock the existing record, and yield the function that replaces it by the backup's.

    Raises UsageError where it is in use or has more entries, StoreError where it cannot be read.
    """
    if not (paths.is_there(there) and there.stat().st_size):
        for beside in ("-wal", "-shm", "-journal"):  # left by a lost record: SQLite would apply them to the new one
            there.with_name(there.name + beside).unlink(missing_ok=True)
        yield lambda: _rename(backup.record, there)
        return
    with used_alone(there) as known:
        with closing(SqliteStore(backup.record)) as copy:
            _refuse_knowing_more(there, known, copy)
        # a process that waits with the old file open does no harm: SQLite writes to no file that was moved
        yield lambda: _rename(backup.record, there)


@contextmanager
def used_alone(there: Path) -> Iterator[Head]:
    """Lock all others out of an existing record for one block, and yield its head.

    Raises UsageError where it is in use, StoreError where it cannot be read.
    """
    with closing(sqlite3.connect(there, timeout=LOCKED_S, isolation_level=None)) as db:
        try:
            _lock_out_others(db)
            known = head(SqliteReader(db))
        except (sqlite3.Error, StoreError) as error:
            raise _unusable_error(there, error) from error
        yield known


def _lock_out_others(db: sqlite3.Connection) -> None:
    """Lock out all others, and leave no journal beside the file, which SQLite would apply to the next one."""
    for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=DELETE", "journal_mode=MEMORY"):
        db.execute(f"PRAGMA {pragma}").fetchall()
    db.execute("BEGIN EXCLUSIVE")


def _unusable_error(there: Path, error: Exception) -> SdsError:
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
        return UsageError(f"other processes use the record `{there}`", hint="stop the gates and services that use it")
    hint = f"its entries are unknown; move it away, then restore again: mv {there} {there}.damaged"
    return StoreError(f"`{there}` cannot be read: {one_line(error, MESSAGE_CHARS_MAX)}", hint=hint)


def _refuse_knowing_more(there: Path, known: Head, copy: Reader) -> None:
    """Raise UsageError unless the backup has every entry of the existing record."""
    last = head(copy)
    stored = copy.value("SELECT entry_hash FROM ledger WHERE idx = ?", (known.idx,)) if known.idx else known.entry_hash
    if stored == known.entry_hash:
        return
    more = f"up to entry {known.idx}, the backup up to {last.idx}" if known.idx > last.idx else "other entries"
    hint = f"to give up its entries nevertheless, move it away: mv {there} {there}.given-up"
    raise UsageError(f"the record `{there}` has entries that the backup lacks: {more}", hint=hint)


def _rename(record: Path, there: Path) -> None:
    try:
        record.replace(there)
    except OSError as error:
        raise StoreError(f"`{there}` cannot be written: {cause_of(error)}") from error
