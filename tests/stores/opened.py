"""The two stores, for tests that hold for both: `SDS_TEST_STORE=postgresql` runs all of them over PostgreSQL."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sds.kernel.storage.sqlite import Connect, SqliteStore, connect
from sds.kernel.storage.store import Store, Witness
from tests.kernel.faults import FailingConnect

SQLITE, POSTGRESQL = "sqlite", "postgresql"
KINDS = (SQLITE, POSTGRESQL)


class Chosen:
    """Which store `opened_store` opens."""

    kind = os.environ.get("SDS_TEST_STORE", SQLITE)


def schema_of(path: Path) -> str:
    """Return the schema that stands for a file: a copy of a folder is another record."""
    return f"sds_{sha256(str(path).encode()).hexdigest()[:16]}"


@cache
def _empty() -> bytes:
    """Return the file of an empty record."""
    with TemporaryDirectory() as folder:
        SqliteStore(path := Path(folder) / "empty.db").close()
        return path.read_bytes()


def _put_empty(path: Path) -> None:
    """Put an empty record where there is none: to copy one takes a quarter of the time that making its tables takes."""
    made = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    made.touch(0o600)
    made.write_bytes(_empty())
    with suppress(FileExistsError):
        path.hardlink_to(made)
    made.unlink()


def opened_store(path: Path, *, connect: Connect = connect, witness: Witness | None = None) -> Store:
    """Open the store of a path: the file, or a schema of its own on the tests' server."""
    if Chosen.kind == SQLITE:
        if connect.__module__ == SqliteStore.__module__ and path.parent.is_dir() and not path.exists():
            _put_empty(path)
        return SqliteStore(path, connect=connect, witness=witness)
    if isinstance(connect, FailingConnect):
        from tests.stores.failing import opened_failing

        return opened_failing(schema_of(path), connect.faults, witness)
    if connect.__module__ != SqliteStore.__module__:
        pytest.skip("looks at the statements of a connection to SQLite")
    from sds.kernel.storage.postgres.store import PostgresStore
    from tests.stores.schemas import put_empty
    from tests.stores.server import server_url

    put_empty(schema_of(path), path.parent)
    return PostgresStore(server_url(), schema_of(path), witness=witness)
