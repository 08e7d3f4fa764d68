"""SQLite databases that belong to somebody else. A demo makes its own. Each read gets a connection of its own, opened
read-only, and sees the current state.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from sds.gates.worlds import ROOM
from sds.kernel.errors import StateError, cause_of
from sds.kernel.storage.private_files import make_private_file

IDLE_CONNECTIONS_MAX = 64
BUSY_S = 2.0

Identity = tuple[tuple[int, int], ...]  # device and inode of each file


class DatabaseReaders:
    """Connections that read a SQLite file, and others attached to it under their names. Safe in several threads.

    Idle connections are used again, but never after a file was replaced: they would still read the old one.
    """

    def __init__(self, path: Path, what: str, gate: str, /, **beside: Path) -> None:
        """`what` the file holds, and its `gate`: for the message where it cannot be read."""
        self._path, self._what, self._gate, self._beside = path, what, gate, beside
        self._idle: deque[tuple[Identity, sqlite3.Connection]] = deque()

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for one read that sees each file as of one moment. Raises StateError."""
        try:
            yield from self._connections()
        except OSError as error:  # from any of the files
            raise self._unreadable(error.filename, cause_of(error)) from error
        except sqlite3.Error as error:
            raise self._unreadable(self._path, str(error)) from error

    def _unreadable(self, path: object, why: str) -> StateError:
        hint = f"sds run {self._gate} --reset"
        return StateError(f"the {self._what} in `{path}` cannot be read: {why}", hint=hint)

    def _connections(self) -> Iterator[sqlite3.Connection]:
        identity = tuple(_identity(path) for path in (self._path, *self._beside.values()))
        db = self._idle_or_new(identity)
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

    def _idle_or_new(self, identity: Identity) -> sqlite3.Connection:
        while True:
            try:
                opened_as, db = self._idle.pop()
            except IndexError:
                return _connect(self._path, self._beside)
            if opened_as == identity:
                return db
            db.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()


def _connect(path: Path, beside: Mapping[str, Path]) -> sqlite3.Connection:
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


@contextmanager
def new_database(path: Path, schema: str) -> Iterator[sqlite3.Connection]:
    """Make a private file and fill it within the block. Raises StateError when it exists or cannot be written."""
    if path.exists():
        raise StateError(f"`{path}` already exists", hint="choose another file, or remove this one")
    try:
        make_private_file(path)
        with closing(sqlite3.connect(path)) as db, db:
            db.executescript(schema)
            yield db
    except (sqlite3.Error, OSError) as error:
        raise StateError(f"`{path}` cannot be written: {error}", hint=ROOM) from error


@contextmanager
def changing(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection for one transaction of the file's owner. Raises StateError."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=BUSY_S)) as db, db:
            yield db
    except sqlite3.Error as error:
        raise StateError(f"`{path}` cannot be changed: {error}") from error


def versioned(table: str, name: str) -> str:
    """Return triggers by which any change of a row raises its `version` by one, whoever writes, and no row is renamed,
    deleted or replaced: a version never comes back with other contents. A row is called `name`, and has a `{name}_id`.
    """
    return f"""
CREATE TRIGGER {name}_moves AFTER UPDATE ON {table} WHEN NEW.version <> OLD.version + 1 BEGIN
    UPDATE {table} SET version = OLD.version + 1 WHERE {name}_id = NEW.{name}_id;
END;
CREATE TRIGGER {name}_renamed BEFORE UPDATE OF {name}_id ON {table} BEGIN
    SELECT RAISE(ABORT, 'a {name} is never renamed');
END;
CREATE TRIGGER {name}_deleted BEFORE DELETE ON {table} BEGIN
    SELECT RAISE(ABORT, 'a {name} is never deleted');
END;
{never_replaced(table, name)}"""


def never_replaced(table: str, name: str) -> str:
    """Return the trigger that keeps rows of a table from being replaced."""
    return f"""CREATE TRIGGER {name}_replaced BEFORE INSERT ON {table}
WHEN EXISTS (SELECT 1 FROM {table} WHERE {name}_id = NEW.{name}_id) BEGIN
    SELECT RAISE(ABORT, 'a {name} is never replaced');
END;
"""
