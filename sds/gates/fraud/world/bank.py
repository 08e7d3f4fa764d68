"""The bank's own database: the payments that wait, each with what was known at its time, and the state of its account.

Any change of a payment raises its version by one; the file itself sees to it, whoever writes. Payments are never deleted
or replaced, so a version never comes back with other contents.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

from sds.gates.worlds import ROOM
from sds.kernel.envelope.state import Value
from sds.kernel.errors import StateError
from sds.kernel.storage.private_files import make_private_file

from .accounts import STATUSES
from .features import WINDOWS_DAYS

BUSY_S = 2.0
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
    """Return the column that a snapshot field lies in."""
    return field.replace(".", "_")


def bank_path(folder: Path) -> Path:
    """Return where the bank's database lies in the gate's folder."""
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
CREATE TRIGGER payment_moves AFTER UPDATE ON payments WHEN NEW.version <> OLD.version + 1 BEGIN
    UPDATE payments SET version = OLD.version + 1 WHERE payment_id = NEW.payment_id;
END;
CREATE TRIGGER payment_renamed BEFORE UPDATE OF payment_id ON payments BEGIN
    SELECT RAISE(ABORT, 'a payment is never renamed');
END;
CREATE TRIGGER payment_deleted BEFORE DELETE ON payments BEGIN
    SELECT RAISE(ABORT, 'a payment is never deleted');
END;
CREATE TRIGGER payment_replaced BEFORE INSERT ON payments
WHEN EXISTS (SELECT 1 FROM payments WHERE payment_id = NEW.payment_id) BEGIN
    SELECT RAISE(ABORT, 'a payment is never replaced');
END;
"""


def write_bank(path: Path, payments: Iterable[tuple[str, Mapping[str, Value]]]) -> None:
    """Write payments, each with its id and fields, to a new file. Raises StateError when it cannot be written."""
    if path.exists():
        raise StateError(f"`{path}` exists already", hint="choose another file or remove this one")
    names = (*ACCOUNT, *FEATURES)
    rows = [(payment_id, *(fields[name] for name in names), 1) for payment_id, fields in payments]
    marks = ", ".join("?" * (len(names) + 2))
    try:
        make_private_file(path)
        with closing(sqlite3.connect(path)) as db, db:
            db.executescript(_SCHEMA)
            db.executemany(f"INSERT INTO payments VALUES ({marks})", rows)
    except (sqlite3.Error, OSError) as error:
        raise StateError(f"`{path}` cannot be written: {error}", hint=ROOM) from error


def compromise_account(path: Path, payment_id: str) -> bool:
    """Have it become known that the card behind a payment is in other hands: every waiting payment of its account is.

    Returns False when there is no such payment or its account is not active any more.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=BUSY_S)) as db, db:
            moved = db.execute(
                "UPDATE payments SET account_status = 'compromised' WHERE account_status = 'active'"
                " AND account_id = (SELECT account_id FROM payments WHERE payment_id = ? AND account_status = 'active')",
                (payment_id,),
            )
            return moved.rowcount > 0
    except sqlite3.Error as error:
        raise StateError(f"`{path}` cannot be moved: {error}") from error
