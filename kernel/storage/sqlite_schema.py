"""The schema of a record in SQLite: made from `schema.sql`, and read back from the file."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from types import MappingProxyType

from sds.kernel.errors import StoreError
from sds.kernel.storage.store import Reader

SCHEMA = (
    "SELECT name, group_concat(sql, ';') FROM sqlite_master WHERE sql IS NOT NULL GROUP BY name ORDER BY min(rowid)"
)
# A view, or a trigger that does not say that it comes after: it may ignore a row
_MAY_LOSE = re.compile(r"\bCREATE (?:VIEW|TRIGGER (?!\w+\s+AFTER\s))", re.IGNORECASE)


def schema_of(db: sqlite3.Connection) -> dict[str, str]:
    """Return the text of every table, index and trigger, by name; of a table and a trigger of one name, both."""
    return dict(db.execute(SCHEMA).fetchall())


@cache
def expected_schema() -> Mapping[str, str]:
    """Return what `schema_of` returns for a store that nobody has tampered with."""
    with closing(sqlite3.connect(":memory:")) as db:
        for statement in statements():
            db.execute(statement)
        return MappingProxyType(schema_of(db))


def statements() -> Iterator[str]:
    """Yield the statements of `schema.sql`."""
    statement = ""
    for line in Path(__file__).with_name("schema.sql").read_text(encoding="utf-8").splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def foreign(db: Reader) -> list[str]:
    """Return the names of what no version of this program writes in a record's schema. The SQL in it would run as soon as the record
    is used; a mere index does nothing. Each object is looked at by itself: a trigger may have the name of an index.
    """
    wanted, each = expected_schema(), "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name, sql"
    return [name for name, sql in db.rows(each) if sql != wanted.get(name) and not sql.startswith("CREATE INDEX")]


def refuse_losing(found: Mapping[str, str]) -> None:
    """Raise StoreError for a view or a trigger that is not this program's and may swallow rows, or alter them, before they are
    written. `found`: of `schema_of`.
    """
    wanted = expected_schema()
    for name, text in found.items():
        if text != wanted.get(name) and _MAY_LOSE.search(text):
            message = f"it may lose rows: the trigger or view `{name}` may swallow or alter them"
            raise StoreError(message, hint="undo what was done to the schema", retryable=False)
