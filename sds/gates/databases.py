"""Databases of somebody else, read as they are now: SQLite files, opened read-only, a connection to each reader by itself."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sds.kernel.errors import StateError, cause_of

IDLE_CONNECTIONS_MAX = 64
BUSY_S = 2.0

Identity = tuple[tuple[int, int], ...]  # of each file: device and inode


class DatabaseReaders:
    """Connections that read a SQLite file, and others beside it under names of their own. Safe in several threads.

    What is idle is used again, but never after a file was replaced by another: what it would show is past.
    """

    def __init__(self, path: Path, what: str, gate: str, /, **beside: Path) -> None:
        """`what` the file holds, and whose it is: for what is said where it cannot be read."""
        self._path, self._what, self._gate, self._beside = path, what, gate, beside
        self._idle: deque[tuple[Identity, sqlite3.Connection]] = deque()

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for one read, in which each file is as of one moment. Raises StateError."""
        try:
            yield from self._connections()
        except OSError as error:  # of any of the files
            raise self._unreadable(error.filename, cause_of(error)) from error
        except sqlite3.Error as error:
            raise self._unreadable(self._path, str(error)) from error

    def _unreadable(self, path: object, why: str) -> StateError:
        hint = f"sds run {self._gate} --reset"
        return StateError(f"the {self._what} in `{path}` cannot be read: {why}", hint=hint)

    def _connections(self) -> Iterator[sqlite3.Connection]:
        identity = tuple(_identity(path) for path in (self._path, *self._beside.values()))
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
        while True:
            try:
                opened_as, db = self._idle.pop()
            except IndexError:
                return _opened(self._path, self._beside)
            if opened_as == identity:
                return db
            db.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()


def _opened(path: Path, beside: Mapping[str, Path]) -> sqlite3.Connection:
    db = sqlite3.connect(_read_only(path), uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        for name, other in beside.items():
            db.execute(f"ATTACH ? AS {name}", (_read_only(other),))
    except BaseException:
        db.close()
        raise
    return db


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _read_only(path: Path) -> str:
    return f"{path.resolve().as_uri()}?mode=ro"
