"""Empties SQLite's write-ahead log, without holding up those who decide meanwhile."""

from __future__ import annotations

import sqlite3
import time
from contextlib import AbstractContextManager

from sds.kernel.canonical import one_line
from sds.kernel.errors import StoreError
from sds.kernel.storage.store import MESSAGE_CHARS_MAX

# The checkpoint that empties the log bars all writers while it waits for those who read an older state.
WAIT_MS = 50
TRIES, PAUSE_MS = 50, 50  # about as long together as one writer waits for another


def emptied(db: sqlite3.Connection, lock: AbstractContextManager[object]) -> bool:
    """Copy the log to the file and empty it. Return False while others read or write an older state.

    Most is copied first, while others write; between the tries they write, too. `lock` is that of the connection.
    Raises StoreError.
    """
    for left in reversed(range(TRIES)):
        try:
            with lock:
                if _emptied_now(db):
                    return True
        except sqlite3.Error as error:
            raise StoreError(f"the store cannot be read: {one_line(error, MESSAGE_CHARS_MAX)}") from error
        if left:
            time.sleep(PAUSE_MS / 1000)
    return False


def _emptied_now(db: sqlite3.Connection) -> bool:
    db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    (busy_ms,) = db.execute("PRAGMA busy_timeout").fetchone()
    try:
        db.execute(f"PRAGMA busy_timeout={WAIT_MS}").fetchall()
        return db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall() == [(0, 0, 0)]
    finally:
        db.execute(f"PRAGMA busy_timeout={busy_ms}").fetchall()
