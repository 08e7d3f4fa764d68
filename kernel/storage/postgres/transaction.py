"""One transaction on one connection. Its writes wait until it reads, counts or commits, and are sent along with that: each
statement of its own would cost a round trip while the record is locked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psycopg

from sds.kernel.errors import StoreError
from sds.kernel.storage.postgres.errors import NO_WRITE, REFUSED, UNKNOWN_END, UNREPLICATED, is_lost, mend, refused
from sds.kernel.storage.postgres.pipelined import Connection, Done
from sds.kernel.storage.store import Generation, Row

Found = TypeVar("Found")


class Transaction:
    """A transaction that has begun. `waiting`: statements that are still to be executed, in their order; `generation`: of the
    record that it is one of.
    """

    def __init__(self, db: Connection, generation: Generation) -> None:
        self._db, self.generation = db, generation
        self.waiting: list[tuple[str, Row]] = []

    def ask(self, ask: Callable[[Connection], Found], what: str) -> Found:
        """Execute the waiting statements, then return what `ask` returns. Raises StoreError when any of it is refused."""
        try:
            if self.waiting:
                what, waiting, self.waiting = NO_WRITE, self.waiting, []
                self._db.together(*waiting)
            return ask(self._db)
        except REFUSED as error:
            raise refused(error, what) from error

    def done(self, sql: str, values: Row, what: str) -> Done:
        """Execute a statement behind the waiting ones, in one round trip. Raises StoreError when any of it is refused."""
        what = NO_WRITE if self.waiting else what
        try:
            return self._behind_what_waits(sql, values)
        except REFUSED as error:
            raise refused(error, what) from error

    def commit(self) -> None:
        """Commit. Raises StoreError: it did not, or nobody knows, or it did and a standby that has to have it may lack it."""
        self._db.unreplicated = False
        try:
            done = self._behind_what_waits("COMMIT", ())
        except REFUSED as error:
            if is_lost(error):
                raise StoreError(f"{NO_WRITE}: {UNKNOWN_END}", hint=mend(error)) from error
            raise refused(error, NO_WRITE) from error
        if done.word != "COMMIT":  # an earlier statement had failed, and its error was caught
            raise StoreError(f"{NO_WRITE}: a statement of the transaction had failed")
        if self._db.unreplicated:
            raise StoreError(f"{NO_WRITE}: {UNREPLICATED}", hint="does the standby follow? what the record has, stays")

    def roll_back(self) -> None:
        """End the transaction, whatever its state. Raises nothing: a connection that is gone has rolled back."""
        with suppress(psycopg.Error):
            if not self._db.closed:
                self._db.execute("ROLLBACK", prepare=False)

    def _behind_what_waits(self, sql: str, values: Row) -> Done:
        waiting, self.waiting = self.waiting, []
        return self._db.together(*waiting, (sql, values))
