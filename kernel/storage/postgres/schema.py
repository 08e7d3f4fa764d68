"""The schema of a record in PostgreSQL: made from `schema.sql`, as SQLite's is, and read back from the catalogue."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.resources import files
from typing import Any

import psycopg

from sds.kernel.errors import StoreError
from sds.kernel.storage.postgres.dialect import defined
from sds.kernel.storage.sqlite_schema import statements
from sds.kernel.storage.store import SCHEMA_VERSION

Connection = psycopg.Connection[Any]

_expected: dict[int, Mapping[str, str]] = {}  # by the server's version
_NAMED = re.compile(r"CREATE (?:UNIQUE )?(TABLE|INDEX|TRIGGER|OPERATOR) (\S+)")
_TRIGGER = re.compile(r"CREATE TRIGGER (\w+) [A-Z ]+ ON \w+\.(\w+)")

# Every object of one schema by name, with its whole definition.
_CATALOGUE = """
SELECT c.relname, concat_ws(' ', c.relkind, c.relpersistence, c.relrowsecurity, c.relhasrules,
    (SELECT string_agg(concat_ws(' ', a.attname, format_type(a.atttypid, a.atttypmod), l.collname, a.attnotnull, a.atthasdef,
                                 pg_get_expr(d.adbin, d.adrelid)), ', ' ORDER BY a.attnum)
     FROM pg_attribute a LEFT JOIN pg_collation l ON l.oid = a.attcollation
     LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
     WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
    (SELECT string_agg(pg_get_constraintdef(k.oid) || k.convalidated::text, ', ' ORDER BY pg_get_constraintdef(k.oid))
     FROM pg_constraint k WHERE k.conrelid = c.oid AND k.contype <> 'n'))
FROM pg_class c WHERE c.relnamespace = %(schema)s::regnamespace AND c.relkind NOT IN ('i', 't', 'I')
UNION ALL
SELECT c.relname, pg_get_indexdef(c.oid) || ' ' || i.indisvalid::text || i.indisready::text
FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid
WHERE c.relnamespace = %(schema)s::regnamespace AND NOT EXISTS (SELECT 1 FROM pg_constraint k WHERE k.conindid = c.oid)
UNION ALL
SELECT t.tgname, pg_get_triggerdef(t.oid) || ' ' || t.tgenabled::text
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
WHERE c.relnamespace = %(schema)s::regnamespace AND NOT t.tgisinternal
UNION ALL
SELECT 'function ' || p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')', pg_get_functiondef(p.oid)
FROM pg_proc p WHERE p.pronamespace = %(schema)s::regnamespace AND p.prokind = 'f'
UNION ALL
SELECT 'operator ' || o.oprname || ' ' || format_type(o.oprleft, NULL), o.oprcode::text || ' ' || format_type(o.oprright, NULL)
FROM pg_operator o WHERE o.oprnamespace = %(schema)s::regnamespace
"""
_DISABLED = (
    "SELECT 'the constraints of ' || c.relname || ' are switched off' FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid"
    " WHERE c.relnamespace = %(schema)s::regnamespace AND t.tgisinternal AND t.tgenabled <> 'O'"
)
# What empties a table, or may leave out or alter what is written to it.
_LOSING = """
SELECT 'the table `' || relname || '` is unlogged: a crash of the server would empty it'
FROM pg_class WHERE relnamespace = to_regnamespace(%(schema)s) AND relpersistence <> 'p' AND relkind IN ('r', 'p')
UNION ALL
SELECT 'the trigger `' || t.tgname || '` on `' || c.relname || '` may swallow or alter rows'
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
WHERE c.relnamespace = to_regnamespace(%(schema)s) AND NOT t.tgisinternal AND t.tgtype & 3 = 3
    AND t.tgname || ' ' || c.relname <> ALL (%(own)s)
UNION ALL
SELECT 'the rule `' || r.rulename || '` on `' || c.relname || '` may swallow or alter rows'
FROM pg_rewrite r JOIN pg_class c ON c.oid = r.ev_class
WHERE c.relnamespace = to_regnamespace(%(schema)s) AND c.relkind IN ('r', 'p')
LIMIT 1
"""


def lock_number(name: str) -> int:
    """Return the number of a name's advisory lock: 63 bits of its SHA-256."""
    return int.from_bytes(sha256(f"sds record {name}".encode()).digest()[:8]) >> 1


def named_objects(schema: str) -> Iterator[tuple[str, str]]:
    """Yield the name and definition of every object of a record, in an order in which they can be made."""
    yield from _named_in("operators.sql", schema)
    for statement in statements():
        if (definition := defined(statement)) is not None:
            yield _named(definition, ""), definition
    yield from _named_in("triggers.sql", schema)


def _named_in(file: str, schema: str) -> Iterator[tuple[str, str]]:
    for definition in _text(file, schema).split("\n\n"):
        if _NAMED.match(definition):
            yield _named(definition, schema), definition


def _named(definition: str, schema: str) -> str:
    found = _NAMED.match(definition)
    if found is None:
        raise ValueError(definition)
    kind, name = found.groups()
    return f"operator {name.removeprefix(f'{schema}.')} text" if kind == "OPERATOR" else name


def functions(schema: str) -> str:
    """Return the statements that make all functions, or make them anew: those of triggers last, since they name tables."""
    triggers = _text("triggers.sql", schema).split("\n\n")
    made = (each for each in triggers if "CREATE OR REPLACE FUNCTION" in each)
    return "\n\n".join([_text("functions.sql", schema), *made])


def _text(file: str, schema: str) -> str:
    return (files(__package__) / file).read_text(encoding="utf-8").format(schema=schema)


def create(db: Connection, schema: str) -> None:
    """Make an empty record in the caller's transaction. The search path must name `schema` already."""
    db.execute(f"CREATE SCHEMA {schema}", prepare=False)
    fill(db, schema)


def fill(db: Connection, schema: str) -> None:
    """Make an empty record in a schema that holds nothing."""
    complete(db, schema, {})
    db.execute("INSERT INTO meta VALUES ('schema_version', %s), ('halted', '0')", (SCHEMA_VERSION,))


def complete(db: Connection, schema: str, found: Mapping[str, str]) -> None:
    """Make the objects that a record lacks, in one exchange; those that it has stay as they are."""
    made = [functions(schema), *(definition for name, definition in named_objects(schema) if name not in found)]
    db.execute(";\n".join(each.rstrip().removesuffix(";") for each in made), prepare=False)


def catalogue(db: Connection, schema: str) -> dict[str, str]:
    """Return the definition of everything in a schema, by name and without the schema's own name; of triggers of one name, all."""
    found = dict[str, str]()
    for name, text in sorted(db.execute(_CATALOGUE, {"schema": schema}).fetchall()):
        found[name] = f"{found[name]}; {text}" if name in found else text
    return {name: text.replace(f"{schema}.", "") for name, text in found.items()}


def switched_off(db: Connection, schema: str) -> list[str]:
    """Return the tables whose constraints are switched off, one line each."""
    return sorted({row[0] for row in db.execute(_DISABLED, {"schema": schema}).fetchall()})


def refuse_losing(db: Connection, schema: str) -> None:
    """Raise StoreError for a table that a crash would empty, or what may swallow rows before they are written."""
    own = [" ".join(named.groups()) for _, text in named_objects(schema) if (named := _TRIGGER.match(text))]
    if found := db.execute(_LOSING, {"schema": schema, "own": own}, prepare=False).fetchone():
        raise StoreError(f"it may lose rows: {found[0]}", hint="undo what was done to the schema", retryable=False)


def expected(db: Connection) -> Mapping[str, str]:
    """Return what `catalogue` returns for an untouched record, by the server's version: one is made, read, and rolled back."""
    version = db.info.server_version
    if version not in _expected:
        _expected[version] = _fresh(db)
    return _expected[version]


def _fresh(db: Connection) -> Mapping[str, str]:
    schema = f"sds_expected_{secrets.token_hex(8)}"
    db.execute("BEGIN READ WRITE", prepare=False)
    try:
        db.execute(f"SET LOCAL search_path = {schema}", prepare=False)
        create(db, schema)
        return catalogue(db, schema)
    finally:
        with suppress(psycopg.Error):
            db.execute("ROLLBACK", prepare=False)
