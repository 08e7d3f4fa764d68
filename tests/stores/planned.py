"""A connection that tells how SQLite finds what it is asked for."""

from __future__ import annotations

import sqlite3
from typing import Any

LAST = "SELECT idx, entry_hash FROM ledger ORDER BY idx DESC LIMIT 1"  # one row, from the end


class Planned(sqlite3.Connection):
    """A connection that keeps the plan of every statement it is given while `plans` is a list."""

    plans: list[str] | None = None

    def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
        if self.plans is not None and sql.lstrip().startswith("SELECT") and sql != LAST:
            self.plans += [row[3] for row in super().execute(f"EXPLAIN QUERY PLAN {sql}", values)]
        return super().execute(sql, values)
