"""Translates the kernel's statements, which are SQLite's, into PostgreSQL's. What has another name there is a function of
the record's schema (`functions.sql`); this module does only what no function can do.
"""

from __future__ import annotations

import re
from functools import lru_cache

from sds.kernel.storage.store import STATEMENTS_MAX

_PLANNER = re.compile(r" INDEXED BY \w+")  # only for SQLite's planner
_TYPES = {"INTEGER": "BIGINT", "BLOB": "BYTEA", "REAL": "DOUBLE PRECISION", "TEXT": 'TEXT COLLATE "C"'}
_TYPE = re.compile(r"\b(INTEGER|BLOB|REAL|TEXT)\b")
_COMMENT = re.compile(r"--[^\n]*")
_EXPRESSION = re.compile(r"CASE .* END", re.DOTALL)
_OPTIONS = re.compile(r"\) STRICT(, WITHOUT ROWID)?;")


@lru_cache(STATEMENTS_MAX)
def translated(sql: str) -> bytes:
    """Return a statement with `$1`, `$2` ... in the place of each `?`, encoded."""
    sql = _PLANNER.sub("", sql).replace("CROSS JOIN", "JOIN").replace("IN ()", "IN (NULL)")
    first, *others = sql.split("?")
    return (first + "".join(f"${number}{text}" for number, text in enumerate(others, start=1))).encode()


def defined(statement: str) -> str | None:
    """Return the definition of a table or index of `schema.sql`; None for a trigger, which is written for PostgreSQL apart.
    Texts are compared and ordered by their bytes, as in SQLite.
    """
    statement = _COMMENT.sub("", statement).strip()
    if statement.startswith("CREATE TABLE"):
        return _OPTIONS.sub(");", _TYPE.sub(lambda found: _TYPES[found[0]], statement))
    if statement.startswith(("CREATE INDEX", "CREATE UNIQUE INDEX")):
        return _EXPRESSION.sub(r"(\g<0>)", statement)
    return None
