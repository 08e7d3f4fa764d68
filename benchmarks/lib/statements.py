"""Record the SQL statements that a record executes, without what its triggers do."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from sds.kernel.storage.sqlite import BUSY_MS, Connect


def traced_in(seen: list[str]) -> Connect:
    """Return a function that opens connections which append each statement to `seen` as it is executed."""

    class Traced(sqlite3.Connection):
        def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
            seen.append(sql)
            return super().execute(sql, values)

    def connect(path: Path) -> sqlite3.Connection:
        return sqlite3.connect(
            path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False, factory=Traced
        )

    return connect
