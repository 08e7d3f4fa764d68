"""The fraud gate's state source: a payment as it was at its own time, its account and its holds as they are now."""

from __future__ import annotations

import re
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sds.kernel.envelope.state import StateRead, Value
from sds.kernel.errors import StateError

from .holds import STATE
from .world.bank import ACCOUNT, BUSY_S, FEATURES, column

IDLE_CONNECTIONS_MAX = 64
_PAYMENT_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_NAMES = (*ACCOUNT, *FEATURES)
_READ = f"SELECT version, {', '.join(map(column, _NAMES))} FROM payments WHERE payment_id = ?"
_HOLDS = STATE.format(orders="holds.orders")

Identity = tuple[tuple[int, int], tuple[int, int]]  # of the two files: device and inode


class PaymentSource:
    """Reads payments from the bank's file and their holds from the executor's, both read-only.

    Safe in several threads: each read has a connection to itself. A version covers both files, and whether a hold has run out.
    """

    def __init__(self, bank: Path, holds: Path, now_ms: Callable[[], int]) -> None:
        self._bank, self._holds, self._now_ms = bank, holds, now_ms
        self._idle: deque[tuple[Identity, sqlite3.Connection]] = deque()

    def read(self, key: str) -> StateRead | None:
        """Return the payment's fields and version as they are now, None for an unknown payment. Raises StateError."""
        if not _PAYMENT_ID.fullmatch(key):
            return None
        try:
            with self._connection() as db:
                row = db.execute(_READ, (key,)).fetchone()
                state = db.execute(_HOLDS, {"payment_id": key, "now_ms": self._now_ms()}).fetchone()
        except (OSError, sqlite3.Error) as error:
            why = f"the payments in `{self._bank}` cannot be read: {error}"
            raise StateError(why, hint="sds run fraud --reset") from error
        return None if row is None else _state(row, *state)

    def version(self, key: str) -> str | None:
        """Return the payment's version now: the precondition the executor checks just before it acts."""
        state = self.read(key)
        return state.version if state else None

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for one read, both files as of one moment each."""
        identity = (_identity(self._bank), _identity(self._holds))
        db = self._take(identity)
        try:
            db.execute("BEGIN")
            yield db
            db.execute("COMMIT")
        except BaseException:
            db.close()
            raise
        if len(self._idle) < IDLE_CONNECTIONS_MAX:
            self._idle.append((identity, db))
        else:
            db.close()

    def _take(self, identity: Identity) -> sqlite3.Connection:
        """Reuse an idle connection, but never one to a file that has since been replaced: its state is stale."""
        while True:
            try:
                opened_as, db = self._idle.pop()
            except IndexError:
                break
            if opened_as == identity:
                return db
            db.close()
        db = sqlite3.connect(
            _read_only(self._bank), uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            db.execute("ATTACH ? AS holds", (_read_only(self._holds),))
        except BaseException:
            db.close()
            raise
        return db


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _read_only(path: Path) -> str:
    return f"{path.resolve().as_uri()}?mode=ro"


def _state(row: tuple[int | str, ...], over: int, held: int, changes: int) -> StateRead:
    fields: dict[str, Value] = dict(zip(_NAMES, row[1:], strict=True))
    fields["payment.online"] = bool(fields["payment.online"])
    fields["payment.open_minor"] = 0 if over else fields["payment.amount_minor"]
    fields["payment.held"] = bool(held)
    return StateRead(fields, f"{row[0]}.{changes}.{held}")
