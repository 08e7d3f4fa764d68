"""Schemas with which a test has ended, emptied for the next tests: to make one takes long, and each that stays makes every look
into the server's catalogue longer.
"""

from __future__ import annotations

import atexit
import os
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import psycopg

from sds.kernel.storage.copying import keys_of_tables
from sds.kernel.storage.postgres import schema as schemas
from sds.kernel.storage.postgres.store import PostgresStore
from tests.stores.server import fresh_schema, server_url

_OF = defaultdict[Path, set[str]](set)  # by the folder whose record they are
_FREE: list[str] = []
os.register_at_fork(after_in_child=_FREE.clear)  # they are the parent's, as its connection is

_LOCKED_MS = 2_000


def put_empty(schema: str, folder: Path) -> bool:
    """Put an empty record where there is none, of a schema that was given back; return whether one is there now."""
    if schema in _OF[folder]:
        return True
    _OF[folder].add(schema)
    row = by_itself().execute("SELECT to_regnamespace(%s) IS NULL", (schema,)).fetchone() if _FREE else None
    if row is None or not row[0]:
        return False
    renamed = f"ALTER SCHEMA {_FREE.pop()} RENAME TO {schema}"
    by_itself().execute(f"{renamed}; SET LOCAL search_path = {schema}; {schemas.functions(schema)}")
    return True


def forget(schema: str, folder: Path) -> None:
    """Hear that a schema is no more."""
    _OF[folder].discard(schema)


def give_back(folder: Path) -> None:
    """Empty the records of a folder, which nobody uses any more, for other tests. Those that were altered are dropped."""
    for schema in _OF.pop(folder, ()):
        db, free = by_itself(), fresh_schema()
        try:
            db.execute(f"SET search_path = {schema}")  # the catalogue's texts leave it out
            if schemas.catalogue(db, schema) == schemas.expected(db) and not schemas.switched_off(db, schema):
                copy(_empty(), schema, then=f"ALTER SCHEMA {schema} RENAME TO {free}")
                _FREE.append(free)
            else:
                db.execute(f"SET LOCAL lock_timeout = {_LOCKED_MS}; DROP SCHEMA IF EXISTS {schema} CASCADE")
        except psycopg.Error:  # it is not there, or somebody holds it
            continue


def copy(source: str, target: str, *, then: str = "") -> None:
    """Make the rows of one schema those of another, in one transaction, and do something more, where nobody uses the other."""
    names = keys_of_tables()
    emptied = "; ".join(f"DELETE FROM {target}.{name}" for name in names)
    if then:  # DELETE leaves room, which later rows fill in any order
        emptied = f"TRUNCATE {', '.join(f'{target}.{name}' for name in names)}"
    moved = "; ".join(f"INSERT INTO {target}.{name} SELECT * FROM {source}.{name}" for name in names)
    settings = f"SET LOCAL session_replication_role = replica; SET LOCAL lock_timeout = {_LOCKED_MS if then else 0}"
    # sent as one message: the server makes one transaction of it, and none is left open where a statement fails
    by_itself().execute(f"{settings}; {emptied}; {moved}; {then}")


@cache
def _empty() -> str:
    """Return the schema of an empty record."""
    schema = fresh_schema()
    PostgresStore(server_url(), schema).close()
    return schema


@cache
def by_itself() -> psycopg.Connection[Any]:
    """Return a connection of this process that keeps no transaction open: to open one takes longer than most that is done on it."""
    db = psycopg.connect(server_url(), autocommit=True)
    atexit.register(db.close)
    return db
