"""A backup of one gate: its record at one moment, the ledger's public keys, the signed head, and the SHA-256 of each file.

It contains the secret keys only on request: record and keys together open the text of every case. It is a folder, or
one file where its name ends with `.tar`. It gets its name once it is whole, on disk and verified.

`sds.host.restoring` puts a backup back. It first verifies the sums, the whole ledger with its tables, and the head.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from hashlib import file_digest
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from sds.host import keys, paths
from sds.kernel.audit import verify
from sds.kernel.canonical import one_line, sha256_hex
from sds.kernel.errors import StoreError, UsageError, cause_of
from sds.kernel.storage import copying, ledger
from sds.kernel.storage.ledger import Checkpoint, Head, PublicKeys
from sds.kernel.storage.private_files import replace_private_file, sync_folder, working_folder
from sds.kernel.storage.sqlite import SqliteStore
from sds.kernel.storage.store import Store

Name = Literal["decisions.db", "ledger.pub", "kernel.key"]

FORM: Literal["sds backup 1"] = "sds backup 1"
MANIFEST, RECORD = paths.BACKUP_MANIFEST, "decisions.db"
NAMES: tuple[Name, ...] = ("decisions.db", "ledger.pub", "kernel.key")
ONE_FILE = ".tar"
_BACKING_UP, _RESTORING = ".sds-backup.", ".restore."  # prefixes of temporary folders
_ROOM = "check the free space and the rights of this user"
MANIFEST_BYTES_MAX = 64 * 1024
MEMBERS_MAX = 16  # of an archive: one that was altered may go round in circles for ever
A_BACKUP = "name a folder or a .tar file that sds backup made"
MESSAGE_CHARS_MAX = 300


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class FileSum(_Strict):
    """Length and SHA-256 that a file of a backup must have."""

    bytes: int = Field(ge=0)
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class BackupManifest(_Strict):
    """The contents of a backup. `signed`: the head, signed by the ledger's key; None where the key was missing or never used.

    `sha256`: of this manifest with an empty `sha256`.
    """

    form: Literal["sds backup 1"]
    gate: str
    made_ms: int
    head: Head
    signed: Checkpoint | None
    files: dict[Name, FileSum]
    sha256: str = ""

    @property
    def summed(self) -> BackupManifest:
        """The same manifest with its own SHA-256."""
        bare = self.model_copy(update={"sha256": ""})
        return bare.model_copy(update={"sha256": sha256_hex(bare.model_dump_json().encode())})

    @property
    def expected(self) -> Head | Checkpoint:
        return self.signed or self.head


def back_up(store: Store, folder: Path, to: Path, *, gate: str, with_key: bool, now_ms: int) -> BackupManifest:
    """Write a backup of a gate's record, open as `store`, to `to`, while others go on deciding. Return its manifest.

    The key is read after the record: it may then hold one key more than the record needs, but never one too few. Raises
    UsageError where `to` exists or there is no key to include, StoreError where the record is damaged.
    """
    if os.path.lexists(to):
        raise UsageError(f"`{to}` already exists", hint="name a new path: a backup overwrites nothing")
    if with_key and not paths.is_there(paths.key_path(folder)):
        raise UsageError(f"there is no `{paths.key_path(folder)}` to back up", hint="leave out --with-key")
    with _folder_beside(to) as made:
        copy_record(store, made / RECORD)
        _copy_keys(folder, made, with_key=with_key)
        head, signed = verified(made / RECORD, keys_in(made), lambda copy: _signed_head(copy, folder, now_ms))
        files: dict[Name, FileSum] = {name: file_sum(made / name) for name in NAMES if (made / name).exists()}
        manifest = BackupManifest(form=FORM, gate=gate, made_ms=now_ms, head=head, signed=signed, files=files).summed
        (made / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        _publish(made, to)
    return manifest


@contextmanager
def _folder_beside(to: Path) -> Iterator[Path]:
    """Yield a private folder beside `to` that is deleted afterwards, unless it was renamed to `to`. Raises StoreError."""
    try:
        to.absolute().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with working_folder(to.absolute().parent, _BACKING_UP) as made:
            yield made
    except OSError as error:
        hint = f"{_ROOM}, or name another path"
        raise StoreError(f"`{to}` cannot be written: {cause_of(error)}", hint=hint) from error


def copy_record(store: Store, into: Path) -> None:
    """Write the record as it is at one moment to a new SQLite file. Raises StoreError."""
    if not isinstance(store, SqliteStore):
        with closing(SqliteStore(into)) as copy, store.frozen() as source:
            copying.copy(source, copy)
        return
    try:
        with closing(sqlite3.connect(f"{store.path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            db.execute("VACUUM INTO ?", (str(into),))
    except sqlite3.Error as error:
        raise StoreError(f"the record cannot be copied: {one_line(error, MESSAGE_CHARS_MAX)}") from error


def _copy_keys(folder: Path, made: Path, *, with_key: bool) -> None:
    """Copy the public keys, and with `with_key` the secret ones; a key file is always replaced as a whole."""
    if with_key:
        keys.read_ring(paths.key_path(folder))  # one that cannot be used is named
        replace_private_file(made / keys.KEY_FILE, paths.key_path(folder).read_bytes())
    key = (made if with_key else folder) / keys.KEY_FILE
    ring = keys.read_ring(key) if key.exists() else keys.Ring()
    if ring.ledger is not None:
        (made / keys.PUBLIC_FILE).write_bytes(ring.ledger.model_dump_json().encode() + b"\n")
    elif (folder / keys.PUBLIC_FILE).exists():
        shutil.copyfile(folder / keys.PUBLIC_FILE, made / keys.PUBLIC_FILE)


def keys_in(folder: Path) -> PublicKeys | None:
    """Return the keys that verify the ledger of the record in a folder; None where it has no public keys."""
    path = folder / keys.PUBLIC_FILE
    return keys.read_public(path) if path.exists() else None


def verified(
    record: Path,
    public: PublicKeys | None,
    signed: Callable[[Store], Checkpoint | None],
    expected: Head | Checkpoint | None = None,
    *,
    hint: str = "sds ledger verify --gate GATE",
) -> tuple[Head, Checkpoint | None]:
    """Verify a whole copy of a record; return its head and the result of `signed`. Raises StoreError where it is damaged."""
    with closing(SqliteStore(record)) as copy:
        found = verify.verify(copy, expected, public)
        refuse_damaged(found, hint)
        asked = signed(copy)
        copy.truncate_log()
    return found.head, asked


def refuse_damaged(found: verify.Report, hint: str) -> None:
    if found.faults:
        more = f", and {len(found.faults) - 1} more" if len(found.faults) > 1 else ""
        raise StoreError(f"the record is damaged: {found.faults[0]}{more}", hint=hint)


def _signed_head(copy: Store, folder: Path, now_ms: int) -> Checkpoint | None:
    """Return the copy's head, signed by the ledger's key; None without a key. Writes nothing to the record."""
    last, head = ledger.newest_checkpoint(copy), ledger.head(copy)
    if last is None or not paths.is_there(paths.key_path(folder)):
        return None
    return last if last.idx == head.idx else keys.ledger_key(folder, None, now_ms=now_ms).signed(head, last, now_ms)


def file_sum(path: Path) -> FileSum:
    """Sync a file to disk, make it private to its user, and return its length and SHA-256."""
    path.chmod(0o600)
    with path.open("rb+") as file:
        found = FileSum(bytes=path.stat().st_size, sha256=file_digest(file, "sha256").hexdigest())
        os.fsync(file.fileno())
    return found


def _publish(made: Path, to: Path) -> None:
    """Give a backup its name, as a folder or as one file. Raises OSError."""
    if to.suffix != ONE_FILE:
        for name in (*NAMES, MANIFEST):
            if (made / name).exists():
                file_sum(made / name)
        sync_folder(made)
        made.rename(to)
    else:
        whole = made / to.name
        with tarfile.open(whole, "w") as archive:
            for name in (MANIFEST, *NAMES):
                if (made / name).exists():
                    archive.add(made / name, name)
        file_sum(whole)
        whole.rename(to)
    sync_folder(to.absolute().parent)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A backup's files, copied to a temporary folder and verified against the manifest."""

    folder: Path
    manifest: BackupManifest

    @property
    def record(self) -> Path:
        return self.folder / RECORD

    @property
    def key(self) -> Path | None:
        path = self.folder / keys.KEY_FILE
        return path if path.exists() else None


@contextmanager
def unpacked(source: Path, beside: Path) -> Iterator[Unpacked]:
    """Copy a backup's files to a private folder in `beside`, verify their sums, and delete the folder afterwards.

    Raises UsageError for anything that is no backup, StoreError for a backup that was altered or is not whole.
    """
    with working_folder(beside, _RESTORING) as made:
        with _opened_backup(source) as copy_file:
            manifest = _read_manifest(source, copy_file, made)
            for name, wanted in manifest.files.items():
                if not copy_file(name, made / name, wanted.bytes) or file_sum(made / name) != wanted:
                    hint = "restore another backup"
                    raise StoreError(f"`{name}` in `{source}` has changed since the backup", hint=hint)
        yield Unpacked(made, manifest)


CopyFile = Callable[[str, Path, int], bool]


@contextmanager
def _opened_backup(source: Path) -> Iterator[CopyFile]:
    """Yield a function that copies one file of a backup, at most one byte more than `size`, and returns whether it fits."""
    try:
        if source.is_dir():
            yield lambda name, to, size: _copy_up_to(_opened(source / name), to, size)
            return
        with _opened(source) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            plain = (each for each in islice(archive, MEMBERS_MAX) if each.isreg() and not each.issparse())
            members = {each.name: each for each in plain}

            def copy_file(name: str, to: Path, size: int) -> bool:
                found = archive.extractfile(members[name])
                return found is not None and _copy_up_to(found, to, size)

            yield copy_file
    except (tarfile.TarError, EOFError, ValueError, ArithmeticError, RecursionError) as error:
        message = f"`{source}` is not a backup: {one_line(error, MESSAGE_CHARS_MAX)}"
        raise UsageError(message, hint=A_BACKUP) from error
    except (FileNotFoundError, KeyError) as error:
        raise UsageError(f"`{source}` is not a whole backup", hint=A_BACKUP) from error
    except OSError as error:
        raise StoreError(f"`{source}` cannot be read: {cause_of(error)}") from error


def _opened(path: Path) -> IO[bytes]:
    """Open a file to read it. Raises FileNotFoundError also for what is no file: a pipe would be waited for."""
    if not path.is_file():
        raise FileNotFoundError(path)
    return path.open("rb")


def _copy_up_to(file: IO[bytes], to: Path, size: int) -> bool:
    with file as reading:
        _write(to, b"", "xb")
        while size >= 0 and (data := reading.read(min(size + 1, 1 << 20))):
            _write(to, data, "ab")
            size -= len(data)
    return size >= 0


def _write(to: Path, data: bytes, mode: Literal["xb", "ab"]) -> None:
    """Write bytes to a private file. Raises StoreError, which names what could not be written."""
    try:
        with to.open(mode) as writing:
            to.chmod(0o600)
            writing.write(data)
    except OSError as error:
        raise StoreError(f"`{to}` cannot be written: {cause_of(error)}", hint=_ROOM) from error


def _read_manifest(source: Path, copy_file: CopyFile, made: Path) -> BackupManifest:
    with suppress(ValueError):
        if copy_file(MANIFEST, made / MANIFEST, MANIFEST_BYTES_MAX):
            manifest = BackupManifest.model_validate_json((made / MANIFEST).read_bytes())
            if RECORD in manifest.files and manifest == manifest.summed:
                return manifest
    raise StoreError(f"`{MANIFEST}` in `{source}` is damaged", hint="restore another backup")
