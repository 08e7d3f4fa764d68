"""Connections to one record: how they are set up, and the pool that keeps them."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import psycopg
from psycopg.adapt import Dumper, Loader
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from sds.kernel.errors import StoreError, UsageError
from sds.kernel.storage.postgres import schema as schemas
from sds.kernel.storage.postgres.errors import REFUSED, RIGHTS, is_lost, mend, refused, said
from sds.kernel.storage.postgres.pipelined import Connection
from sds.kernel.storage.store import Generation, refuse_fork

# A transaction must see everything that was committed before it got its lock, whatever a server, role or URL sets.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
NOT_DURABLE = "SET LOCAL synchronous_commit = off"
FLUSH = "SELECT pg_logical_emit_message(true, 'sds', '')"  # its commit is logged, and therefore waited for
# A host that vanished is noticed within seconds, unless the URL says otherwise (libpq's names; milliseconds, then seconds).
ALIVE = {"tcp_user_timeout": "10000", "keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3"}

# What a role, database or URL may set, and what would change what statements mean, show or keep. Row security: rows that a
# policy hides are an error instead.
_MEANING = (
    "SET standard_conforming_strings = on; SET quote_all_identifiers = off;"
    " SET row_security = off; SET bytea_output = 'hex'"
)
_DURABLY = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') IN ('off', 'local')"
SETTINGS = f"{_MEANING}; {_DURABLY}"
# The kernel's statements find rows by keys, so they have one good plan whatever the values are. Left to choose, the server
# plans joins of a dozen tables anew for every decision, which takes longer than executing them.
_ONE_PLAN = "SET plan_cache_mode = force_generic_plan"
# No statement is compiled: of a record that was never analysed the server expects so many rows that it would compile each of
# its statements anew, which takes a hundred times as long as executing it. None runs in parallel: the functions catch
# errors (`json_valid`), which no parallel worker may.
_PLAINLY = "SET jit = off; SET max_parallel_workers_per_gather = 0"
# Of a transaction that may take long: PostgreSQL 17 and newer know the second limit.
UNHURRIED = (
    "SET LOCAL statement_timeout = 0; SELECT set_config('transaction_timeout', '0', true)"
    " WHERE current_setting('transaction_timeout', true) IS NOT NULL"
)
# By name: what a server or role has to have set, and the mend.
_NEEDED = {
    "fsync": ("on", "the server does not wait for its disk", "set fsync to on"),
    "full_page_writes": ("on", "the server does not wait for its disk", "set full_page_writes to on"),
    "zero_damaged_pages": ("off", "the server empties pages that are damaged", "set zero_damaged_pages to off"),
    "session_replication_role": (
        "origin",
        "the triggers of the record are skipped",
        "ALTER ROLE ... RESET session_replication_role",
    ),
    "server_encoding": ("UTF8", "the database is not in UTF8", "createdb --encoding UTF8 --template template0"),
}

# Which cluster, and which history of it: two clusters may both be on their first timeline.
_TIMELINE = "SELECT system_identifier::text || '/' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) FROM pg_control_system()"

VERSION_MIN = 150_000
CONNECTIONS_MAX = 12  # of one store in one process; `WRITERS_MAX` of them may write
WAIT_S = 5.0  # for a connection, and for the record's lock
CONNECT_S = 5
STOPPED_S = 30  # how long a process may stop in the middle of a transaction, which holds up all others
LOST_MAX = 3  # how often a statement that begins something is tried, each time on another connection
# What no name holds, and what a misread password or a `;password=` leaves in one
_NEVER = {"user": ":;=", "host": ";=", "dbname": ":;="}
_PORT = re.compile("[0-9]{0,5}")
_SECRET = ("password", "sslpassword")
_A_PASSWORD = re.compile(r"(?i)(password|passwd|pwd)\s*=")
_ENCODED = "encode the password (`@` is %40, `/` %2F, `:` %3A, `?` %3F), or better put it into PGPASSWORD or ~/.pgpass"
_DIRECTLY = f"name the server itself: each process pools its own connections, {CONNECTIONS_MAX} a record at most"

# psycopg's log is dropped: a caller of a pool that cannot connect gets an error.
logging.getLogger("psycopg").addHandler(logging.NullHandler())


class Url:
    """The address of a server and database. Its `name` and its repr show no password, and no message of libpq does.

    Raises UsageError where a part of a password may have been read as something else: as a host, a port, a name.
    """

    def __init__(self, text: str) -> None:
        try:
            said = conninfo_to_dict(text, connect_timeout=CONNECT_S)
        except psycopg.Error:  # its message quotes what it could not read, which may be the password
            raise UsageError("the URL of the store cannot be read", hint="postgresql://USER@HOST/DATABASE") from None
        if _is_torn(text, said):
            raise UsageError("the URL of the store cannot be read", hint=_ENCODED)
        self.parameters: dict[str, Any] = {**ALIVE, **said}  # libpq's
        self.conninfo = make_conninfo("", **self.parameters)
        place = f"{said.get('host', '')}" + (f":{said['port']}" if "port" in said else "")
        self.name = f"postgresql://{place}/{said.get('dbname', '')}"

    def __repr__(self) -> str:
        return f"Url({self.name})"


def _is_torn(text: str, said: Mapping[str, Any]) -> bool:
    """Tell whether a password may have been torn where it should have been encoded, or stands where none belongs.

    libpq takes a user and a password only from before an `@` that comes before the first `/`.
    """
    given = text.partition("://")[2]
    user, found, rest = given.partition("@")
    after = rest if found and "/" not in user else given
    return (
        "@" in after.partition("?")[0]
        or not all(_PORT.fullmatch(port) and int(port or 0) < 1 << 16 for port in str(said.get("port", "")).split(","))
        or any(mark in str(said.get(name, "")) for name, marks in _NEVER.items() for mark in marks)
        or any(_A_PASSWORD.search(str(value)) for name, value in said.items() if name not in _SECRET)
    )


class _Whole(Loader):
    """Loads NUMERIC, a number of any size, as an int where it is a whole one."""

    def load(self, data: Any) -> int | float:
        text = bytes(data).decode()
        return float(text) if "." in text or "N" in text or "I" in text else int(text)


class _Truth(Loader):
    """Loads a truth value as 0 or 1, as SQLite has it."""

    def load(self, data: Any) -> int:
        return int(bytes(data) == b"t")


class _Bit(Dumper):
    oid = 20  # int8

    def dump(self, obj: bool) -> bytes:
        return b"1" if obj else b"0"


def set_up(db: Connection, schema: str, *, only_reads: bool = False) -> None:
    """Set a connection up for a record: number types, schema, time limits, and commits that wait for the disk.

    `only_reads`: it writes nothing but in a transaction that says that it writes (`BEGIN`). Raises UsageError for a server that
    would not keep the record, and when a pooler such as PgBouncer answers: it may run each transaction on a server
    connection that is set up for another record.
    """
    _check_server(db)
    allowed = db.execute(
        "SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = %s", (schema,)
    ).fetchone()
    if allowed is not None and not allowed[0]:  # to whom the schema looks empty
        raise UsageError(f"the store's user may not use the schema `{schema}`", hint=RIGHTS)
    if db.execute("SELECT pg_backend_pid()", prepare=False).fetchone() != (db.info.backend_pid,):
        raise UsageError("a connection pooler answers, not PostgreSQL itself", hint=_DIRECTLY)
    db.adapters.register_loader("numeric", _Whole)
    db.adapters.register_loader("bool", _Truth)
    db.adapters.register_dumper(bool, _Bit)
    db.execute(
        f"SET search_path = {schema}; SET application_name = '{schema}'; SET lock_timeout = '{int(WAIT_S)}s';"
        f" SET idle_in_transaction_session_timeout = '{STOPPED_S}s'; {SETTINGS}; {_ONE_PLAN}; {_PLAINLY};"
        " SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"
        f"{'; SET default_transaction_read_only = on' if only_reads else ''}",
        prepare=False,
    )


def _set_up_for_writing(db: Connection, schema: str, lost: deque[Connection]) -> None:
    """Set a connection up and note its server. Raises StoreError for a standby: once promoted, it would count as another
    server on the same connection.
    """
    set_up(db, schema, only_reads=True)
    schemas.refuse_losing(db, schema)
    began, standby = db.execute("SELECT pg_postmaster_start_time()::text, pg_is_in_recovery()").fetchone() or ("", True)
    if standby:
        raise StoreError("the server is a standby", hint="name the primary: this server only reads")
    timeline = ""
    with suppress(psycopg.DatabaseError):  # some services that speak PostgreSQL's protocol have no log files
        row = db.execute(_TIMELINE).fetchone()
        timeline = str(row[0]) if row else ""
    db.server, db.lost = Generation(began=began, timeline=timeline), lost


def connected(url: Url, schema: str, *, only_reads: bool = False) -> Connection:
    """Return a connection outside the pool. Raises StoreError."""
    try:
        db = Connection.connect(url.conninfo, autocommit=True)
        try:
            set_up(db, schema, only_reads=only_reads)
        except BaseException:
            db.close()
            raise
    except REFUSED as error:  # a server may also stop in between
        raise StoreError(
            f"`{url.name}` cannot be opened as a decision store: {said(error)}", hint=mend(error)
        ) from error
    return db


def _check_server(db: Connection) -> None:
    """Raise UsageError for a server on which a record would not be durable, whole, or in UTF-8."""
    if db.info.server_version < VERSION_MIN:
        raise UsageError(f"PostgreSQL {db.info.server_version // 10_000} is too old: version 15 or newer is needed")
    asked = ", ".join(f"current_setting('{name}')" for name in _NEEDED)
    found = db.execute(f"SELECT {asked}", prepare=False).fetchone() or ()
    for (needed, why, hint), value in zip(_NEEDED.values(), found, strict=True):
        if value != needed:
            raise UsageError(f"{why}: `{value}`", hint=hint)


class Pool:
    """Connections that are set up, each used by one thread at a time. One that died is replaced."""

    def __init__(self, url: Url, schema: str) -> None:
        self._url, self._lock, self._process = url, threading.RLock(), os.getpid()
        self._lost = lost = deque[Connection]()
        self._pool: ConnectionPool[Connection] = ConnectionPool(
            url.conninfo,
            connection_class=Connection,
            kwargs={"autocommit": True},
            configure=lambda db: _set_up_for_writing(db, schema, lost),
            min_size=1,
            max_size=CONNECTIONS_MAX,
            num_workers=1,
            timeout=WAIT_S,
            reconnect_timeout=WAIT_S,  # the pauses double; after this time it gives up ...
            reconnect_failed=lambda pool: pool.check(),  # ... and begins anew
            open=True,
        )

    def take(self) -> Connection:
        refuse_fork(self._process)
        self._replace_lost()
        try:
            return self._pool.getconn()
        except PoolTimeout as error:
            hint = "check that PostgreSQL is running; the next call tries again"
            raise StoreError(f"`{self._url.name}` gives no connection within {WAIT_S:.0f} s", hint=hint) from error
        except PoolClosed as error:
            raise StoreError("the store cannot be read: it is closed") from error

    def _replace_lost(self) -> None:
        """Replace connections that an interrupt has lost. An interrupt in the middle of it leaves it to the next call."""
        with self._lock:
            while self._lost:
                if self._lost[0].checked_out:
                    self.give_back(self._lost[0])
                self._lost.popleft()

    def give_back(self, db: Connection) -> None:
        self._pool.putconn(db)
        if db.closed:
            db.forget_pool()

    def begun(self, begin: Callable[[Connection], Any], what: str) -> tuple[Connection, Any]:
        """Return a connection, and what `begin` returned on it. When the connection had died before, another one is tried.

        `begin` must change nothing, since nobody knows whether it was done. The caller gives the connection back.
        """
        for left in reversed(range(LOST_MAX)):
            db = self.take()
            try:
                return db, begin(db)
            except REFUSED as error:
                lost = is_lost(error) and db.closed
                self._abandon(db)
                if not lost or not left:
                    raise refused(error, what) from error
                self._pool.check()  # if one is dead, the others may be, too
            except BaseException:
                self._abandon(db)
                raise
        raise AssertionError("unreachable")

    def _abandon(self, db: Connection) -> None:
        """End any transaction on a connection where something was refused, and give the connection back."""
        with suppress(psycopg.Error):
            if not db.closed and db.info.transaction_status != TransactionStatus.IDLE:
                db.execute("ROLLBACK", prepare=False)
        self.give_back(db)

    def close(self) -> None:
        self._pool.close()
