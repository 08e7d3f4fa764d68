"""One ordinary payment in a bank of its own: every test says what is different about it."""

from __future__ import annotations

from pathlib import Path

from sds.gates.fraud.holds import holds_path, make_holds
from sds.gates.fraud.source import PaymentSource
from sds.gates.fraud.world.bank import FEATURES, bank_path, write_bank
from sds.kernel.envelope.state import Value

PAYMENT = "PAY-1"
NOW_MS = 1_800_000_000_000
ORDINARY: dict[str, Value] = {
    **dict.fromkeys(FEATURES, 0),
    "payment.amount_minor": 2_500,
    "payment.online": False,
    "payment.of_mean_pct": 100,
    "account.id": "ACC-00001",
    "account.status": "active",
    "account.limit_minor": 50_000,
}


class Clock:
    """Milliseconds since 1970, which only the test moves."""

    def __init__(self) -> None:
        self.ms = NOW_MS

    def __call__(self) -> int:
        return self.ms


def one_payment(folder: Path, clock: Clock | None = None, **changes: Value) -> PaymentSource:
    """Write a bank with the one payment, and another of the same account; return its source."""
    fields = ORDINARY | {name.replace("_", ".", 1): value for name, value in changes.items()}
    write_bank(bank_path(folder), [(PAYMENT, fields), ("PAY-2", fields)])
    make_holds(holds_path(folder))
    return PaymentSource(bank_path(folder), holds_path(folder), clock or Clock())
