"""The kernel's one durable store, as everything above it knows it. `sqlite` and `postgres` implement it.

A transaction commits whole or leaves nothing. While one is open nobody else writes: what it has read is still so when it
commits. Reading outside a transaction waits for no writer, and sees what was last committed. Every error of a database is
raised as StoreError.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from sds.kernel.errors import StoreError, UsageError
from sds.kernel.storage.keyring import Keyring

SCHEMA_VERSION = "9"
UPGRADABLE = ("1", "2", "3", "4", "5", "6", "7", "8")  # versions that only lack tables, or differ in indexes
# An older record has these indexes, a fresh one has not.
SUPERSEDED = ("DROP INDEX IF EXISTS snapshots_by_key", "DROP INDEX IF EXISTS flows_escalated")
MESSAGE_CHARS_MAX = 300
STATEMENTS_MAX = 2_048  # size of the caches by statement text

_NEWER = "run the version of this program that opened it last; to go back, see operations.md of the documentation, Going back"

_KEY = "put `kernel.key` back into the gate's folder: from a backup, readable by you alone"

_VERSION, _LOCK = re.compile("[0-9]{1,9}"), re.compile("[a-z][a-z_]{0,31}")
_WRITES = re.compile(r"\b(INSERT|UPDATE|DELETE|REPLACE|MERGE)\b", re.IGNORECASE)

Row = tuple[Any, ...]


@lru_cache(STATEMENTS_MAX)
def refuse_writing(sql: str) -> None:
    """Raise StoreError unless a statement is a SELECT. A WITH passes, too, if no word stands in it that writes."""
    text = sql.lstrip()
    if not text.startswith("SELECT") and (not text.startswith("WITH") or _WRITES.search(text)):
        raise StoreError("the store cannot be read: the statement is not a SELECT", retryable=False)


def refuse_fork(process: int) -> None:
    """Raise UsageError in another process than the one that opened a store: its connections are that one's."""
    if process != os.getpid():
        hint = "open a gate in the forked process itself"
        raise UsageError("the record was opened by another process", reason_code="FORKED", hint=hint)


def check_lock_name(name: str) -> None:
    if not _LOCK.fullmatch(name):
        raise UsageError(f"`{name}` is not a name of a lock", hint="lower-case letters and `_`")


def refuse_newer(version: object, record: str = "it") -> None:
    """Raise StoreError for a record that a newer version of this program has opened: its meaning is not known here.

    `version`: as it stands in the record, which may be damaged.
    """
    if isinstance(version, str) and _VERSION.fullmatch(version) and int(version) > int(SCHEMA_VERSION):
        said = f"{record} has schema version `{version}`, of a newer version of this program; this one needs `{SCHEMA_VERSION}`"
        raise StoreError(said, hint=_NEWER, retryable=False)


@dataclass(frozen=True, slots=True)
class Generation:
    """Which record stands at an address. `record`: the server's number for it; `began`: when the server was started;
    `timeline`: of the server's history, which a promoted standby counts up; "" where the server does not say.
    """

    record: object = None
    began: str = ""
    timeline: str = ""

    def replaced(self, before: Generation) -> bool:
        """Tell whether another server may have taken the place of the one before; False: that one may have been restarted."""
        return self != before and (self.timeline != before.timeline or not self.timeline)


class Reader(ABC):
    """Reads a record. Once it is unlocked, the texts of cases can be read, too."""

    def __init__(self, keyring: Keyring | None = None) -> None:
        self._keyring = keyring

    @property
    def locked(self) -> bool:
        return self._keyring is None

    @property
    def keyring(self) -> Keyring:
        """Return the keys that seal and open the texts of cases. Raises StoreError while the record is locked."""
        if self._keyring is None:
            raise StoreError("the texts of this record are sealed, and the kernel's key is not here", hint=_KEY)
        return self._keyring

    @property
    def generation(self) -> Generation:
        """Return a value that changes when the open record may have been replaced. A file that is open cannot be."""
        return Generation()

    def unlock(self, keyring: Keyring) -> None:
        """Take the keys that the texts of cases lie under. Keys that were given before stay."""
        self._keyring = self._keyring or keyring

    @abstractmethod
    def rows(self, sql: str, values: Row = ()) -> list[Row]:
        """Return all rows of a SELECT; values are bound in the place of `?`. Raises StoreError for any other statement."""

    def row(self, sql: str, values: Row = ()) -> Row | None:
        found = self.rows(sql, values)
        return found[0] if found else None

    def value(self, sql: str, values: Row = ()) -> Any:
        found = self.row(sql, values)
        return found[0] if found else None

    @property
    def halted(self) -> bool:
        return bool(self.value("SELECT value FROM meta WHERE key = 'halted'") != "0")

    @property
    @abstractmethod
    def schema(self) -> Mapping[str, str]:
        """Return the definition of every table, index and trigger, by name."""

    @property
    @abstractmethod
    def expected_schema(self) -> Mapping[str, str]:
        """Return what `schema` returns for a store that nobody has tampered with."""

    @abstractmethod
    def columns(self, table: str) -> tuple[str, ...]:
        """Return the names of a table's columns, in their order."""

    @abstractmethod
    def damage(self, *, quick: bool = False) -> list[str]:
        """Return what the database finds wrong with its pages and constraints, one line each. `quick`: at most one."""

    @abstractmethod
    def close(self) -> None: ...


class Witness(Protocol):
    """Signs what a store writes into its ledger: see `kernel.storage.ledger`."""

    def appended(self, store: Store, idx: int, entry_hash: str, prev_hash: str) -> None:
        """Look at an entry inside the transaction that has just written it."""
        ...

    def closing(self, store: Store) -> None:
        """Look at the ledger before the store is closed."""
        ...


class Store(Reader):
    """A store that can be written, too. Without a `witness` no entry is signed.

    A thread with an open transaction reads inside it; every other thread reads what was committed.
    """

    witness: Witness | None = None
    remains = ""  # says where a destroyed key may still be after `truncate_log` has returned False

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the store's name for messages, without a password."""

    @abstractmethod
    def transaction(
        self, first: str = "", values: Row = (), *, durable: bool = True
    ) -> AbstractContextManager[list[Row]]:
        """Hold the write lock for a block: commit when the block ends, roll back when it raises.

        Yield the rows of `first`, a SELECT, as the transaction finds them. The statement is sent along with the begin.
        Without `durable` the commit waits for no disk and no standby. Everybody sees it, and it survives this process, but
        a power cut, or a crash of the server, may undo it until a durable transaction or `flush` has followed, of anybody.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait until everything that was committed before is durable. Raises StoreError."""

    @abstractmethod
    def frozen(self) -> AbstractContextManager[Reader]:
        """Yield a reader of one moment of the store, while others go on writing."""

    @abstractmethod
    def exclusively(self, name: str) -> AbstractContextManager[bool]:
        """For a block, be the only process and thread on this store that does what `name` says. Yield True.

        Yield False at once while another does it. The lock ends with the process, too.
        """

    @abstractmethod
    def truncate_log(self) -> bool:
        """Empty the log that holds older states of the file. Return False while others read or write an older state."""

    @abstractmethod
    def run(self, sql: str, values: Row = ()) -> int:
        """Execute one statement inside this thread's transaction; return the number of rows it changed.

        Raises StoreError when this thread has no transaction open.
        """

    def write(self, sql: str, values: Row = ()) -> None:
        """Do what `run` does when nobody needs the number of rows. An error may be raised only by the next statement of the
        transaction, or by its end.
        """
        self.run(sql, values)

    def insert(self, table: str, **values: Any) -> None:
        """Insert one row, as `write` does. Raises StoreError when its key is taken."""
        columns = ", ".join(values)
        self.write(f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(values))})", tuple(values.values()))
