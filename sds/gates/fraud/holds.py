"""The executor's durable memory: every order under its key, the payments that passed, and those that are held.

A hold is placed once for a key and ends in one of three ways: its minutes run out, the customer confirms (`release`:
the payment passes), or it is called off (`refuse`: the payment does not pass).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sds.kernel.storage.private_files import make_private_file

BUSY_S = 5.0
MINUTE_MS = 60_000
ALLOW, CHALLENGE = "ALLOW", "CHALLENGE"

_SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS orders (
    number INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    dfid TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('ALLOW', 'CHALLENGE')),
    payment_id TEXT NOT NULL,
    quantity INTEGER NOT NULL CHECK (quantity > 0),
    outcome TEXT NOT NULL CHECK (outcome IN ('settled', 'rejected')),
    why TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    until_ms INTEGER NOT NULL,
    ended TEXT CHECK (ended IN ('released', 'refused'))
) STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS passes_once ON orders (payment_id) WHERE kind = 'ALLOW' AND outcome = 'settled';
CREATE INDEX IF NOT EXISTS orders_by_payment ON orders (payment_id);
CREATE TABLE IF NOT EXISTS voided (key TEXT PRIMARY KEY, at_ms INTEGER NOT NULL) STRICT, WITHOUT ROWID;
"""
# For one payment: whether it passed or was refused, whether it is held now, and how often anything changed.
STATE = """
SELECT coalesce(max(kind = 'ALLOW' OR ended IS NOT NULL), 0),
       coalesce(max(kind = 'CHALLENGE' AND ended IS NULL AND until_ms > :now_ms), 0),
       count(*) + count(ended)
FROM {orders} WHERE payment_id = :payment_id AND outcome = 'settled'
"""


@dataclass(frozen=True, slots=True)
class HoldOrder:
    """One order. `quantity`: the released amount in minor units (ALLOW), or the minutes of the hold (CHALLENGE)."""

    key: str
    dfid: str
    kind: str
    payment_id: str
    quantity: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The outcome of a key: settled, rejected or absent. `why`: the reason of a refusal."""

    outcome: str
    number: int = 0
    why: str = ""


def holds_path(folder: Path) -> Path:
    """Return the path of the holds in the gate's folder."""
    return folder / "holds.db"


def make_holds(path: Path) -> None:
    """Make the file unless it exists. Raises OSError, sqlite3.Error."""
    make_private_file(path)
    with closing(sqlite3.connect(path, timeout=BUSY_S)) as db:
        db.executescript(_SCHEMA)


class Holds:
    """The holds in one file. Safe in several threads and processes: each call is one transaction on its own connection.

    A call that raises has done nothing, or has done it under its key. Raises sqlite3.Error.
    """

    def __init__(self, path: Path, now_ms: Callable[[], int]) -> None:
        self._path, self._now_ms = path, now_ms

    @contextmanager
    def _durably(self, busy_s: float = BUSY_S) -> Iterator[sqlite3.Connection]:
        """Hold the write lock for a block. Its writes are on disk when the block ends, and undone when it raises."""
        with closing(sqlite3.connect(self._path, timeout=busy_s, isolation_level=None)) as db:
            db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")

    def order(self, order: HoldOrder, refused: Callable[[], str], *, busy_s: float = BUSY_S) -> Answered:
        """Carry out an order once, or repeat the earlier answer. `refused()` returns why it must be refused, or ""."""
        with self._durably(busy_s) as db:
            known = db.execute(
                "SELECT outcome, number, why, key, dfid, kind, payment_id, quantity FROM orders WHERE key = ?",
                (order.key,),
            ).fetchone()
            if known is not None:
                return Answered(*known[:3]) if HoldOrder(*known[3:]) == order else _OTHER_ORDER
            if db.execute("SELECT 1 FROM voided WHERE key = ?", (order.key,)).fetchone():
                return _VOID
            return self._write(db, order, self._against(db, order) or refused())

    def _against(self, db: sqlite3.Connection, order: HoldOrder) -> str:
        values = {"payment_id": order.payment_id, "now_ms": self._now_ms()}
        over, held, _ = db.execute(STATE.format(orders="orders"), values).fetchone()
        return "the payment has passed or was refused" if over else "the payment is held" if held else ""

    def _write(self, db: sqlite3.Connection, order: HoldOrder, why: str) -> Answered:
        outcome, at_ms = "rejected" if why else "settled", self._now_ms()
        until_ms = at_ms + order.quantity * MINUTE_MS if order.kind == CHALLENGE else 0
        row = (order.key, order.dfid, order.kind, order.payment_id, order.quantity, outcome, why, at_ms, until_ms)
        done = db.execute(
            "INSERT INTO orders (key, dfid, kind, payment_id, quantity, outcome, why, at_ms, until_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row,
        )
        return Answered(outcome, int(done.lastrowid or 0), why)

    def find(self, key: str) -> Answered:
        """Return the outcome of a key. `absent` is certain: an order and its effect are one transaction."""
        with self._durably() as db:
            return self._found(db, key)

    def void(self, key: str) -> Answered:
        """Make sure that nothing is ever done under a key; a key that was answered before keeps its answer."""
        with self._durably() as db:
            answered = self._found(db, key)
            if answered.outcome != "absent":
                return answered
            db.execute("INSERT INTO voided VALUES (?, ?)", (key, self._now_ms()))
            return _VOID

    def _found(self, db: sqlite3.Connection, key: str) -> Answered:
        row = db.execute("SELECT outcome, number, why FROM orders WHERE key = ?", (key,)).fetchone()
        if row is not None:
            return Answered(*row)
        return _VOID if db.execute("SELECT 1 FROM voided WHERE key = ?", (key,)).fetchone() else Answered("absent")

    def release(self, key: str) -> bool:
        """End a hold because the customer has confirmed: the payment passes. Return False when the hold no longer stands."""
        return self._end(key, "released")

    def refuse(self, key: str) -> bool:
        """End a hold and refuse its payment. Return False when the hold no longer stands."""
        return self._end(key, "refused")

    def _end(self, key: str, how: str) -> bool:
        with self._durably() as db:
            done = db.execute(
                "UPDATE orders SET ended = ? WHERE key = ? AND kind = 'CHALLENGE' AND outcome = 'settled'"
                " AND ended IS NULL AND until_ms > ?",
                (how, key, self._now_ms()),
            )
            return done.rowcount > 0

    def listed(self, since_ms: int, until_ms: int) -> list[tuple[HoldOrder, Answered, int]]:
        """Return every order answered in this time span, both ends included, with its time."""
        with self._durably() as db:
            rows = db.execute(
                "SELECT key, dfid, kind, payment_id, quantity, outcome, number, why, at_ms FROM orders"
                " WHERE at_ms BETWEEN ? AND ? ORDER BY number",
                (since_ms, until_ms),
            ).fetchall()
        return [(HoldOrder(*row[:5]), Answered(*row[5:8]), row[8]) for row in rows]


_OTHER_ORDER = Answered("conflict", why="the key belongs to another order")
_VOID = Answered("rejected", why="the key was made void")
