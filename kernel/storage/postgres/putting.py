"""Puts a record that was made aside in place, by renaming its schema in one transaction: nobody ever sees half of it."""

from __future__ import annotations

from contextlib import suppress

import psycopg

from sds.kernel.errors import StoreError, UsageError
from sds.kernel.storage.postgres import schema as schemas
from sds.kernel.storage.postgres.connections import BEGIN, Url, connected
from sds.kernel.storage.postgres.errors import refused
from sds.kernel.storage.postgres.pipelined import Connection


def put_in_place(url: str, aside: str, schema: str) -> None:
    """Rename the schema `aside` to `schema`, replacing an empty one. Raises UsageError: it holds a record, or is in use."""
    db = connected(Url(url), aside)
    try:
        db.execute(f"{BEGIN}; SELECT pg_advisory_xact_lock({schemas.lock_number(schema)})", prepare=False)
        _refuse_in_use(db, schema)
        _drop_empty(db, schema)
        db.execute(f"ALTER SCHEMA {aside} RENAME TO {schema}; SET search_path = {schema}", prepare=False)
        db.execute(schemas.functions(schema), prepare=False)  # made anew, because they name the schema
        db.execute("COMMIT", prepare=False)
    except psycopg.Error as error:
        raise refused(error, "the record cannot be put in place") from error
    finally:
        db.close()


def _refuse_in_use(db: Connection, schema: str) -> None:
    """Raise UsageError while somebody has the record open: they would go on with what they knew of the old one."""
    sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
    others = db.execute(sql, (schema,)).fetchone()
    if others and others[0]:
        raise UsageError(f"the record `{schema}` is in use by others", hint="stop the gates and services first")


def _drop_empty(db: Connection, schema: str) -> None:
    """Drop a schema with an empty record. Raises UsageError when the record has entries."""
    there = db.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{schema}.ledger",)).fetchone()
    if not there or not there[0]:
        return
    last = db.execute(f"SELECT max(idx) FROM {schema}.ledger").fetchone()
    if last and last[0]:
        hint = f"to give that record up, move it away: ALTER SCHEMA {schema} RENAME TO given_up_{schema}"
        raise UsageError(f"the schema `{schema}` holds a record, up to entry {last[0]}", hint=hint)
    db.execute(f"DROP SCHEMA {schema} CASCADE", prepare=False)


def drop(url: str, aside: str) -> None:
    """Remove a schema that was made aside and never put in place. If it cannot be removed it stays, as nobody's record."""
    with suppress(psycopg.Error, StoreError):
        db = connected(Url(url), aside)
        try:
            db.execute(f"{BEGIN}; DROP SCHEMA IF EXISTS {aside} CASCADE; COMMIT", prepare=False)
        finally:
            db.close()
