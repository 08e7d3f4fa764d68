"""The bank's database: the waiting payments, each with what was known at its time, and the state of its account.

Triggers in the file raise a payment's version by one with any change, whoever writes. Payments are never deleted or
replaced, so a version never comes back with other contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from sds.gates.databases import changing, new_database, versioned
from sds.kernel.envelope.state import Value

from .accounts import STATUSES
from .features import WINDOWS_DAYS

FEATURES = (
    "payment.amount_minor",
    "payment.hour",
    "payment.online",
    "payment.distance_band",
    "payment.of_mean_pct",
    "customer.idle_min",
    "customer.idle_here_min",
    *(
        f"customer.{name}"
        for days in WINDOWS_DAYS
        for name in (f"count_{days}d", f"sum_{days}d_minor", f"mean_{days}d_minor")
    ),
    *(f"terminal.{name}" for days in WINDOWS_DAYS for name in (f"count_{days}d", f"fraud_{days}d_permille")),
)
ACCOUNT = ("account.id", "account.status", "account.limit_minor")


def column(field: str) -> str:
    """Return the column of a snapshot field."""
    return field.replace(".", "_")


def bank_path(folder: Path) -> Path:
    """Return the path of the bank's database in the gate's folder."""
    return folder / "bank.db"


_SCHEMA = f"""
PRAGMA journal_mode = WAL;
CREATE TABLE payments (
    payment_id TEXT PRIMARY KEY,
    account_id TEXT NOT NULL,
    account_status TEXT NOT NULL CHECK (account_status IN ({", ".join(f"'{name}'" for name in STATUSES)})),
    account_limit_minor INTEGER NOT NULL CHECK (account_limit_minor > 0),
    {", ".join(f"{column(name)} INTEGER NOT NULL CHECK ({column(name)} >= 0)" for name in FEATURES)},
    version INTEGER NOT NULL DEFAULT 1
) STRICT, WITHOUT ROWID;
CREATE INDEX payments_by_account ON payments (account_id);
{versioned("payments", "payment")}"""


def write_bank(path: Path, payments: Iterable[tuple[str, Mapping[str, Value]]]) -> None:
    """Write payments, each with its id and fields, to a new file. Raises StateError when it exists or cannot be written."""
    names = (*ACCOUNT, *FEATURES)
    rows = [(payment_id, *(fields[name] for name in names), 1) for payment_id, fields in payments]
    marks = ", ".join("?" * (len(names) + 2))
    with new_database(path, _SCHEMA) as db:
        db.executemany(f"INSERT INTO payments VALUES ({marks})", rows)


def compromise_account(path: Path, payment_id: str) -> bool:
    """Mark the account of a payment as compromised, in every waiting payment of it: its card is in other hands.

    Return False when there is no such payment, or its account is no longer active.
    """
    with changing(path) as db:
        moved = db.execute(
            "UPDATE payments SET account_status = 'compromised' WHERE account_status = 'active'"
            " AND account_id = (SELECT account_id FROM payments WHERE payment_id = ? AND account_status = 'active')",
            (payment_id,),
        )
        return moved.rowcount > 0
