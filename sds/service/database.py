"""What is the service's own, and no decision: keys of callers, idempotency, webhooks, sessions of the console.

A file `service.db` in the home, or the schema `sds_service` where the records lie in PostgreSQL. Its tables are made and
altered by the migrations beside this file, under a lock, when a service or a command opens it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from sds.host.paths import make_private, service_path
from sds.kernel.errors import StoreError, UsageError, cause_of
from sds.kernel.storage.private_files import make_private_file

SCHEMA = "sds_service"
BUSY_MS = 5_000
CONNECT_S = 3
POOL_MAX = 8
_MIGRATION_LOCK = 0x5D5_5E41
_FULL = frozenset({"SQLITE_FULL", "53100"})  # a disk that is full, as each of them says it

metadata = sa.MetaData()
api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("digest", sa.Text, primary_key=True),  # SHA-256 of the key, 64 hex digits
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("roles", sa.Text, nullable=False),  # comma between
    sa.Column("gates", sa.Text, nullable=False),  # comma between; `*` is all
    sa.Column("made_at_ms", sa.BigInteger, nullable=False),
    sa.Column("revoked_at_ms", sa.BigInteger),
)
idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("caller", sa.Text, primary_key=True),
    sa.Column("gate", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("fingerprint", sa.Text, nullable=False),  # keyed hash of the event, as the record recognises it
    sa.Column("event_id", sa.Text, nullable=False),
    sa.Column("dfid", sa.Text),
    sa.Column("status", sa.Integer),  # with body: NULL until there is an answer
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
webhook_positions = sa.Table(  # how far each endpoint has a gate's ledger, and how the next delivery goes
    "webhook_positions",
    metadata,
    sa.Column("webhook", sa.Text, primary_key=True),
    sa.Column("gate", sa.Text, primary_key=True),
    sa.Column("idx", sa.BigInteger, nullable=False),  # of the last entry that is behind it
    sa.Column("entry_hash", sa.Text, nullable=False),  # of that entry; "": of none
    sa.Column("at_ms", sa.BigInteger, nullable=False),  # of that entry
    sa.Column("attempts", sa.Integer, nullable=False),  # at the next delivery, in vain
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
    """One statement of a database, compiled once; it is a transaction of its own. What SQLAlchemy does for each execution
    takes ten times what the database does, and is not done. Safe in several threads.
    """

    def __init__(self, engine: sa.Engine, statement: sa.ClauseElement) -> None:
        compiled: Any = statement.compile(engine)
        self._engine, self._sql, self._given = engine, str(compiled), compiled.params
        self._order: list[str] | None = compiled.positiontup

    def __call__(self, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """Execute it with the values of its `bindparam`s; return its rows. Raises StoreError."""
        named = {**self._given, **values}
        with _refused(), self._named(), closing(self._engine.raw_connection()) as connection:
            cursor = connection.cursor()
            cursor.execute(self._sql, named if self._order is None else [named[name] for name in self._order])
            rows = cursor.fetchall() if cursor.description else []
            connection.commit()
        return list(rows)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Raise as SQLAlchemy's error what the driver raises by itself, while it connects, too."""
        driver = self._engine.dialect.loaded_dbapi
        try:
            yield
        except driver.OperationalError as error:
            raise OperationalError(None, None, error) from error
        except driver.Error as error:
            raise DBAPIError(None, None, error) from error


class Database:
    """Tables of the service in one database; whatever it refuses arrives as StoreError. Safe in several threads."""

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
        """Read for a block, behind nobody who writes."""
        with _refused(), self._engine.connect().execution_options(sds_reads=True) as connection:
            yield connection

    def prepared(self, statement: sa.ClauseElement) -> Prepared:
        """Return what executes one statement many times."""
        return Prepared(self._engine, statement)

    def empty_log(self) -> bool:
        """Have no older bytes stay in SQLite's write-ahead log; return whether it is empty. PostgreSQL vacuums by itself."""
        if self.is_postgresql:
            return True
        with _refused(), closing(self._engine.raw_connection()) as connection:
            cursor = connection.cursor()
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            ((busy, *_),) = cursor.fetchall()
            return not busy

    def insert(self, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
        """Return an INSERT that may say what is done where the key is taken."""
        return postgresql.insert(table) if self.is_postgresql else sqlite.insert(table)

    def migrate(self) -> None:
        """Make the tables, or bring older ones up to date; one process at a time."""
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
        with self.transaction() as connection:
            if self.is_postgresql:
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
                connection.execute(sa.schema.CreateSchema(SCHEMA, if_not_exists=True))
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                hint = "run the version that made it, or put its backup back"
                raise StoreError("the service's database is of a newer version", hint=hint, retryable=False) from error

    def close(self) -> None:
        self._engine.dispose()


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        raise StoreError(
            f"the service's database {_why(error)}",
            hint="is it up, are address, user and password right, and is its disk not full?",
        ) from error


def _why(error: SQLAlchemyError) -> str:
    """Say what a database refused, without values, addresses and passwords: its own code, or the kind of the error."""
    cause: Any = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorname", None) or getattr(cause, "sqlstate", None)
    if code is None and isinstance(error, OperationalError):
        return "gives no connection"
    return f"refused: {'the disk is full' if code in _FULL else code or type(cause).__name__}"


def open_database(url: str = "", *, durable: bool = False) -> Database:
    """Open the service's database and bring its tables up to date. `url`: `postgresql://...`; "": the file in the home.

    `durable`: what is committed outlives a power cut; what only answers are kept in may lose its last second, for the
    record has them. Raises StoreError.
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
    from sds.kernel.storage.postgres.connections import ALIVE, STOPPED_S  # noqa: PLC0415  a file needs no driver

    if not url.startswith(("postgresql://", "postgres://")):
        raise UsageError("the store is no `postgresql://` URL", hint="postgresql://user@host/database")
    try:
        parts = sa.make_url(url).set(drivername="postgresql+psycopg")
    except (SQLAlchemyError, ValueError):
        raise UsageError("the store's URL cannot be read", hint="postgresql://user@host/database") from None
    stopped_ms = 1_000 * STOPPED_S
    options = {"search_path": SCHEMA, "lock_timeout": BUSY_MS, "idle_in_transaction_session_timeout": stopped_ms}
    given = " ".join(f"-c {name}={value}" for name, value in options.items())
    alive = {name: value for name, value in ALIVE.items() if name not in parts.query}
    how = {"connect_timeout": CONNECT_S, "options": given, **alive}
    return sa.create_engine(
        parts,
        connect_args=how,
        pool_size=POOL_MAX,
        max_overflow=0,
        pool_timeout=CONNECT_S,
        pool_pre_ping=True,
        hide_parameters=True,
    )


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
        connection.isolation_level = None  # transactions begin where this file says so
        for pragma in ("journal_mode=WAL", f"synchronous={'FULL' if durable else 'NORMAL'}", "secure_delete=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begun(connection: sa.Connection) -> None:
        reads = connection.get_execution_options().get("sds_reads")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine
