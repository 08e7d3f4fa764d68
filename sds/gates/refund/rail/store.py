"""The payment rail's memory: one durable row for every idempotency key that it has ever answered for.

The rail plays a system that belongs to somebody else, so it imports nothing that decides.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from threading import Lock

AMOUNT_MINOR_MAX = 100_000_000
PAGE_LINES = 100
BUSY_S = 5.0

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS payouts (
    number INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    amount_minor INTEGER NOT NULL CHECK (amount_minor BETWEEN 1 AND {AMOUNT_MINOR_MAX}),
    ticket_id TEXT NOT NULL,
    dfid TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('settled', 'rejected')),
    answered_at_ms INTEGER NOT NULL
) STRICT
"""
# A key that was made void before any order came with it. A key is in one of the two tables, never in both.
_SCHEMA_VOIDED = """
CREATE TABLE IF NOT EXISTS voided (key TEXT PRIMARY KEY, voided_at_ms INTEGER NOT NULL) STRICT, WITHOUT ROWID
"""
# Payments that were taken back whole: at most one row for each payment.
_SCHEMA_REVERSALS = """
CREATE TABLE IF NOT EXISTS reversals (
    number INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE REFERENCES payouts (key),
    amount_minor INTEGER NOT NULL,
    reversed_at_ms INTEGER NOT NULL
) STRICT
"""
_FORMS = {
    "key": re.compile(r"[0-9a-f]{64}"),
    "kind": re.compile(r"[A-Z][A-Z0-9_]{0,63}"),
    "ticket_id": re.compile(r"[A-Za-z0-9-]{1,64}"),
    "dfid": re.compile(r"[A-Za-z0-9_.:-]{1,64}"),
}


@dataclass(frozen=True, slots=True)
class Order:
    """One request to pay: an idempotency key, and the order that it stands for."""

    key: str
    kind: str
    amount_minor: int
    ticket_id: str
    dfid: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a key: settled, rejected, or absent; `conflict` when it came with another order."""

    status: str
    reference: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One order in a statement: settled, rejected, or reverted (paid and taken back whole). `number`: the count of the
    rail's answers at this order; `at_ms`: the time of its answer.
    """

    number: int
    key: str
    dfid: str
    ticket_id: str
    kind: str
    amount_minor: int
    status: str
    at_ms: int
    reference: str


def is_key(text: object) -> bool:
    return isinstance(text, str) and _FORMS["key"].fullmatch(text) is not None


def parse_order(data: object) -> Order | str:
    """Return the order, or one line that says what is wrong with it."""
    if not isinstance(data, dict) or set(data) != {*_FORMS, "amount_minor"}:
        return "an order has exactly: key, kind, amount_minor, ticket_id, dfid"
    for name, form in _FORMS.items():
        if not isinstance(data[name], str) or not form.fullmatch(data[name]):
            return f"{name} is malformed"
    amount = data["amount_minor"]
    if type(amount) is not int or not 1 <= amount <= AMOUNT_MINOR_MAX:
        return f"amount_minor is not an integer between 1 and {AMOUNT_MINOR_MAX}"
    return Order(**data)


class PayoutStore:
    """The rail's own file. One connection and one lock: one thread at a time decides a payout and makes it durable."""

    def __init__(self, path: Path, now_ms: Callable[[], int]) -> None:
        self._now_ms, self._lock = now_ms, Lock()
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(_SCHEMA)
        self._db.execute(_SCHEMA_VOIDED)
        self._db.execute(_SCHEMA_REVERSALS)

    @contextmanager
    def _durably(self) -> Iterator[None]:
        """Hold the write lock for a block. Its writes are on disk when the block ends, and undone when it raises."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # not after a full disk, which ends the transaction itself
                    self._db.execute("ROLLBACK")
                raise

    def pay(self, order: Order, *, refuse: bool = False) -> Answer:
        """Pay once, or repeat the earlier answer. `refuse`: reject a new key for good instead."""
        with self._durably():
            return self._pay(order, refuse=refuse)  # the caller gets it once it is durable

    def _pay(self, order: Order, *, refuse: bool) -> Answer:
        row = self._db.execute(
            "SELECT number, status, key, kind, amount_minor, ticket_id, dfid FROM payouts WHERE key = ?", (order.key,)
        ).fetchone()
        if row is not None:
            return _answer(*row[:2]) if row[2:] == astuple(order) else _CONFLICT
        if self._is_void(order.key):
            return _VOIDED
        status = "rejected" if refuse else "settled"
        done = self._db.execute(
            "INSERT INTO payouts (key, kind, amount_minor, ticket_id, dfid, status, answered_at_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*astuple(order), status, self._now_ms()),
        )
        return _answer(int(done.lastrowid or 0), status)

    def void(self, key: str) -> Answer:
        """Make sure that nothing is ever paid under `key`; a key that was answered for keeps its answer."""
        with self._durably():
            answer = self._find(key)
            if answer.status == "absent":
                self._db.execute("INSERT INTO voided VALUES (?, ?)", (key, self._now_ms()))
                answer = _VOIDED
        return answer

    def revert(self, key: str) -> Answer:
        """Take back what was paid under `key`, whole and once; rejected when nothing was paid."""
        with self._durably():
            found = self._reverted(key)
            if found.status == "settled":
                return found
            done = self._db.execute(
                "INSERT INTO reversals (key, amount_minor, reversed_at_ms)"
                " SELECT key, amount_minor, ? FROM payouts WHERE key = ? AND status = 'settled'",
                (self._now_ms(), key),
            )
            return _reversal(int(done.lastrowid or 0)) if done.rowcount else _NOT_PAID

    def reverted(self, key: str) -> Answer:
        """Return whether what was paid under `key` has been taken back: settled, or absent."""
        with self._lock:
            return self._reverted(key)

    def _reverted(self, key: str) -> Answer:
        row = self._db.execute("SELECT number FROM reversals WHERE key = ?", (key,)).fetchone()
        return _reversal(row[0]) if row else Answer("absent")

    def find(self, key: str) -> Answer:
        with self._lock:
            return self._find(key)

    def _find(self, key: str) -> Answer:
        row = self._db.execute("SELECT number, status FROM payouts WHERE key = ?", (key,)).fetchone()
        if row is not None:
            return _answer(*row)
        return _VOIDED if self._is_void(key) else Answer("absent")

    def _is_void(self, key: str) -> bool:
        return self._db.execute("SELECT 1 FROM voided WHERE key = ?", (key,)).fetchone() is not None

    def statement(self, since_ms: int, until_ms: int, after: int) -> list[Line]:
        """Return the next `PAGE_LINES` orders answered in this time span with a number above `after`, in their current state.

        A key that was made void before any order came with it is no order.
        """
        with self._lock:
            rows = self._db.execute(
                "SELECT p.number, p.key, dfid, ticket_id, kind, p.amount_minor,"
                " CASE WHEN r.key IS NULL THEN status ELSE 'reverted' END, answered_at_ms,"
                " CASE status WHEN 'settled' THEN printf('PAY-%08d', p.number) ELSE '' END"
                " FROM payouts p LEFT JOIN reversals r ON r.key = p.key"
                " WHERE answered_at_ms BETWEEN ? AND ? AND p.number > ? ORDER BY p.number LIMIT ?",
                (since_ms, until_ms, after, PAGE_LINES),
            ).fetchall()
        return [Line(*row) for row in rows]


_CONFLICT = Answer("conflict", detail="the key belongs to another order")
_VOIDED = Answer("rejected", detail="the key was made void")
_NOT_PAID = Answer("rejected", detail="nothing was paid under this key")


def _answer(number: int, status: str) -> Answer:
    if status == "settled":
        return Answer("settled", reference=f"PAY-{number:08d}")
    return Answer("rejected", detail="the rail declined the payment")


def _reversal(number: int) -> Answer:
    return Answer("settled", reference=f"REV-{number:08d}")
