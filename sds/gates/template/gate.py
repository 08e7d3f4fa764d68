"""The gate `my_gate`: which held card payments may pass. State and orders lie in one SQLite file in the gate's folder.

    sds run ./my_gate --limit 5          or  sds events ./my_gate | head -1 | sds decide ./my_gate --event -

Replace `Payments` by your own state and `Releases` by your own system. library.md of the documentation says what each must do.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

from sds import ExecutionIntent, ExecutorError, GateDefinition, Receipt, StateError, StatementLine, StateRead

SCHEMA = """
CREATE TABLE IF NOT EXISTS payments (
    payment_id TEXT PRIMARY KEY, open_minor INTEGER NOT NULL CHECK (open_minor >= 0), challenged INTEGER NOT NULL,
    abroad INTEGER NOT NULL, usual_minor INTEGER NOT NULL, stolen INTEGER NOT NULL, note TEXT NOT NULL,
    version INTEGER NOT NULL DEFAULT 1
) STRICT;
CREATE TABLE IF NOT EXISTS orders (
    key TEXT PRIMARY KEY, dfid TEXT NOT NULL, kind TEXT NOT NULL, amount_minor INTEGER NOT NULL,
    payment_id TEXT NOT NULL, at_ms INTEGER NOT NULL
) STRICT;
"""
NOTES = ("my usual groceries", "we are on holiday", "a new fridge", "I did not buy this", "please hurry, it is urgent")


@contextmanager
def connected(folder: Path) -> Iterator[sqlite3.Connection]:
    """Connect for one block. Its writes are durable when it ends, and undone when it raises."""
    with closing(sqlite3.connect(folder / "payments.db", timeout=5.0)) as db, db:
        db.execute("PRAGMA synchronous = FULL")
        yield db


def make_samples(folder: Path) -> None:
    """Make some payments to try with, where there is no table of payments yet. Your own gate has real ones."""
    rng, path = Random(1), folder / "payments.db"  # noqa: S311  the same each time
    if not path.exists():
        path.touch(mode=0o600)  # private, like all files in a gate's folder
    with connected(folder) as db:
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'payments'").fetchone():
            return
        db.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA.split(";"):
            db.execute(statement)
        for number in range(1, 51):
            usual, factor = rng.randrange(1_000, 20_000), rng.choice((1, 1, 2, 9))
            abroad, stolen, note = rng.random() < 0.3, rng.random() < 0.1, rng.choice(NOTES)
            row = (f"PAY-{number:03}", usual * factor, False, abroad, usual, stolen, note)
            db.execute("INSERT OR IGNORE INTO payments VALUES (?, ?, ?, ?, ?, ?, ?, 1)", row)


class Payments:
    """The state: one row for each payment, read anew each time. Safe in several threads: each read has its own connection."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: str) -> StateRead | None:
        """Return a payment's current state; None for an unknown one. Raises StateError."""
        try:
            with connected(self._folder) as db:
                row = db.execute("SELECT * FROM payments WHERE payment_id = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise StateError(f"the payments cannot be read: {error}") from error
        if row is None:
            return None
        _, open_minor, challenged, abroad, usual_minor, stolen, _, version = row
        fields: dict[str, bool | int | str] = {
            "payment.open_minor": open_minor,
            "payment.challenged": bool(challenged),
            "payment.abroad": bool(abroad),
            "card.usual_minor": usual_minor,
            "card.reported_stolen": bool(stolen),
        }
        return StateRead(fields, version=str(version))


class Releases:
    """The executor: releases a payment or sends its holder a code. An order and its effect are one transaction under
    the order's key, so the same key twice has one effect: it is idempotent.
    """

    idempotent = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:  # noqa: ARG002  it is quick
        """Carry out the kernel's order. `rejected`: certainly not done. If this raises, the order is UNKNOWN and looked up."""
        amount = dict(intent.params).get("amount", 0)
        row = (key, intent.dfid, intent.kind, amount, intent.resource_key, time.time_ns() // 1_000_000)
        with connected(self._folder) as db:
            if not db.execute("INSERT OR IGNORE INTO orders VALUES (?, ?, ?, ?, ?, ?)", row).rowcount:
                return Receipt("settled", reference=key[:12])
            moved = db.execute(
                "UPDATE payments SET open_minor = open_minor - ?, challenged = challenged + ?,"
                " version = version + 1 WHERE payment_id = ? AND version = ?",
                (amount, intent.kind == "CHALLENGE", intent.resource_key, int(intent.state_version)),
            )
            if not moved.rowcount:
                db.execute("DELETE FROM orders WHERE key = ?", (key,))
                return Receipt("rejected", detail="the payment has changed; nothing was done")
        return Receipt("settled", reference=key[:12])

    def lookup(self, key: str, deadline_s: float) -> Receipt:  # noqa: ARG002
        """Return the outcome of an order. `absent` is certain here: an order and its effect are one transaction."""
        with connected(self._folder) as db:
            known = db.execute("SELECT 1 FROM orders WHERE key = ?", (key,)).fetchone()
        return Receipt("settled", reference=key[:12]) if known else Receipt("absent")

    def statement(self, since_ms: int, until_ms: int) -> Iterable[StatementLine]:
        """List every order of this time span, to be compared with the record: `sds reconcile`."""
        try:
            with connected(self._folder) as db:
                rows = db.execute("SELECT * FROM orders WHERE at_ms BETWEEN ? AND ?", (since_ms, until_ms)).fetchall()
        except sqlite3.Error as error:
            raise ExecutorError(f"the orders cannot be read: {error}") from error
        for key, dfid, kind, amount, payment_id, at_ms in rows:
            params = {"amount": amount} if kind == "ALLOW" else {}
            yield StatementLine(key, "settled", at_ms, params.get("amount"), key[:12], dfid, kind, params, payment_id)


def open_parts(folder: Path) -> tuple[Payments, Releases]:
    make_samples(folder)
    return Payments(folder), Releases(folder)


def events(folder: Path) -> Iterable[Mapping[str, object]]:
    """Yield the payments that may wait for a decision, in order. Decided ones may be in it: the gate knows them."""
    make_samples(folder)
    with connected(folder) as db:
        rows = db.execute("SELECT payment_id, note FROM payments ORDER BY payment_id").fetchall()
    for payment_id, note in rows:
        yield {"hold_id": f"HOLD-{payment_id}", "payment_id": payment_id, "note": note}


gate = GateDefinition(
    name="my_gate", contract=Path(__file__).with_name("contract.yaml"), open=open_parts, events=events
)
