"""The sandbox gateway's books: one row for every order it carried out or declined, in an SQLite file of its own.

The gateway stands for somebody else's system. An answered order survives a `kill -9`. A forgotten key counts as new: the
same order is paid again. The books themselves forget nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sds.executors.sandbox.keyed_book import Answer, KeyedBook


class Books(KeyedBook):
    """The books in one file."""

    schema = """
CREATE TABLE IF NOT EXISTS payments (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, order_body TEXT NOT NULL, amount INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('settled', 'rejected')), at_ms INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS payments_by_key ON payments (key);
CREATE TABLE IF NOT EXISTS voids (key TEXT PRIMARY KEY, at_ms INTEGER NOT NULL) STRICT, WITHOUT ROWID;
"""
    table, columns, voids, synchronous = "payments", ("order_body", "amount"), "voids", "NORMAL"
    declined = "the gateway declined the order"

    @staticmethod
    def reference(number: int, status: str = "") -> str:  # noqa: ARG004  a declined order has a name, too
        return f"pay_{number:08d}"

    def pay(self, key: str, order: Mapping[str, Any], *, refuse: bool = False) -> Answer:
        """Carry an order out once for its key, as long as the key is known. `refuse`: decline a new order for good."""
        return self.carry_out(key, (json.dumps(order, sort_keys=True), int(order.get("amount", 0))), refuse=refuse)

    def statement(self, since_ms: int, until_ms: int, after: int) -> list[dict[str, Any]]:
        """Return the next `PAGE_LINES` orders of this time span whose number is above `after`."""
        select = "SELECT number, key, order_body, amount, status, at_ms FROM payments"
        return [
            {
                "number": number,
                "id": self.reference(number),
                "key": key,
                "status": self.status_now(status, at_ms),
                "amount": amount,
                "at_ms": at_ms,
                "order": json.loads(body),
            }
            for number, key, body, amount, status, at_ms in self.page(select, since_ms, until_ms, after)
        ]

    def totals(self) -> dict[str, Any]:
        """Return the payments under each key and in all, and the keys that were paid more than once."""
        with self.lock:
            rows = self.db.execute(
                "SELECT key, count(*), sum(amount), max(order_body) FROM payments WHERE status = 'settled'"
                " GROUP BY key ORDER BY min(number)"
            ).fetchall()
            declined = self.db.execute("SELECT count(*) FROM payments WHERE status = 'rejected'").fetchone()[0]
        each = [{"key": key, "paid": n, "total": total, "order": json.loads(body)} for key, n, total, body in rows]
        return {
            "keys": len(rows),
            "settled": sum(row[1] for row in rows),
            "rejected": declined,
            "total": sum(row[2] for row in rows),
            "paid_twice": [row[0] for row in rows if row[1] > 1],
            "payments": each,
        }
