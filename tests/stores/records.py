"""A whole record of either store: kept aside, put back, removed, and opened by a stranger whom no trigger stops."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import psycopg

from sds.kernel.storage.postgres.connections import Url, connected
from sds.kernel.storage.postgres.pipelined import Connection, Done
from sds.kernel.storage.postgres.store import PostgresStore
from sds.kernel.storage.store import Store
from tests.stores.opened import SQLITE, Chosen, schema_of
from tests.stores.schemas import copy, forget, give_back, put_empty
from tests.stores.server import by_hand, fresh_schema, server_url

Kept = bytes | str  # a file's bytes, or the schema that has the copy
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
    copy(schema_of(path), _aside())
    try:
        with stranger_at(path) as other:
            yield other
    finally:
        copy(_aside(), schema_of(path))


@cache
def _aside() -> str:
    return _made(fresh_schema(), Path())


def kept(path: Path) -> Kept:
    """Return the record of a path as it is now."""
    if Chosen.kind == SQLITE:
        with closing(sqlite3.connect(path)) as db:
            return db.serialize()
    copy(schema_of(path), aside := _made(fresh_schema(), path.parent))
    return aside


def put_back(path: Path, data: Kept) -> None:
    """Put a record in the place of what there is. In SQLite nobody may have it open."""
    if isinstance(data, str):
        copy(data, _made(schema_of(path), path.parent))
        return
    remove(path)
    path.write_bytes(data)


def remove(path: Path) -> None:
    """Remove a record, which nobody may have open."""
    if Chosen.kind == SQLITE:
        for end in ("", "-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
    else:
        forget(schema_of(path), path.parent)
        by_hand(f"DROP SCHEMA IF EXISTS {schema_of(path)} CASCADE")


def emptied(folder: Path) -> None:
    """Remove the files of a world, and its record."""
    if Chosen.kind == SQLITE:
        remove(folder / "kernel.db")
    else:
        give_back(folder)
    for path in folder.iterdir():
        path.unlink()


def follow(source: Path, target: Path) -> None:
    """Copy a record to where the folder of its file was copied to: in SQLite that is the record."""
    if Chosen.kind != SQLITE:
        copy(schema_of(source), _made(schema_of(target), target.parent))


def alone(store: Store, sql: str, values: tuple[Any, ...] = ()) -> int:
    """Execute one statement in a transaction of its own; return the number of rows it changed."""
    with store.transaction():
        return store.run(sql, values)


def _made(schema: str, folder: Path) -> str:
    """Have an empty record in a schema where there is none."""
    if not put_empty(schema, folder):
        PostgresStore(server_url(), schema).close()
    return schema
