"""A store in SQLite: WAL with `synchronous=FULL`, one connection for writing behind a lock, immediate transactions.
One that need not be durable has NORMAL; the next durable one, of any process, takes it along to the disk.

Several processes may share the file. A writer waits up to `BUSY_MS` for another. Reading uses the writing connection while
that is free, and other connections while a transaction is open: it never waits for the disk.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from sds.kernel.canonical import one_line
from sds.kernel.errors import StoreError, cause_of
from sds.kernel.storage.keyring import Keyring
from sds.kernel.storage.open_files import OpenFile, refuse_inherited
from sds.kernel.storage.private_files import make_private_file, tighten
from sds.kernel.storage.sqlite_schema import SCHEMA, expected_schema, refuse_losing, schema_of, statements
from sds.kernel.storage.store import (
    MESSAGE_CHARS_MAX,
    SCHEMA_VERSION,
    SUPERSEDED,
    UPGRADABLE,
    Reader,
    Row,
    Store,
    Witness,
    check_lock_name,
    refuse_fork,
    refuse_newer,
    refuse_writing,
)
from sds.kernel.storage.write_ahead import emptied

BUSY_MS = 5_000
BUSY_POLL_MS = 5
READERS_MAX = 8  # connections for reading that are kept open

# A file whose schema is damaged gives messages and names that Python cannot decode.
_REFUSED = (sqlite3.Error, UnicodeDecodeError)
# Writes what the trigger `clock_was_set_back` would have written for entries that are older than the trigger.
_OLDER_CLOCK_STEPS = (
    "INSERT INTO clock_steps SELECT b.idx, a.at_ms, b.at_ms FROM ledger a JOIN ledger b ON b.idx = a.idx + 1"
    " WHERE b.at_ms < a.at_ms - 60000 AND b.idx NOT IN (SELECT idx FROM clock_steps)"
)
_UNSTORABLE = (OverflowError, UnicodeEncodeError)  # a number beyond 64 bits, text that has no UTF-8

_BACK = "move it back with its -wal and -shm; if it is gone, end this program and restore the record from a backup"
_WRITE, _RESTORE = "check that you may write in its folder", "restore the record from a backup, or use another folder"
_MENDS = {
    sqlite3.SQLITE_CANTOPEN: _WRITE,
    sqlite3.SQLITE_READONLY: _WRITE,
    sqlite3.SQLITE_PERM: _WRITE,
    sqlite3.SQLITE_NOTADB: _RESTORE,
    sqlite3.SQLITE_CORRUPT: _RESTORE,
    sqlite3.SQLITE_BUSY: "another program holds the record: end that program, or try again",
    sqlite3.SQLITE_FULL: "free space on the disk",
    sqlite3.SQLITE_IOERR: "check that the disk is not full and that its file system can lock and map files",
}


def _mend(error: Exception) -> str:
    return _MENDS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "")


Connect = Callable[[Path], sqlite3.Connection]


def connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)


def _make_private(path: Path) -> None:
    """Make the database's file before SQLite does, which gives its log and index the same rights; tighten old ones."""
    make_private_file(path)
    for beside in ("-wal", "-shm"):
        tighten(path.with_name(path.name + beside))


def _fetched(db: sqlite3.Connection, sql: str, values: Row) -> list[Row]:
    try:
        return db.execute(sql, values).fetchall()
    except _REFUSED as error:
        raise StoreError(f"the store cannot be read: {one_line(error, MESSAGE_CHARS_MAX)}") from error
    except _UNSTORABLE as error:
        raise StoreError(f"the store cannot hold such a value: {error}") from error


class SqliteReader(Reader):
    """Reads over one connection behind a lock."""

    def __init__(self, db: sqlite3.Connection, keyring: Keyring | None = None) -> None:
        super().__init__(keyring)
        self._db, self._lock = db, threading.RLock()

    def rows(self, sql: str, values: Row = ()) -> list[Row]:
        refuse_writing(sql)  # on the writing connection another statement would be committed at once
        return self._fetched(sql, values)

    def _fetched(self, sql: str, values: Row = ()) -> list[Row]:
        with self._lock:
            return _fetched(self._db, sql, values)

    @property
    def schema(self) -> dict[str, str]:
        return dict(self.rows(SCHEMA))

    @property
    def expected_schema(self) -> Mapping[str, str]:
        return expected_schema()

    def columns(self, table: str) -> tuple[str, ...]:
        return tuple(row[1] for row in self._fetched(f"PRAGMA table_info({table})"))

    def damage(self, *, quick: bool = False) -> list[str]:
        checked = self._fetched("PRAGMA quick_check(1)" if quick else "PRAGMA integrity_check")
        return [line for (text,) in checked for line in text.splitlines() if line != "ok"]

    def close(self) -> None:
        with self._lock:
            self._db.close()


def look_at(path: Path) -> SqliteReader:
    """Open a file to read it as it is: nothing is created or added. Raises StoreError; UsageError for a fork's inherited file."""
    refuse_inherited(path)
    try:
        return SqliteReader(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True))
    except sqlite3.Error as error:
        raise StoreError(f"`{path}` cannot be opened: {error}") from error


class SqliteStore(SqliteReader, Store):
    """A store in files that only their user can read.

    `connect` is passed in so that tests can let every single step fail. Raises UsageError for a fork's inherited file.
    """

    remains = "others use the record: until they have closed it the destroyed key may remain in its write-ahead log"

    def __init__(self, path: Path, *, connect: Connect = connect, witness: Witness | None = None) -> None:
        self.path, self.witness = path, witness
        self._connect, self._closed = connect, False
        self._idle: deque[sqlite3.Connection] = deque()
        self._writer = 0  # the id of the thread that has a transaction open; 0: none
        self._durable = True  # whether a commit waits for the disk
        refuse_inherited(path)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(path)
            with ExitStack() as opened:
                db = connect(path)
                opened.callback(db.close)
                super().__init__(db)
                self.file = OpenFile(path)
                opened.callback(self.file.close)
                self._prepare()
                opened.pop_all()
        except (*_REFUSED, OSError, StoreError) as error:
            raise self._unusable(error) from error

    @property
    def name(self) -> str:
        return str(self.path)

    def close(self) -> None:
        if self.witness is not None:
            self.witness.closing(self)
        self._closed = True
        self._close_idle()
        super().close()
        self.file.close()

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _fetched(self, sql: str, values: Row = ()) -> list[Row]:
        """Return all rows: inside this thread's transaction, else as they were last committed."""
        refuse_fork(self.file.process)
        if self._writer == threading.get_ident():
            return _fetched(self._db, sql, values)
        try:  # an interrupt may come right after the lock was taken
            if self._lock.acquire(blocking=False):
                return _fetched(self._db, sql, values)
        finally:
            try:  # noqa: SIM105  `suppress` is written in Python: see `kernel.locks`
                self._lock.release()
            except RuntimeError:  # another thread has it
                pass
        return self._rows_apart(sql, values)

    def _rows_apart(self, sql: str, values: Row) -> list[Row]:
        """Read over another connection: another thread uses the writing one."""
        try:
            db = self._idle.pop()
        except IndexError:
            db = self._connected_apart()
        try:
            return _fetched(db, sql, values)
        finally:
            if len(self._idle) < READERS_MAX:
                self._idle.append(db)
            else:
                db.close()
            if self._closed:
                self._close_idle()

    def _connected_apart(self) -> sqlite3.Connection:
        try:
            (db := self._connect(self.path)).execute("PRAGMA query_only=ON")
        except _REFUSED as error:
            raise StoreError(f"the store cannot be read: {one_line(error, MESSAGE_CHARS_MAX)}") from error
        return db

    def _unusable(self, error: Exception) -> StoreError:
        damaged = _RESTORE if isinstance(error, UnicodeDecodeError) else ""
        hint = _mend(error) or (_WRITE if isinstance(error, OSError) else damaged)
        said = one_line(cause_of(error) if isinstance(error, OSError) else error, MESSAGE_CHARS_MAX)
        message = f"`{self.path}` cannot be opened as a decision store: {said}"
        if isinstance(error, StoreError):
            return StoreError(message, hint=error.hint, retryable=error.retryable)
        return StoreError(message, hint=hint)

    def _write_ahead(self) -> str:
        """Switch to WAL; return the journal mode. SQLite does not wait while another process does so to a fresh file."""
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
        """Set the connection up, and make or upgrade the record in one transaction. Raises StoreError."""
        self._db.execute("PRAGMA page_size=2048")  # a commit writes whole pages; files of before keep theirs of 4096
        if (mode := self._write_ahead()) != "wal":
            raise StoreError(f"its file system offers no write-ahead log (journal mode {mode})")
        for pragma in ("synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"):  # this overwrites a destroyed key
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
        refuse_newer(version)
        if version != SCHEMA_VERSION:
            raise StoreError(f"it has schema version `{version}`, but this program needs `{SCHEMA_VERSION}`")
        refuse_losing(found)

    def _upgrade(self, found: dict[str, str]) -> None:
        """Add what an older version's record lacks. Its own objects keep the text of their definitions."""
        version = self._db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        if version is None or version[0] not in UPGRADABLE:
            return
        for name, statement in expected_schema().items():
            if name not in found:
                self._db.execute(statement)
        for statement in SUPERSEDED:
            self._db.execute(statement)
        self._db.execute(_OLDER_CLOCK_STEPS)
        self._db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (SCHEMA_VERSION,))

    def _create(self) -> None:
        for statement in statements():
            self._db.execute(statement)
        self._db.execute("INSERT INTO meta VALUES ('schema_version', ?), ('halted', '0')", (SCHEMA_VERSION,))

    @contextmanager
    def transaction(self, first: str = "", values: Row = (), *, durable: bool = True) -> Iterator[list[Row]]:
        if first:
            refuse_writing(first)
        refuse_fork(self.file.process)
        with self._lock:
            if self._writer == threading.get_ident():
                raise StoreError("the store refused: cannot start a transaction within a transaction")
            try:
                try:  # an interrupt may come at any moment from here on
                    self._writer = threading.get_ident()
                    self._wait_for_disk(durable)
                    self._db.execute("BEGIN IMMEDIATE")
                    yield _fetched(self._db, first, values) if first else []
                    self._check_place()
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
                finally:
                    self._writer = 0
            except sqlite3.Error as error:
                raise StoreError(
                    f"the store refused: {one_line(error, MESSAGE_CHARS_MAX)}", hint=_mend(error)
                ) from error

    def _wait_for_disk(self, durable: bool) -> None:
        """Let the commits of the writing connection wait for the disk, or not."""
        if durable != self._durable:
            self._durable = False  # until it is certain
            self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._durable = durable

    def _check_place(self) -> None:
        """Raise StoreError where who opens the path does not get this file: it was moved away, deleted or replaced."""
        with suppress(OSError):
            found = self.file.path.stat()
            if (found.st_dev, found.st_ino) == self.file.file:
                return
        why = "its file was moved away, deleted or replaced, and nobody would find what is written"
        raise StoreError(f"the store refused: {why}", hint=_BACK)

    def flush(self) -> None:
        """Write the log to the disk. What has left it is in the database, durably."""
        try:
            with self.path.with_name(f"{self.path.name}-wal").open("rb") as log:
                os.fsync(log.fileno())
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"the store refused: {cause_of(error)}") from error

    @contextmanager
    def frozen(self) -> Iterator[Reader]:
        """Yield a reader of one moment of the file while others write. Text that is not UTF-8 is read as surrogates."""
        try:
            db = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
            db.execute("BEGIN")
        except _REFUSED as error:
            raise StoreError(f"the store cannot be read: {one_line(error, MESSAGE_CHARS_MAX)}") from error
        with closing(SqliteReader(db, self._keyring)) as reader:
            yield reader

    def truncate_log(self) -> bool:
        """Copy the write-ahead log to the file and empty it. Return False while others read or write an older state."""
        return emptied(self._db, self._lock)

    def run(self, sql: str, values: Row = ()) -> int:
        if self._writer != threading.get_ident():  # else it would be committed at once, or with another thread's work
            raise StoreError("the store refused: there is no transaction")
        try:
            return self._db.execute(sql, values).rowcount
        except UnicodeDecodeError as error:
            raise StoreError(f"the store refused: {error}") from error
        except _UNSTORABLE as error:
            raise StoreError(f"the store cannot hold such a value: {error}") from error

    @contextmanager
    def exclusively(self, name: str) -> Iterator[bool]:
        """Lock a file beside the record, `decisions.db.NAME`. The lock ends with the process that holds it."""
        check_lock_name(name)
        path = self.path.with_name(f"{self.path.name}.{name}")
        with ExitStack() as opened:
            try:
                make_private_file(path)
                descriptor = os.open(path, os.O_RDWR)
                opened.callback(os.close, descriptor)
            except OSError as error:
                raise StoreError(f"`{path}` cannot be locked: {cause_of(error)}", hint=_WRITE) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
