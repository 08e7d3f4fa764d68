"""The service's own database: API keys, idempotency keys, webhooks, console sessions. It holds no decisions.

It is the file `service.db` in the home folder, or the schema `sds_service` where the records are in PostgreSQL. The
migrations beside this file make and alter its tables, under a lock, when a service or a command opens it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from sds.host.paths import make_private, service_path
from sds.kernel.errors import StoreError, UsageError, cause_of
from sds.kernel.storage.private_files import make_private_file

if TYPE_CHECKING:
    import psycopg

SCHEMA = "sds_service"
BUSY_MS = 5_000
CONNECT_S = 3
POOL_MAX = 8
# Whatever a role or database sets: what was waited for is seen, and everything may be written.
_WRITES = "SET default_transaction_isolation = 'read committed'; SET default_transaction_read_only = off"
_MIGRATION_LOCK = 0x5D5_5E41
_FULL = frozenset({"SQLITE_FULL", "SQLITE_IOERR_SHMSIZE", "53100"})  # SQLite's and PostgreSQL's codes for a full disk

metadata = sa.MetaData()
api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("digest", sa.Text, primary_key=True),  # SHA-256 of the key, 64 hex digits
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("roles", sa.Text, nullable=False),  # separated by commas
    sa.Column("gates", sa.Text, nullable=False),  # separated by commas; `*` is all
    sa.Column("made_at_ms", sa.BigInteger, nullable=False),
    sa.Column("revoked_at_ms", sa.BigInteger),
)
idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("caller", sa.Text, primary_key=True),
    sa.Column("gate", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("fingerprint", sa.Text, nullable=False),  # the record's keyed hash of the event
    sa.Column("event_id", sa.Text, nullable=False),
    sa.Column("dfid", sa.Text),
    sa.Column("status", sa.Integer),  # NULL until there is an answer, as are dfid and body
    sa.Column("body", sa.LargeBinary),
    sa.Column("made_at_ms", sa.BigInteger, nullable=False),
)
webhooks = sa.Table(
    "webhooks",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("secret", sa.Text, nullable=False),
    sa.Column("gates", sa.Text, nullable=False),
    sa.Column("made_at_ms", sa.BigInteger, nullable=False),
)
webhook_positions = sa.Table(  # how far each endpoint has received a gate's ledger, and the state of its next delivery
    "webhook_positions",
    metadata,
    sa.Column("webhook", sa.Text, primary_key=True),
    sa.Column("gate", sa.Text, primary_key=True),
    sa.Column("idx", sa.BigInteger, nullable=False),  # of the last entry that was delivered or skipped
    sa.Column("entry_hash", sa.Text, nullable=False),  # of that entry; "" where idx is 0
    sa.Column("at_ms", sa.BigInteger, nullable=False),  # of that entry
    sa.Column("attempts", sa.Integer, nullable=False),  # failed attempts at the next delivery
    sa.Column("next_at_ms", sa.BigInteger, nullable=False),
    sa.Column("failing_since_ms", sa.BigInteger),
    sa.Column("failure", sa.Text),
)
sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("digest", sa.Text, primary_key=True),  # SHA-256 of the cookie
    sa.Column("key_digest", sa.Text, nullable=False),
    sa.Column("csrf", sa.Text, nullable=False),
    sa.Column("made_at_ms", sa.BigInteger, nullable=False),
    sa.Column("seen_at_ms", sa.BigInteger, nullable=False),
)
taken = sa.Table(
    "taken",
    metadata,
    sa.Column("gate", sa.Text, primary_key=True),
    sa.Column("dfid", sa.Text, primary_key=True),
    sa.Column("key_digest", sa.Text, nullable=False),
    sa.Column("who", sa.Text, nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
)


class Prepared:
    """One statement of a database, compiled once; each execution is a transaction. It avoids SQLAlchemy's work for each
    execution, which takes ten times as long as the database. Thread-safe.
    """

    def __init__(self, engine: sa.Engine, statement: sa.ClauseElement) -> None:
        compiled: Any = statement.compile(engine)
        self._engine, self._sql, self._given = engine, str(compiled), compiled.params
        self._order: list[str] | None = compiled.positiontup

    def __call__(self, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """Execute the statement with the values of its `bindparam`s; return its rows. Raises StoreError."""
        named = {**self._given, **values}
        with _refused(), self._named(), closing(self._engine.raw_connection()) as connection:
            cursor = connection.cursor()
            cursor.execute(self._sql, named if self._order is None else [named[name] for name in self._order])
            rows = cursor.fetchall() if cursor.description else []
            connection.commit()
        return list(rows)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Raise the driver's own errors, also those of connecting, as SQLAlchemy's."""
        driver = self._engine.dialect.loaded_dbapi
        try:
            yield
        except driver.OperationalError as error:
            raise OperationalError(None, None, error) from error
        except driver.Error as error:
            raise DBAPIError(None, None, error) from error


class Database:
    """The service's tables in one database. Every error of the database is raised as StoreError. Thread-safe."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self.is_postgresql = engine.dialect.name == "postgresql"

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Hold a writing transaction for a block: committed when it ends, rolled back when it raises."""
        with _refused(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Hold a reading transaction for a block; it does not wait for writers."""
        with _refused(), self._engine.connect().execution_options(sds_reads=True) as connection:
            yield connection

    def prepared(self, statement: sa.ClauseElement) -> Prepared:
        """Return a statement that is compiled once and executed many times."""
        return Prepared(self._engine, statement)

    def empty_log(self) -> bool:
        """Empty SQLite's write-ahead log of older bytes; return whether it is empty. PostgreSQL vacuums by itself."""
        if self.is_postgresql:
            return True
        with _refused(), closing(self._engine.raw_connection()) as connection:
            cursor = connection.cursor()
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            ((busy, *_),) = cursor.fetchall()
            return not busy

    def insert(self, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
        """Return an INSERT of the database's dialect, which takes `on_conflict_do_update`."""
        return postgresql.insert(table) if self.is_postgresql else sqlite.insert(table)

    def migrate(self) -> None:
        """Make the tables or bring them up to date, one process at a time. Raises StoreError: a newer version made them."""
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
        with self.transaction() as connection:
            if self.is_postgresql:
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
                if not sa.inspect(connection).has_schema(SCHEMA):  # IF NOT EXISTS would need the right to make one
                    connection.execute(sa.schema.CreateSchema(SCHEMA))
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                hint = "run the version of sds that made it, or restore a backup of it"
                raise StoreError("the service's database is of a newer version", hint=hint, retryable=False) from error

    def close(self) -> None:
        self._engine.dispose()


_MEND = "check that the database runs, that its address, user and password are right, and that its disk has room"
_MEND_FILE = (
    "check that `service.db` in $SDS_HOME and its folder can be written by this user, and that the disk has room"
)


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        is_file = isinstance(error, DBAPIError) and isinstance(error.orig, sqlite3.Error)
        raise StoreError(_why(error), hint=_MEND_FILE if is_file else _MEND) from error


def _why(error: SQLAlchemyError) -> str:
    """Return why a database failed, without values, addresses or passwords: its own code, or the error's class."""
    cause: Any = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorname", None) or getattr(cause, "sqlstate", None)
    if code is None and isinstance(error, OperationalError):
        return "the service cannot connect to its database"
    return f"the service's database failed: {'its disk is full' if code in _FULL else code or type(cause).__name__}"


def open_database(url: str = "", *, durable: bool = False) -> Database:
    """Open the service's database and bring its tables up to date. `url`: `postgresql://...`; "": the file in the home.

    `durable`: commits survive a power cut. Without it SQLite may lose the last second, which suffices for kept answers: the
    record has the decisions. Raises StoreError, and UsageError for a URL that cannot be used.
    """
    engine = _postgresql(url) if url else _sqlite(service_path(), durable=durable)
    database = Database(engine)
    try:
        database.migrate()
    except BaseException:
        database.close()
        raise
    return database


def _postgresql(url: str) -> sa.Engine:
    from sds.kernel.storage.postgres.connections import SETTINGS, STOPPED_S, Url  # noqa: PLC0415  a file needs no driver

    if not url.startswith(("postgresql://", "postgres://")):
        raise UsageError("the store must be a `postgresql://` URL", hint="give it as postgresql://USER@HOST/DATABASE")
    stopped_ms = 1_000 * STOPPED_S
    options = {"search_path": SCHEMA, "lock_timeout": BUSY_MS, "idle_in_transaction_session_timeout": stopped_ms}
    given = " ".join(f"-c {name}={value}" for name, value in options.items())
    how = {**Url(url).parameters, "connect_timeout": CONNECT_S, "options": given}  # read as the records' store reads it
    engine = sa.create_engine(
        "postgresql+psycopg://",
        connect_args=how,
        pool_size=POOL_MAX,
        max_overflow=0,
        pool_timeout=CONNECT_S,
        pool_pre_ping=True,
        hide_parameters=True,
    )

    @sa.event.listens_for(engine, "connect")
    def prepared(connection: psycopg.Connection[Any], _: object) -> None:
        connection.execute(f"{SETTINGS}; {_WRITES}", prepare=False)
        connection.commit()

    return engine


def _sqlite(path: Path, *, durable: bool) -> sa.Engine:
    make_private(path.parent)
    try:
        make_private_file(path)
    except OSError as error:
        raise StoreError(f"`{path}` cannot be used: {cause_of(error)}") from error
    engine = sa.create_engine(
        f"sqlite:///{path}",
        connect_args={"timeout": BUSY_MS / 1000},
        pool_size=POOL_MAX,
        max_overflow=0,
        pool_timeout=CONNECT_S,
        hide_parameters=True,
    )

    @sa.event.listens_for(engine, "connect")
    def prepared(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # `begun` below begins transactions
        for pragma in ("journal_mode=WAL", f"synchronous={'FULL' if durable else 'NORMAL'}", "secure_delete=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begun(connection: sa.Connection) -> None:
        reads = connection.get_execution_options().get("sds_reads")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine
