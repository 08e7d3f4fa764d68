"""The fraud gate's state source: a payment as it was at its time, with its account and its holds as they are now."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from sds.gates.databases import DatabaseReaders
from sds.kernel.envelope.state import StateRead, Value

from .holds import STATE
from .world.bank import ACCOUNT, FEATURES, column

_PAYMENT_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_NAMES = (*ACCOUNT, *FEATURES)
_READ = f"SELECT version, {', '.join(map(column, _NAMES))} FROM payments WHERE payment_id = ?"
_HOLDS = STATE.format(orders="holds.orders")


class PaymentSource:
    """Reads payments from the bank's file and their holds from the executor's, both read-only.

    Safe in several threads: each read has its own connection. A version covers both files, and whether a hold has run out.
    """

    def __init__(self, bank: Path, holds: Path, now_ms: Callable[[], int]) -> None:
        self._now_ms, self._readers = now_ms, DatabaseReaders(bank, "payments", "fraud", holds=holds)
        self.close = self._readers.close

    def read(self, key: str) -> StateRead | None:
        """Return the payment's current fields and version; None for an unknown payment. Raises StateError."""
        if not _PAYMENT_ID.fullmatch(key):
            return None
        with self._readers.connection() as db:
            row = db.execute(_READ, (key,)).fetchone()
            state = db.execute(_HOLDS, {"payment_id": key, "now_ms": self._now_ms()}).fetchone()
        return None if row is None else _state(row, *state)

    def version(self, key: str) -> str | None:
        """Return the payment's current version: the precondition that the executor checks before it acts."""
        state = self.read(key)
        return state.version if state else None


def _state(row: tuple[int | str, ...], over: int, held: int, changes: int) -> StateRead:
    fields: dict[str, Value] = dict(zip(_NAMES, row[1:], strict=True))
    fields["payment.online"] = bool(fields["payment.online"])
    fields["payment.open_minor"] = 0 if over else fields["payment.amount_minor"]
    fields["payment.held"] = bool(held)
    return StateRead(fields, f"{row[0]}.{changes}.{held}")
