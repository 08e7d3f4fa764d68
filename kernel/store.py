"""SQLite, durable: WAL with `synchronous=FULL`, one connection behind a lock, immediate transactions.

A transaction either commits whole or leaves nothing. Several processes may share the file; a writer waits up to
`BUSY_MS` for another. Whatever SQLite raises arrives as StoreError.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sds.kernel.errors import StoreError

BUSY_MS = 5_000
SCHEMA_VERSION = "1"

Row = tuple[Any, ...]
Connect = Callable[[Path], sqlite3.Connection]


def connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)


class Store:
    """The kernel's one durable store. `connect` is passed in so that tests can fail every single step."""

    def __init__(self, path: Path, *, connect: Connect = connect) -> None:
        self.path = path
        self._lock = threading.RLock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = connect(path)
            self._prepare()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"`{path}` cannot be opened as a decision store: {error}") from error

    def _prepare(self) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "recursive_triggers=ON"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            known = self._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]
            if not known:
                self._create()
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        version = self.value("SELECT value FROM meta WHERE key = 'schema_version'")
        if version != SCHEMA_VERSION:
            raise StoreError(f"`{self.path}` has schema version `{version}`, this program needs `{SCHEMA_VERSION}`")

    def _create(self) -> None:
        statement = ""
        for line in Path(__file__).with_name("schema.sql").read_text(encoding="utf-8").splitlines(keepends=True):
            statement += line
            if sqlite3.complete_statement(statement):
                self._db.execute(statement)
                statement = ""
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
                raise StoreError(f"the store refused: {error}") from error

    def run(self, sql: str, values: Row = ()) -> int:
        """Execute one statement inside the caller's transaction; return the number of rows it changed."""
        return self._db.execute(sql, values).rowcount

    def rows(self, sql: str, values: Row = ()) -> list[Row]:
        with self._lock:
            try:
                return self._db.execute(sql, values).fetchall()
            except sqlite3.Error as error:
                raise StoreError(f"the store cannot be read: {error}") from error

    def row(self, sql: str, values: Row = ()) -> Row | None:
        found = self.rows(sql, values)
        return found[0] if found else None

    def value(self, sql: str, values: Row = ()) -> Any:
        found = self.row(sql, values)
        return found[0] if found else None

    def insert(self, table: str, **values: Any) -> None:
        """Insert one row; raises when its key is taken."""
        columns = ", ".join(values)
        self.run(f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(values))})", tuple(values.values()))

    @property
    def halted(self) -> bool:
        return bool(self.value("SELECT value FROM meta WHERE key = 'halted'") != "0")

    def close(self) -> None:
        with self._lock:
            self._db.close()
