"""SQLite, durable: WAL with `synchronous=FULL`, one connection behind a lock, immediate transactions.

A transaction either commits whole or leaves nothing. Several processes may share the file; a writer waits up to
`BUSY_MS` for another. Whatever SQLite raises arrives as StoreError.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from sds.kernel.canonical import one_line
from sds.kernel.errors import StoreError
from sds.kernel.storage.keyring import Keyring
from sds.kernel.storage.private_files import make_private_file, tighten

BUSY_MS = 5_000
BUSY_POLL_MS = 5
MESSAGE_CHARS_MAX = 300
SCHEMA_VERSION = "5"
UPGRADABLE = ("1", "2", "3", "4")  # versions that lack nothing but tables

# A file that is damaged in its schema makes messages and names that are no text: Python cannot decode them.
_REFUSED = (sqlite3.Error, UnicodeDecodeError)
# What the trigger `clock_was_set_back` would have written of the entries that were there before it.
_OLDER_CLOCK_STEPS = (
    "INSERT INTO clock_steps SELECT b.idx, a.at_ms, b.at_ms FROM ledger a JOIN ledger b ON b.idx = a.idx + 1"
    " WHERE b.at_ms < a.at_ms - 60000 AND b.idx NOT IN (SELECT idx FROM clock_steps)"
)

_UNSTORABLE = (OverflowError, UnicodeEncodeError)  # a number beyond 64 bits, text that has no UTF-8

_KEY = "put `kernel.key` back beside the record: from a backup, readable by you alone"
_WRITE, _RESTORE = "is it in a folder that you may write?", "restore it from a backup, or use another folder"
_MENDS = {
    sqlite3.SQLITE_CANTOPEN: _WRITE,
    sqlite3.SQLITE_READONLY: _WRITE,
    sqlite3.SQLITE_PERM: _WRITE,
    sqlite3.SQLITE_NOTADB: _RESTORE,
    sqlite3.SQLITE_CORRUPT: _RESTORE,
    sqlite3.SQLITE_BUSY: "another program holds it: end that, or try again",
    sqlite3.SQLITE_FULL: "the disk is full",
}

Row = tuple[Any, ...]
Connect = Callable[[Path], sqlite3.Connection]


def connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)


def schema_of(db: sqlite3.Connection) -> dict[str, str]:
    """Return the text of every table, index and trigger, by name."""
    return dict(db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall())


@cache
def expected_schema() -> Mapping[str, str]:
    """Return what `schema_of` says of a store that nobody has tampered with."""
    with closing(sqlite3.connect(":memory:")) as db:
        for statement in _statements():
            db.execute(statement)
        return MappingProxyType(schema_of(db))


def _statements() -> Iterator[str]:
    statement = ""
    for line in Path(__file__).with_name("schema.sql").read_text(encoding="utf-8").splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _make_private(path: Path) -> None:
    """Make the database's file before SQLite does, which gives its log and its index the same rights; tighten old ones."""
    make_private_file(path)
    for beside in ("-wal", "-shm"):
        tighten(path.with_name(path.name + beside))


class Reader:
    """Reading statements over one connection behind a lock. Once it is unlocked, the texts of cases can be read, too."""

    def __init__(self, db: sqlite3.Connection, keyring: Keyring | None = None) -> None:
        self._db, self._lock = db, threading.RLock()
        self._keyring = keyring

    @property
    def locked(self) -> bool:
        return self._keyring is None

    @property
    def keyring(self) -> Keyring:
        """Return what seals and opens the texts of cases. Raises StoreError while the record is locked."""
        if self._keyring is None:
            raise StoreError("the texts of this record are sealed, and the kernel's key is not here", hint=_KEY)
        return self._keyring

    def unlock(self, keyring: Keyring) -> None:
        """Take the keys that the texts of cases lie under; those of whoever was first stay."""
        self._keyring = self._keyring or keyring

    def rows(self, sql: str, values: Row = ()) -> list[Row]:
        with self._lock:
            try:
                return self._db.execute(sql, values).fetchall()
            except _REFUSED as error:
                raise StoreError(f"the store cannot be read: {one_line(error, MESSAGE_CHARS_MAX)}") from error
            except _UNSTORABLE as error:
                raise StoreError(f"the store cannot hold such a value: {error}") from error

    def row(self, sql: str, values: Row = ()) -> Row | None:
        found = self.rows(sql, values)
        return found[0] if found else None

    def value(self, sql: str, values: Row = ()) -> Any:
        found = self.row(sql, values)
        return found[0] if found else None

    @property
    def halted(self) -> bool:
        return bool(self.value("SELECT value FROM meta WHERE key = 'halted'") != "0")

    @property
    def schema(self) -> dict[str, str]:
        return dict(self.rows("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))

    def close(self) -> None:
        with self._lock:
            self._db.close()


class Witness(Protocol):
    """Signs what a store writes into its ledger: see `kernel.checkpoints`."""

    def appended(self, store: Store, idx: int, entry_hash: str, prev_hash: str) -> None:
        """Look at an entry inside the transaction that has just written it."""
        ...

    def closing(self, store: Store) -> None:
        """Look at the ledger before the store is closed."""
        ...


class Store(Reader):
    """The kernel's one durable store, in files that only their user can read.

    `connect` is passed in so that tests can fail every single step. Without a `witness` no entry is signed.
    """

    def __init__(self, path: Path, *, connect: Connect = connect, witness: Witness | None = None) -> None:
        self.path, self.witness = path, witness
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(path)
            super().__init__(connect(path))
        except (*_REFUSED, OSError) as error:
            raise self._unusable(error) from error
        try:
            self._prepare()
        except (*_REFUSED, StoreError) as error:
            self.close()
            raise self._unusable(error) from error

    def close(self) -> None:
        if self.witness is not None:
            self.witness.closing(self)
        super().close()

    def _unusable(self, error: Exception) -> StoreError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        damaged = _RESTORE if isinstance(error, UnicodeDecodeError) else ""
        hint = _MENDS.get(code) or (_WRITE if isinstance(error, OSError) else damaged)
        why = (error.strerror or "unknown cause").lower() if isinstance(error, OSError) else error
        said = one_line(why, MESSAGE_CHARS_MAX)
        return StoreError(f"`{self.path}` cannot be opened as a decision store: {said}", hint=hint)

    def _write_ahead(self) -> str:
        """Switch to WAL; SQLite does not wait by itself while another does the same to a fresh file."""
        tries = BUSY_MS // BUSY_POLL_MS
        while True:
            try:
                return str(self._db.execute("PRAGMA journal_mode=WAL").fetchone()[0])
            except sqlite3.OperationalError as error:
                tries -= 1
                if not tries or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                time.sleep(BUSY_POLL_MS / 1000)

    def _prepare(self) -> None:
        mode = self._write_ahead()
        if mode != "wal":
            raise StoreError(f"its file system offers no write-ahead log (journal mode {mode})")
        for pragma in ("synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"):  # a destroyed key is overwritten
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            found = schema_of(self._db)
            if not found:
                self._create()
            elif not {"meta", "ledger"} <= found.keys():
                raise StoreError("it is the database of another program")
            else:
                self._upgrade(found)
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        version = self.value("SELECT value FROM meta WHERE key = 'schema_version'")
        if version != SCHEMA_VERSION:
            raise StoreError(f"it has schema version `{version}`, this program needs `{SCHEMA_VERSION}`")

    def _upgrade(self, found: dict[str, str]) -> None:
        """Add what an older version lacks. What it has stays as it is, down to the text of its definition."""
        version = self._db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        if version is None or version[0] not in UPGRADABLE:
            return
        for name, statement in expected_schema().items():
            if name not in found:
                self._db.execute(statement)
        self._db.execute(_OLDER_CLOCK_STEPS)
        self._db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (SCHEMA_VERSION,))

    def _create(self) -> None:
        for statement in _statements():
            self._db.execute(statement)
        self._db.execute("INSERT INTO meta VALUES ('schema_version', ?), ('halted', '0')", (SCHEMA_VERSION,))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold the write lock for a block: committed when it ends, rolled back when it raises."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise StoreError(f"the store refused: {one_line(error, MESSAGE_CHARS_MAX)}") from error

    @contextmanager
    def frozen(self) -> Iterator[Reader]:
        """Read one moment of the file while others go on writing; text that is not UTF-8 arrives as surrogates."""
        try:
            db = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
        except _REFUSED as error:
            raise StoreError(f"the store cannot be read: {one_line(error, MESSAGE_CHARS_MAX)}") from error
        with closing(Reader(db, self._keyring)) as reader:
            reader.rows("BEGIN")
            yield reader

    def truncate_log(self) -> bool:
        """Copy the write-ahead log to the file and empty it; False while others read or write an older state."""
        return self.row("PRAGMA wal_checkpoint(TRUNCATE)") == (0, 0, 0)

    def run(self, sql: str, values: Row = ()) -> int:
        """Execute one statement inside the caller's transaction; return the number of rows it changed."""
        try:
            return self._db.execute(sql, values).rowcount
        except UnicodeDecodeError as error:
            raise StoreError(f"the store refused: {error}") from error
        except _UNSTORABLE as error:
            raise StoreError(f"the store cannot hold such a value: {error}") from error

    def insert(self, table: str, **values: Any) -> None:
        """Insert one row; raises when its key is taken."""
        columns = ", ".join(values)
        self.run(f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(values))})", tuple(values.values()))
