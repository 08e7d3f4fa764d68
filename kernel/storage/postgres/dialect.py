"""The kernel's statements, which are SQLite's, as PostgreSQL reads them. What has another name there is made a function
of the record's schema (`functions.sql`); here is only what no function can be.
"""

from __future__ import annotations

import re
from functools import lru_cache

from sds.kernel.storage.store import STATEMENTS_MAX

_PLANNER = re.compile(r" INDEXED BY \w+")  # for SQLite's planner alone
_TYPES = {"INTEGER": "BIGINT", "BLOB": "BYTEA", "REAL": "DOUBLE PRECISION", "TEXT": 'TEXT COLLATE "C"'}
_TYPE = re.compile(r"\b(INTEGER|BLOB|REAL|TEXT)\b")
_COMMENT = re.compile(r"--[^\n]*")
_EXPRESSION = re.compile(r"CASE .* END", re.DOTALL)
_OPTIONS = re.compile(r"\) STRICT(, WITHOUT ROWID)?;")


@lru_cache(STATEMENTS_MAX)
def translated(sql: str) -> bytes:
    """Return a statement whose values are bound in the place of `?` as one where they are bound in that of `$1`, `$2` ..."""
    sql = _PLANNER.sub("", sql).replace("CROSS JOIN", "JOIN").replace("IN ()", "IN (NULL)")
    first, *others = sql.split("?")
    return (first + "".join(f"${number}{text}" for number, text in enumerate(others, start=1))).encode()


def defined(statement: str) -> str | None:
    """Return the definition of a table or index of `schema.sql`; None for a trigger, which has a text of its own.

    Texts are compared and ordered by their bytes, as SQLite does it.
    """
    statement = _COMMENT.sub("", statement).strip()
    if statement.startswith("CREATE TABLE"):
        return _OPTIONS.sub(");", _TYPE.sub(lambda found: _TYPES[found[0]], statement))
    if statement.startswith(("CREATE INDEX", "CREATE UNIQUE INDEX")):
        return _EXPRESSION.sub(r"(\g<0>)", statement)
    return None
