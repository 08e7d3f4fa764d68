"""A book of orders by idempotency key, in an SQLite file of its own: what is known under a key is not done again.

One connection and one lock: one thread at a time decides an order and makes it durable.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

BUSY_S = 5.0
PAGE_LINES = 100  # of a statement


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer about a key: settled, rejected, absent, or accepted: one of the first two later. `conflict`: the key stands
    for another order. `order`: what was ordered, if anything was.
    """

    status: str
    reference: str = ""
    detail: str = ""
    order: tuple[Any, ...] = field(default=(), compare=False)
    replayed: bool = field(default=False, compare=False)


VOIDED = Answer("rejected", detail="the key was made void")


class KeyedBook:
    """The book in one file. Its table has a `number`, a `key`, a `status`, and these `columns` of an order.

    `forget_ms`: how long a key is known, None: for ever. `accept_ms`: for how long an order is only accepted.
    """

    schema: ClassVar[str]
    table: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    at_ms: ClassVar[str] = "at_ms"  # its column
    voids: ClassVar[str]  # the table of void keys
    synchronous: ClassVar[str] = "FULL"  # NORMAL: what it answered outlives a killed process, but no power cut
    declined: ClassVar[str]

    def __init__(self, path: Path, now_ms: Callable[[], int]) -> None:
        self.forget_ms: int | None = None
        self.accept_ms = 0
        self.now_ms, self.lock = now_ms, Lock()
        self.db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self.db.execute("PRAGMA journal_mode = WAL")
            self.db.execute(f"PRAGMA synchronous = {self.synchronous}")
            self.db.executescript(self.schema)
        except sqlite3.Error:
            self.db.close()
            raise

    def close(self) -> None:
        with self.lock:
            self.db.close()

    @staticmethod
    def reference(number: int, status: str) -> str:
        """Return the name of an order; "" for none."""
        raise NotImplementedError

    @contextmanager
    def durably(self) -> Iterator[None]:
        """Hold the write lock for a block. Its writes are on disk when the block ends, and undone when it raises."""
        with self.lock:
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                if self.db.in_transaction:  # not after a full disk, which ends the transaction itself
                    self.db.execute("ROLLBACK")
                raise

    def carry_out(self, key: str, order: tuple[Any, ...], *, refuse: bool = False) -> Answer:
        """Carry an order out once for its key, or repeat the earlier answer. `refuse`: reject a new key for good instead."""
        with self.durably():
            known = self._known(key)
            if known.order and known.order != order:
                return Answer("conflict", detail="the key belongs to another order")
            if known.status != "absent":
                return replace(known, replayed=True)
            names = ("key", *self.columns, "status", self.at_ms)
            status, at_ms = "rejected" if refuse else "settled", self.now_ms()
            done = self.db.execute(
                f"INSERT INTO {self.table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
                (key, *order, status, at_ms),
            )
            return self._answer(int(done.lastrowid or 0), status, at_ms, order)

    def void(self, key: str) -> Answer:
        """Make sure that nothing is done under `key`; a key that was answered for keeps its answer."""
        with self.durably():
            known = self._known(key)
            if known.status == "absent":
                self.db.execute(f"INSERT OR REPLACE INTO {self.voids} VALUES (?, ?)", (key, self.now_ms()))
                return VOIDED
            return known

    def find(self, key: str) -> Answer:
        with self.lock:
            return self._known(key)

    def _known(self, key: str) -> Answer:
        since_ms = -1 if self.forget_ms is None else self.now_ms() - self.forget_ms
        row = self.db.execute(
            f"SELECT number, status, {self.at_ms}, {', '.join(self.columns)} FROM {self.table}"
            f" WHERE key = ? AND {self.at_ms} > ? ORDER BY number DESC LIMIT 1",
            (key, since_ms),
        ).fetchone()
        if row is not None:
            return self._answer(row[0], row[1], row[2], row[3:])
        void = self.db.execute(f"SELECT * FROM {self.voids} WHERE key = ?", (key,)).fetchone()
        return VOIDED if void and void[1] > since_ms else Answer("absent")

    def _answer(self, number: int, status: str, at_ms: int, order: tuple[Any, ...]) -> Answer:
        detail = self.declined if status == "rejected" else ""
        return Answer(self.status_now(status, at_ms), self.reference(number, status), detail, order)

    def status_now(self, status: str, at_ms: int) -> str:
        return "accepted" if self.accept_ms and self.now_ms() - at_ms < self.accept_ms else status

    def page(self, select: str, since_ms: int, until_ms: int, after: int) -> list[tuple[Any, ...]]:
        """Return the next `PAGE_LINES` rows of this time span whose number is above `after`."""
        span = f"{self.at_ms} BETWEEN ? AND ? AND {self.table}.number > ? ORDER BY {self.table}.number LIMIT ?"
        with self.lock:
            return self.db.execute(f"{select} WHERE {span}", (since_ms, until_ms, after, PAGE_LINES)).fetchall()
