"""The sandbox gateway's books: one row for every order it carried out or declined, in an SQLite file of its own.

The gateway stands for somebody else's system. It has one connection and one lock; an answered order survives a `kill
-9`. A forgotten key counts as new: the same order is paid again. The books themselves forget nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

BUSY_S = 5.0
PAGE_LINES = 100

_SCHEMA = """
CREATE TABLE IF NOT EXISTS payments (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, order_body TEXT NOT NULL, amount INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('settled', 'rejected')), at_ms INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS payments_by_key ON payments (key);
CREATE TABLE IF NOT EXISTS voids (key TEXT PRIMARY KEY, at_ms INTEGER NOT NULL) STRICT, WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class KeyAnswer:
    """The answer about a key: settled, rejected, absent, or accepted: one of the first two later. `conflict`: the key stands
    for another order.
    """

    status: str
    number: int = 0
    order: str = ""
    detail: str = ""
    replayed: bool = False

    def as_data(self, key: str) -> dict[str, object]:
        named = {"id": payment_id(self.number)} if self.number else {}
        order = json.loads(self.order) if self.order else {}
        ordered = {name: order[name] for name in ("amount", "currency") if name in order}
        detail = {"detail": self.detail} if self.detail else {}
        return {"key": key, "status": self.status, **named, **ordered, **detail}


def payment_id(number: int) -> str:
    return f"pay_{number:08d}"


VOIDED = KeyAnswer("rejected", detail="the key was made void")
CONFLICT = KeyAnswer("conflict", detail="the key stands for another order")


class Books:
    """The books in one file. `forget_ms`: how long a key is known, None: for ever. `accept_ms`: for how long an order is only
    accepted. Both may be set at any time.
    """

    def __init__(self, path: Path, now_ms: Callable[[], int], forget_ms: int | None = None) -> None:
        self.forget_ms, self.accept_ms, self._now_ms, self._lock = forget_ms, 0, now_ms, Lock()
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error:
            self._db.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def pay(self, key: str, order: Mapping[str, Any], *, refuse: bool = False) -> KeyAnswer:
        """Carry an order out once for its key, as long as the key is known. `refuse`: decline a new order for good."""
        body = json.dumps(order, sort_keys=True)
        with self._writing():
            known = self._find(key)
            if known.order and known.order != body:
                return CONFLICT
            if known.status != "absent":
                return KeyAnswer(known.status, known.number, known.order, known.detail, replayed=True)
            status, at_ms = "rejected" if refuse else "settled", self._now_ms()
            done = self._db.execute(
                "INSERT INTO payments (key, order_body, amount, status, at_ms) VALUES (?, ?, ?, ?, ?)",
                (key, body, int(order.get("amount", 0)), status, at_ms),
            )
        return _key_answer(int(done.lastrowid or 0), self._status_now(status, at_ms), body)

    def _status_now(self, status: str, at_ms: int) -> str:
        return "accepted" if self._now_ms() - at_ms < self.accept_ms else status

    def void(self, key: str) -> KeyAnswer:
        """Make sure that nothing is done under `key`, as long as the key is known; else return what was done."""
        with self._writing():
            known = self._find(key)
            if known.status == "absent":
                self._db.execute("INSERT OR REPLACE INTO voids VALUES (?, ?)", (key, self._now_ms()))
                return VOIDED
        return known

    def find(self, key: str) -> KeyAnswer:
        with self._lock:
            return self._find(key)

    def _find(self, key: str) -> KeyAnswer:
        since_ms = -1 if self.forget_ms is None else self._now_ms() - self.forget_ms
        row = self._db.execute(
            "SELECT number, order_body, status, at_ms FROM payments WHERE key = ? AND at_ms > ? ORDER BY number DESC LIMIT 1",
            (key, since_ms),
        ).fetchone()
        if row is not None:
            return _key_answer(row[0], self._status_now(*row[2:]), row[1])
        void = self._db.execute("SELECT 1 FROM voids WHERE key = ? AND at_ms > ?", (key, since_ms)).fetchone()
        return VOIDED if void else KeyAnswer("absent")

    def statement(self, since_ms: int, until_ms: int, after: int) -> list[dict[str, Any]]:
        """Return the next `PAGE_LINES` orders of this time span whose number is above `after`."""
        with self._lock:
            rows = self._db.execute(
                "SELECT number, key, order_body, amount, status, at_ms FROM payments"
                " WHERE at_ms BETWEEN ? AND ? AND number > ? ORDER BY number LIMIT ?",
                (since_ms, until_ms, after, PAGE_LINES),
            ).fetchall()
        return [
            {
                "number": number,
                "id": payment_id(number),
                "key": key,
                "status": self._status_now(status, at_ms),
                "amount": amount,
                "at_ms": at_ms,
                "order": json.loads(body),
            }
            for number, key, body, amount, status, at_ms in rows
        ]

    def totals(self) -> dict[str, Any]:
        """Return the payments under each key and in all, and the keys that were paid more than once."""
        with self._lock:
            rows = self._db.execute(
                "SELECT key, count(*), sum(amount), max(order_body) FROM payments WHERE status = 'settled'"
                " GROUP BY key ORDER BY min(number)"
            ).fetchall()
            declined = self._db.execute("SELECT count(*) FROM payments WHERE status = 'rejected'").fetchone()[0]
        each = [{"key": key, "paid": n, "total": total, "order": json.loads(body)} for key, n, total, body in rows]
        return {
            "keys": len(rows),
            "settled": sum(row[1] for row in rows),
            "rejected": declined,
            "total": sum(row[2] for row in rows),
            "paid_twice": [row[0] for row in rows if row[1] > 1],
            "payments": each,
        }


def _key_answer(number: int, status: str, order: str) -> KeyAnswer:
    return KeyAnswer(status, number, order, "the gateway declined the order" if status == "rejected" else "")
