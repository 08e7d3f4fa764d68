"""The outside of these tests: tickets that somebody else owns, and a payment rail with a file of its own.

The rail's memory (`rail.store.PayoutStore`) honours idempotency keys durably; `Rail` puts misfortune before it.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path

from sds.executors.sandbox.keyed_book import Answer as RailAnswer
from sds.gates.refund.rail.store import Order, PayoutStore
from sds.kernel.envelope.state import StateRead, Value
from sds.kernel.errors import StateError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.kernel.faults import Faults

FARE_MINOR = 20_000
START_MS = 1_386_000_000_000  # 2 December 2013, 16:00 UTC


class Tickets:
    """Authoritative state: tickets by key, each with a version that goes up when it is moved."""

    def __init__(self, faults: Faults | None = None) -> None:
        self._faults = faults or Faults()
        self.rows: dict[str, dict[str, Value]] = {}
        self.versions: dict[str, int] = {}
        self.down = False
        self.on_read: Callable[[str], None] = lambda _key: None

    def live_through(self, faults: Faults) -> None:
        """Go on as the same system, seen from another process."""
        self._faults = faults

    def put(self, key: str, **changes: Value) -> None:
        fresh: dict[str, Value] = {
            "customer": f"customer of {key}",
            "refundable_minor": FARE_MINOR,
            "compensations_left": 1,
            "mood": "calm",
        }
        old = {path.removeprefix("ticket."): value for path, value in self.rows.get(key, {}).items()}
        self.rows[key] = {f"ticket.{name}": value for name, value in (fresh | old | changes).items()}
        self.versions[key] = self.versions.get(key, 0) + 1

    def read(self, key: str) -> StateRead | None:
        self._faults.step("before source.read")
        self.on_read(key)
        if self.down:
            raise StateError("the ticket system is down")
        found = StateRead(dict(self.rows[key]), str(self.versions[key])) if key in self.rows else None
        self._faults.step("after source.read")
        return found


class Rail:
    """An executor over the rail's own file. `misfortunes` are used up one for each dispatch:

    `lose`: pays, and its reply is lost; `drop`: the order is lost; `refuse`: declined for good; `raise`: pays, then
    raises. `blind`: look-ups do not answer. Not `idempotent`: every dispatch of a key pays anew.
    """

    def __init__(self, path: Path, *, idempotent: bool = True, faults: Faults | None = None) -> None:
        self.idempotent = idempotent
        self.blind = False
        self.misfortunes: list[str] = []
        self.sent: list[str] = []
        self._path, self._lock = path, threading.Lock()
        self._faults = faults or Faults()
        self._memory = PayoutStore(path, lambda: START_MS)

    def live_through(self, faults: Faults) -> None:
        """Go on as the same rail, seen from another process."""
        self._faults = faults

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self._faults.step("before dispatch")
        with self._lock:
            fate = self.misfortunes.pop(0) if self.misfortunes else "pay"
            self.sent.append(key)
            turn = self.sent.count(key)
        if fate == "drop":
            return Receipt("unknown", detail="no reply")
        own = key if self.idempotent or turn == 1 else sha256(f"{key}#{turn}".encode()).hexdigest()
        amount = dict(intent.params).get("amount", 1)
        found = self._memory.pay(
            Order(own, intent.kind, amount, intent.resource_key, intent.dfid), refuse=fate == "refuse"
        )
        self._faults.step("after dispatch")
        if fate == "raise":
            raise ConnectionResetError("the wire broke after the rail had paid")
        return Receipt("unknown") if fate == "lose" else _receipt(found)

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return self._told("lookup", self._memory.find, key)

    def void(self, key: str, deadline_s: float) -> Receipt:
        return self._told("void", self._memory.void, key)

    def reverted(self, key: str, deadline_s: float) -> Receipt:
        return self._told("reverted", self._memory.reverted, key)

    def _told(self, name: str, ask: Callable[[str], RailAnswer], key: str) -> Receipt:
        self._faults.step(f"before {name}")
        found = ask(key)
        self._faults.step(f"after {name}")
        if self.blind:
            raise TimeoutError("the rail does not answer")
        return _receipt(found)

    def revert(self, key: str, deadline_s: float) -> Receipt:
        self._faults.step("before revert")
        fate = self.misfortunes.pop(0) if self.misfortunes else "pay"
        if fate == "drop":
            return Receipt("unknown", detail="no reply")
        if fate == "refuse":
            return Receipt("rejected", detail="too late to take it back")
        found = self._memory.revert(key)
        self._faults.step("after revert")
        return Receipt("unknown") if fate == "lose" else _receipt(found)

    def paid(self) -> list[tuple[str, str, str, int]]:
        """Return every payout: (dfid, ticket, kind, amount)."""
        sql = "SELECT dfid, ticket_id, kind, amount_minor FROM payouts WHERE status = 'settled' ORDER BY number"
        with closing(sqlite3.connect(self._path)) as db:
            return db.execute(sql).fetchall()


class PaysOnly:
    """An executor of the smallest kind over a rail: it dispatches and looks up, and can neither void nor revert."""

    def __init__(self, rail: Rail) -> None:
        self.idempotent, self.dispatch, self.lookup = rail.idempotent, rail.dispatch, rail.lookup


def _receipt(found: RailAnswer) -> Receipt:
    return Receipt(found.status, found.reference, found.detail)  # type: ignore[arg-type]  # settled, rejected or absent
