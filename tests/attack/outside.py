"""What is not ours: accounts and banks, each in its own file, which any process opens anew for every call."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sds.kernel.envelope.state import StateRead
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.executor.statement import StatementLine

BUSY_S = 30.0


@contextmanager
def file_at(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file for one transaction. It is not synced: processes are killed here, but not the machine."""
    with closing(sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("BEGIN IMMEDIATE")
        yield db
        db.execute("COMMIT")


class Accounts:
    """The authoritative state: each account's balance in minor units. The kernel counts what is drawn from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with file_at(path) as db:
            db.execute("CREATE TABLE IF NOT EXISTS accounts (key TEXT PRIMARY KEY, balance INTEGER, version INTEGER)")

    def put(self, key: str, balance_minor: int) -> None:
        sql = "INSERT INTO accounts VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET balance = ?, version = version + 1"
        with file_at(self._path) as db:
            db.execute(sql, (key, balance_minor, balance_minor))

    def read(self, key: str) -> StateRead | None:
        with closing(sqlite3.connect(self._path, timeout=BUSY_S)) as db:
            row = db.execute("SELECT balance, version FROM accounts WHERE key = ?", (key,)).fetchone()
        return StateRead({"account.balance_minor": row[0]}, str(row[1])) if row else None


class Bank:
    """An honest executor. Idempotent, it pays a key once; otherwise it pays every order. `takes_s`: before it pays."""

    def __init__(self, path: Path, now_ms: Callable[[], int], *, idempotent: bool = True, takes_s: float = 0) -> None:
        self.idempotent, self._takes_s = idempotent, takes_s
        self._path, self._now_ms = path, now_ms
        with file_at(path) as db:
            db.execute(
                "CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, key TEXT, dfid TEXT, kind TEXT,"
                " account TEXT, params TEXT, amount INTEGER, status TEXT, at_ms INTEGER)"
            )
            db.execute("CREATE INDEX IF NOT EXISTS keys ON orders (key)")

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        time.sleep(self._takes_s)
        return self.pay(intent, key, dict(intent.params)["amount"])

    def pay(self, intent: ExecutionIntent, key: str, amount_minor: int, status: str = "settled") -> Receipt:
        with file_at(self._path) as db:
            known = self._known(db, key)
            if known.status == "rejected" or (known.status == "settled" and self.idempotent):
                return known
            order = (key, intent.dfid, intent.kind, intent.resource_key, json.dumps(dict(intent.params)), amount_minor)
            columns = "key, dfid, kind, account, params, amount, status, at_ms"
            db.execute(
                f"INSERT INTO orders ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*order, status, self._now_ms())
            )
            return self._known(db, key)

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        with file_at(self._path) as db:
            return self._known(db, key)

    def void(self, key: str, deadline_s: float) -> Receipt:
        with file_at(self._path) as db:
            if self._known(db, key).status == "absent":
                db.execute("INSERT INTO orders (key, status, at_ms) VALUES (?, 'rejected', ?)", (key, self._now_ms()))
            return self._known(db, key)

    @staticmethod
    def _known(db: sqlite3.Connection, key: str) -> Receipt:
        row = db.execute("SELECT number, status FROM orders WHERE key = ? ORDER BY number", (key,)).fetchone()
        return Receipt(row[1], f"PAY-{row[0]}") if row else Receipt("absent")

    def paid(self) -> list[tuple[str, str, int]]:
        """Return every payment: (key, account, amount)."""
        with closing(sqlite3.connect(self._path, timeout=BUSY_S)) as db:
            return db.execute(
                "SELECT key, account, amount FROM orders WHERE status = 'settled' ORDER BY number"
            ).fetchall()


class ListingBank(Bank):
    """A bank that also lists its orders."""

    def statement(self, since_ms: int, until_ms: int) -> Iterator[StatementLine]:
        sql = (
            "SELECT key, status, at_ms, amount, 'PAY-' || number, coalesce(dfid, ''), coalesce(kind, ''),"
            " coalesce(params, '{}'), coalesce(account, '') FROM orders WHERE at_ms BETWEEN ? AND ? ORDER BY number"
        )
        with closing(sqlite3.connect(self._path, timeout=BUSY_S)) as db:
            for *head, params, account in db.execute(sql, (since_ms, until_ms)).fetchall():
                yield StatementLine(*head, json.loads(params), account)
