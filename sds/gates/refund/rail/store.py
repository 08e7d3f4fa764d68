"""The payment rail's memory: one durable row for every idempotency key that it has ever answered for.

The rail plays a system that belongs to somebody else, so it imports nothing that decides.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass

from sds.executors.sandbox.keyed_book import Answer, KeyedBook

AMOUNT_MINOR_MAX = 100_000_000
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


class PayoutStore(KeyedBook):
    """The rail's own file."""

    schema = f"""
CREATE TABLE IF NOT EXISTS payouts (
    number INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    amount_minor INTEGER NOT NULL CHECK (amount_minor BETWEEN 1 AND {AMOUNT_MINOR_MAX}),
    ticket_id TEXT NOT NULL,
    dfid TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('settled', 'rejected')),
    answered_at_ms INTEGER NOT NULL
) STRICT;
-- A key that was made void before any order came with it. A key is in one of the two tables, never in both.
CREATE TABLE IF NOT EXISTS voided (key TEXT PRIMARY KEY, voided_at_ms INTEGER NOT NULL) STRICT, WITHOUT ROWID;
-- Payments that were taken back whole: at most one row for each payment.
CREATE TABLE IF NOT EXISTS reversals (
    number INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE REFERENCES payouts (key),
    amount_minor INTEGER NOT NULL,
    reversed_at_ms INTEGER NOT NULL
) STRICT;
"""
    table, columns, at_ms, voids = "payouts", ("kind", "amount_minor", "ticket_id", "dfid"), "answered_at_ms", "voided"
    declined = "the rail declined the payment"

    @staticmethod
    def reference(number: int, status: str) -> str:
        return f"PAY-{number:08d}" if status == "settled" else ""

    def pay(self, order: Order, *, refuse: bool = False) -> Answer:
        """Pay once, or repeat the earlier answer. `refuse`: reject a new key for good instead."""
        return self.carry_out(order.key, astuple(order)[1:], refuse=refuse)

    def revert(self, key: str) -> Answer:
        """Take back what was paid under `key`, whole and once; rejected when nothing was paid."""
        with self.durably():
            found = self._reverted(key)
            if found.status == "settled":
                return found
            done = self.db.execute(
                "INSERT INTO reversals (key, amount_minor, reversed_at_ms)"
                " SELECT key, amount_minor, ? FROM payouts WHERE key = ? AND status = 'settled'",
                (self.now_ms(), key),
            )
            return _reversal(int(done.lastrowid or 0)) if done.rowcount else _NOT_PAID

    def reverted(self, key: str) -> Answer:
        """Return whether what was paid under `key` has been taken back: settled, or absent."""
        with self.lock:
            return self._reverted(key)

    def _reverted(self, key: str) -> Answer:
        row = self.db.execute("SELECT number FROM reversals WHERE key = ?", (key,)).fetchone()
        return _reversal(row[0]) if row else Answer("absent")

    def statement(self, since_ms: int, until_ms: int, after: int) -> list[Line]:
        """Return the next `PAGE_LINES` orders answered in this time span with a number above `after`, in their current state.

        A key that was made void before any order came with it is no order.
        """
        select = (
            "SELECT payouts.number, payouts.key, dfid, ticket_id, kind, payouts.amount_minor,"
            " CASE WHEN r.key IS NULL THEN status ELSE 'reverted' END, answered_at_ms,"
            " CASE status WHEN 'settled' THEN printf('PAY-%08d', payouts.number) ELSE '' END"
            " FROM payouts LEFT JOIN reversals r ON r.key = payouts.key"
        )
        return [Line(*row) for row in self.page(select, since_ms, until_ms, after)]


_NOT_PAID = Answer("rejected", detail="nothing was paid under this key")


def _reversal(number: int) -> Answer:
    return Answer("settled", f"REV-{number:08d}")
