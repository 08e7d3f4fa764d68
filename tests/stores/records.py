"""A whole record of either store: kept aside, put back, removed, and opened by a stranger whom no trigger stops."""

from __future__ import annotations

import atexit
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import psycopg

from sds.kernel.storage.copying import keys_of_tables
from sds.kernel.storage.postgres.connections import Url, connected
from sds.kernel.storage.postgres.pipelined import Connection, Done
from sds.kernel.storage.postgres.store import PostgresStore
from sds.kernel.storage.store import Store
from tests.stores.opened import SQLITE, Chosen, schema_of
from tests.stores.server import by_hand, fresh_schema, server_url

Kept = bytes | str  # a file's bytes, or the schema that has the copy
_MADE: set[str] = set()  # schemas that are known to be there
UNSTOPPED = "SET session_replication_role = replica"  # no trigger fires, no foreign key is looked at


class Stranger(Protocol):
    """Somebody at a record whom no trigger and no foreign key stops. The SQL is SQLite's."""

    def execute(self, sql: str, values: tuple[Any, ...] = (), /) -> Any:
        """Return what has `fetchall`, `fetchone` and `rowcount`. Raises the store's own IntegrityError."""

    def hide(self) -> None:
        """Leave the triggers as they were, as somebody would who wants to go unnoticed."""


class SqliteStranger:
    """A connection that takes the triggers away; foreign keys it does not look at."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        rows = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        self._triggers = dict(rows)
        for name in self._triggers:
            db.execute(f"DROP TRIGGER {name}")

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        return self._db.execute(sql, values)

    def hide(self) -> None:
        for sql in self._triggers.values():
            self._db.execute(sql)


class PostgresStranger:
    """A connection for which triggers are not fired: they are never gone."""

    def __init__(self, db: Connection) -> None:
        self._db = db
        db.execute(UNSTOPPED, prepare=False)

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> Any:
        ignored = sql.startswith("UPDATE OR IGNORE")
        sql = sql.replace("UPDATE OR IGNORE", "UPDATE").replace(" IS ?", " IS NOT DISTINCT FROM ?")
        try:
            done = self._db.together((sql, values))
        except psycopg.errors.UniqueViolation:
            if not ignored:
                raise
            done = Done([], 0, "")
        return SimpleNamespace(
            fetchall=lambda: done.rows, fetchone=lambda: next(iter(done.rows), None), rowcount=done.changed
        )

    def hide(self) -> None:
        pass


@contextmanager
def stranger_at(path: Path) -> Iterator[Stranger]:
    """Let a stranger at the record of a path, for good."""
    if Chosen.kind == SQLITE:
        with closing(sqlite3.connect(path, isolation_level=None)) as file:
            yield SqliteStranger(file)
        return
    with closing(connected(Url(server_url()), schema_of(path))) as db:
        yield PostgresStranger(db)


@contextmanager
def tampering_with(path: Path) -> Iterator[Stranger]:
    """Let a stranger at the record of a path, whoever has it open, and restore it afterwards."""
    if Chosen.kind == SQLITE:
        with closing(sqlite3.connect(path, isolation_level=None)) as db, closing(sqlite3.connect(":memory:")) as whole:
            db.backup(whole)
            try:
                yield SqliteStranger(db)
            finally:
                whole.backup(db)
        return
    _copy(schema_of(path), _aside())
    try:
        with stranger_at(path) as other:
            yield other
    finally:
        _copy(_aside(), schema_of(path))


@cache
def _aside() -> str:
    return fresh_schema()


def kept(path: Path) -> Kept:
    """Return the record of a path as it is now."""
    if Chosen.kind == SQLITE:
        with closing(sqlite3.connect(path)) as db:
            return db.serialize()
    aside = fresh_schema()
    _copy(schema_of(path), aside)
    return aside


def put_back(path: Path, data: Kept) -> None:
    """Put a record in the place of what there is. In SQLite nobody may have it open."""
    if isinstance(data, str):
        _copy(data, schema_of(path))
        return
    remove(path)
    path.write_bytes(data)


def remove(path: Path) -> None:
    """Remove a record, which nobody may have open."""
    if Chosen.kind == SQLITE:
        for end in ("", "-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
    else:
        _MADE.discard(schema_of(path))
        by_hand(f"DROP SCHEMA IF EXISTS {schema_of(path)} CASCADE")


def emptied(folder: Path) -> None:
    """Remove the files of a world, and its record."""
    remove(folder / "kernel.db")
    for path in folder.iterdir():
        path.unlink()


def follow(source: Path, target: Path) -> None:
    """Copy a record to where the folder of its file was copied to: in SQLite that is the record."""
    if Chosen.kind != SQLITE:
        _copy(schema_of(source), schema_of(target))


def alone(store: Store, sql: str, values: tuple[Any, ...] = ()) -> int:
    """Execute one statement in a transaction of its own; return the number of rows it changed."""
    with store.transaction():
        return store.run(sql, values)


def _copy(source: str, target: str) -> None:
    """Make the rows of one schema those of another, in one transaction."""
    if target not in _MADE:
        PostgresStore(server_url(), target).close()
        _MADE.add(target)
    names = keys_of_tables()
    emptied = "; ".join(f"DELETE FROM {target}.{name}" for name in names)  # of few rows: quicker than TRUNCATE
    moved = "; ".join(f"INSERT INTO {target}.{name} SELECT * FROM {source}.{name}" for name in names)
    # sent as one message: the server makes one transaction of it, and none is left open where a statement fails
    _copying().execute(f"SET LOCAL session_replication_role = replica; {emptied}; {moved}")


@cache
def _copying() -> psycopg.Connection[Any]:
    """Return the connection of this process that copies records: to open one takes longer than most copies."""
    db = psycopg.connect(server_url(), autocommit=True)
    atexit.register(db.close)
    return db
