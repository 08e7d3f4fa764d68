"""A record in PostgreSQL: a schema of its own, in a database that may hold others.

Every writing transaction first takes the record's one advisory lock, and so sees everything that was committed before: one
writes at a time, as in SQLite. A process that stops while it holds the lock is cut off after a while.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import ref

import psycopg

from sds.kernel.errors import StoreError, UsageError
from sds.kernel.storage.keyring import Keyring
from sds.kernel.storage.postgres import schema as schemas
from sds.kernel.storage.postgres.connections import BEGIN, FLUSH, NOT_DURABLE, UNHURRIED, Pool, Url, connected
from sds.kernel.storage.postgres.errors import NO_READ, NO_WRITE, REFUSED, mend, refused, said
from sds.kernel.storage.postgres.pipelined import Connection
from sds.kernel.storage.postgres.transaction import Transaction
from sds.kernel.storage.store import (
    SCHEMA_VERSION,
    SUPERSEDED,
    UPGRADABLE,
    Generation,
    Reader,
    Row,
    Store,
    Witness,
    check_lock_name,
    refuse_newer,
    refuse_writing,
)

WRITERS_MAX = 8  # threads of one process that wait for the record's lock at once; the other connections are for reading
TURN_S = 60.0  # how long a thread waits for its turn to wait for that lock
_SCHEMA = re.compile("[a-z][a-z0-9_]{0,62}")
_MOMENT = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY NOT DEFERRABLE; SET LOCAL idle_in_transaction_session_timeout = 0;"
    f" {UNHURRIED}"
)


class _CatalogueReader(Reader):
    """Reads the catalogue over one connection."""

    _url: Url
    _schema_name: str

    def _on_connection(self, ask: Callable[[Connection], Any]) -> Any:
        raise NotImplementedError

    @property
    def schema(self) -> dict[str, str]:
        found: dict[str, str] = self._on_connection(lambda db: schemas.catalogue(db, self._schema_name))
        return found

    def columns(self, table: str) -> tuple[str, ...]:
        sql = "SELECT attname FROM pg_attribute WHERE attrelid = ?::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
        return tuple(row[0] for row in self.rows(sql, (table,)))

    def damage(self, *, quick: bool = False) -> list[str]:  # noqa: ARG002  it is always quick
        """Return which constraints are switched off. The server itself looks after its pages."""
        found: list[str] = self._on_connection(lambda db: schemas.switched_off(db, self._schema_name))
        return found

    @property
    def expected_schema(self) -> Mapping[str, str]:
        """Return what `schema` should be. Raises UsageError when the user may not make a schema to compare."""
        db = connected(self._url, self._schema_name)
        try:
            return schemas.expected(db)
        except psycopg.errors.InsufficientPrivilege as error:
            message = "this user cannot verify the record: it may make no schema to compare with"
            raise UsageError(message, hint="GRANT CREATE ON DATABASE ... TO ...") from error
        except psycopg.Error as error:
            raise refused(error, "its schema cannot be compared with a fresh one") from error
        finally:
            db.close()


class PostgresReader(_CatalogueReader):
    """Reads one moment of a record, in the one transaction of a connection."""

    def __init__(self, db: Connection, url: Url, schema: str, keyring: Keyring | None = None) -> None:
        super().__init__(keyring)
        self._db, self._url, self._schema_name, self._lock = db, url, schema, threading.RLock()

    def rows(self, sql: str, values: Row = ()) -> list[Row]:
        refuse_writing(sql)
        found: list[Row] = self._on_connection(lambda db: db.together((sql, values)).rows)
        return found

    def _on_connection(self, ask: Callable[[Connection], Any]) -> Any:
        with self._lock:
            try:
                return ask(self._db)
            except REFUSED as error:
                raise refused(error, NO_READ) from error

    def close(self) -> None:
        with self._lock:
            self._db.close()


def look_at(url: str, schema: str) -> PostgresReader | None:
    """Open a record to read it as it is: nothing is created or added. None: there is no such schema. Raises StoreError."""
    address = Url(url)
    db = connected(address, schema, only_reads=True)
    reader = PostgresReader(db, address, schema)
    try:
        if reader.value("SELECT to_regnamespace(?) IS NOT NULL", (schema,)):
            return reader
    except StoreError:
        reader.close()
        raise
    reader.close()
    return None


def records_in(url: str, prefix: str) -> list[str]:
    """Return the schemas of a database that begin with `prefix` and hold a record. Raises StoreError."""
    db = connected(Url(url), "pg_catalog", only_reads=True)
    try:
        found = db.execute(
            "SELECT n.nspname FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'ledger'"
            " WHERE starts_with(n.nspname, %s) ORDER BY 1",
            (prefix,),
        )
        return [str(row[0]) for row in found.fetchall()]
    except psycopg.Error as error:
        raise refused(error, NO_READ) from error
    finally:
        db.close()


class _Turn:
    """A turn to write. One that an interrupt keeps from being given back is replaced once nobody holds it."""

    def __init__(self, turns: SimpleQueue[_Turn]) -> None:
        self._turns = ref(turns)

    def __del__(self) -> None:
        if (turns := self._turns()) is not None:
            turns.put(type(self)(turns))


class PostgresStore(_CatalogueReader, Store):
    """The record `schema` of a database. `url`: libpq's, `postgresql://...`; its password is never shown."""

    remains = "the destroyed key may remain in the server's free space, write-ahead log and archives until they are overwritten"

    def __init__(self, url: str, schema: str, *, witness: Witness | None = None) -> None:
        super().__init__()
        if not _SCHEMA.fullmatch(schema):
            raise UsageError(f"`{schema}` is not a name of a schema")
        self._url, self._schema_name, self.witness = Url(url), schema, witness
        self._lock_number = schemas.lock_number(schema)
        self._number = f"to_regnamespace('{schema}')::oid"  # another once the schema was made anew
        self._lock = f"SELECT pg_advisory_xact_lock({self._lock_number}), {self._number}"
        self._own = threading.local()
        self._turns = SimpleQueue[_Turn]()
        for _ in range(WRITERS_MAX):
            self._turns.put(_Turn(self._turns))
        self._prepare()
        self._pool = Pool(self._url, schema)

    @property
    def name(self) -> str:
        return f"{self._url.name}, schema {self._schema_name}"

    @property
    def generation(self) -> Generation:
        """Return which record this is; inside this thread's transaction: the one that the transaction writes."""
        if (own := self._transaction_of_thread()) is not None:
            return own.generation
        found: Generation = self._on_connection(
            lambda db: replace(db.server, record=db.together((f"SELECT {self._number}", ())).rows[0][0])
        )
        return found

    def _prepare(self) -> None:
        """Make the record, or add what an older version's lacks. Raises StoreError."""
        db = connected(self._url, self._schema_name)
        try:
            db.execute(f"{BEGIN}; {self._lock}; {UNHURRIED}", prepare=False)
            self._make_or_upgrade(db)
            schemas.refuse_losing(db, self._schema_name)
            db.execute("COMMIT", prepare=False)
        except (*REFUSED, StoreError) as error:
            message = f"`{self.name}` cannot be opened as a decision store:"
            if isinstance(error, StoreError):
                raise StoreError(f"{message} {error}", hint=error.hint, retryable=error.retryable) from error
            raise StoreError(f"{message} {said(error)}", hint=mend(error)) from error
        finally:
            db.close()

    def _make_or_upgrade(self, db: Connection) -> None:
        """Make the record, or upgrade an older one. Raises StoreError for another program's schema or a newer record."""
        there = db.execute("SELECT to_regnamespace(%s) IS NOT NULL", (self._schema_name,)).fetchone()
        if there is None or not there[0]:
            schemas.create(db, self._schema_name)
            return
        found = schemas.catalogue(db, self._schema_name)
        if not found:  # made beforehand, for a user that may not make one
            schemas.fill(db, self._schema_name)
            return
        if not {"meta", "ledger"} <= found.keys():
            raise StoreError("it is the schema of another program", hint="name another database, or rename that schema")
        version = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        if version is not None and version[0] in UPGRADABLE:
            schemas.complete(db, self._schema_name, found)
            for statement in SUPERSEDED:
                db.execute(statement)
            db.execute("UPDATE meta SET value = %s WHERE key = 'schema_version'", (SCHEMA_VERSION,))
        elif version is None or version[0] != SCHEMA_VERSION:
            had = version[0] if version else None
            refuse_newer(had)
            raise StoreError(f"it has schema version `{had}`, but this program needs `{SCHEMA_VERSION}`")

    def close(self) -> None:
        if self.witness is not None:
            self.witness.closing(self)
        self._pool.close()

    def rows(self, sql: str, values: Row = ()) -> list[Row]:
        """Return all rows of a SELECT: inside this thread's transaction, else as last committed."""
        refuse_writing(sql)
        if (own := self._transaction_of_thread()) is not None:
            return own.done(sql, values, NO_READ).rows
        found: list[Row] = self._on_connection(lambda db: db.together((sql, values)).rows)
        return found

    def _on_connection(self, ask: Callable[[Connection], Any]) -> Any:
        if (own := self._transaction_of_thread()) is not None:
            return own.ask(ask, NO_READ)
        db, found = self._pool.begun(ask, NO_READ)
        self._pool.give_back(db)
        return found

    def _transaction_of_thread(self) -> Transaction | None:
        own: Callable[[], Transaction | None] | None = getattr(self._own, "transaction", None)
        return own() if own is not None else None

    @contextmanager
    def transaction(self, first: str = "", values: Row = (), *, durable: bool = True) -> Iterator[list[Row]]:
        if self._transaction_of_thread() is not None:
            raise StoreError(f"{NO_WRITE}: cannot start a transaction within a transaction")
        try:
            turn = self._turns.get(timeout=TURN_S)
        except Empty:
            raise StoreError(f"{NO_WRITE}: too many threads wait to write") from None
        try:
            begin = partial(self._begin, first=first, values=values, durable=durable)
            db, (generation, found) = self._pool.begun(begin, NO_WRITE)
            own = Transaction(db, generation)
            try:
                self._own.transaction = ref(own)  # one that an interrupt keeps from being ended ends with its block
                yield found
                own.commit()
            except BaseException:
                own.roll_back()
                raise
            finally:
                self._own.transaction = None
                self._pool.give_back(db)
        finally:
            self._turns.put(turn)

    def _begin(self, db: Connection, first: str, values: Row, *, durable: bool) -> tuple[Generation, list[Row]]:
        """Begin a transaction, take the record's lock, and read `first`, in one round trip."""
        if first:
            refuse_writing(first)
        begin = [BEGIN] if durable else [BEGIN, NOT_DURABLE]
        done = db.each(*((each, ()) for each in (*begin, self._lock)), *([(first, values)] if first else ()))
        locked = next(each.rows for each in done if each.rows)
        return replace(db.server, record=locked[0][1]), done[-1].rows if first else []

    def flush(self) -> None:
        """Commit what changes nothing, durably: the server's log is written in its order, so all before it is, too."""
        db, _ = self._pool.begun(lambda db: db.together((BEGIN, ()), (FLUSH, ())), NO_WRITE)
        try:
            Transaction(db, db.server).commit()
        finally:
            self._pool.give_back(db)

    @contextmanager
    def frozen(self) -> Iterator[Reader]:
        db, _ = self._pool.begun(lambda db: db.execute(_MOMENT, prepare=False), NO_READ)
        try:
            yield PostgresReader(db, self._url, self._schema_name, self._keyring)
        finally:
            Transaction(db, db.server).roll_back()
            self._pool.give_back(db)

    @contextmanager
    def exclusively(self, name: str) -> Iterator[bool]:
        """Lock over another connection. The lock ends with that connection, whatever becomes of the process."""
        check_lock_name(name)
        db = connected(self._url, self._schema_name)
        try:
            number = schemas.lock_number(f"{self._schema_name} {name}")
            db.execute("SET idle_session_timeout = 0", prepare=False)
            got = db.execute("SELECT pg_try_advisory_lock(%s)", (number,)).fetchone()
            yield bool(got and got[0])
        except psycopg.Error as error:
            raise refused(error, NO_WRITE) from error
        finally:
            db.close()

    def truncate_log(self) -> bool:
        """Return False: older states of rows stay in the server's files until it vacuums, and longer in its log."""
        return False

    def run(self, sql: str, values: Row = ()) -> int:
        return self._within().done(sql, values, NO_WRITE).changed

    def write(self, sql: str, values: Row = ()) -> None:
        self._within().waiting.append((sql, values))

    def _within(self) -> Transaction:
        own = self._transaction_of_thread()
        if own is None:
            raise StoreError(f"{NO_WRITE}: there is no transaction")
        return own
