"""Damage to a record that SQLite itself would refuse: any cell of any table, of any type and in any encoding."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from sds.kernel.storage import ledger

VALUES: tuple[Any, ...] = (
    *(
        None,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        1.5,
        float("inf"),
        b"",
        b"\xff\xfe",
        b"{}",
        "",
        " ",
        "x",
        "a\0b",
        "{",
        "[]",
        "{}",
    ),
    *("null", "1", '"x"', "[[1]]", '{"a":[]}', "[1,2,3]", '{"rows":{}}', '{"a":1e999}', "[" * 3000, "2030-01-01"),
)
NOT_UTF_8 = (b"\xff\xfe", b"\xed\xa0\x80", b'{"a":"\xff"}', b"ok\xff")
LEAVES: tuple[Any, ...] = (None, True, 0, -1, 10**30, 1e308, "", "x", [], {}, [1], {"a": 1}, "\ud800")
_TYPES = {"TEXT": (str,), "INTEGER": (int,), "REAL": (float, int), "BLOB": (bytes,)}
_DECLARED = re.compile(
    r" (TEXT|REAL|BLOB|INTEGER(?! PRIMARY))( NOT NULL)?( CHECK \((?:[^()]|\([^()]*\))*\))?( REFERENCES \w+)?"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of one row. `kind`: what its column is declared as; `rowid`: SQLite makes whole numbers of texts in it."""

    table: str
    column: str
    kind: str
    not_null: bool
    row: tuple[Any, ...]
    columns: tuple[str, ...]
    rowid: bool

    @property
    def value(self) -> Any:
        return self.row[self.columns.index(self.column)]

    def bent_by(self, value: Any, *, raw: bool) -> bool:
        """Whether a STRICT table would refuse the value for its type; `raw`: bytes stored as a text."""
        if raw or value is None:
            return self.kind != "TEXT" if raw else self.not_null
        if self.rowid and isinstance(value, str) and value.isdecimal():
            return False
        return type(value) not in _TYPES[self.kind]


def cells(path: Path, rng: Random) -> Iterator[Cell]:
    """Yield cells without end, each of a row drawn anew: every column of every table once, then any."""
    with closing(sqlite3.connect(path)) as db:
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        tables = {name: db.execute(f"PRAGMA table_info({name})").fetchall() for name in names}
        rows = {name: db.execute(f"SELECT * FROM {name}").fetchall() for name in names}
    columns = [(name, column) for name in names if rows[name] for column in tables[name]]
    rng.shuffle(columns)
    number = 0
    while True:
        table, column = columns[number] if number < len(columns) else rng.choice(columns)
        named = tuple(str(each[1]) for each in tables[table])
        rowid = column[2] == "INTEGER" and [column] == [each for each in tables[table] if each[5]]
        yield Cell(table, column[1], column[2], bool(column[3]), rng.choice(rows[table]), named, rowid)
        number += 1


def damaged(rng: Random, value: Any) -> tuple[Any, bool]:
    """Return another value, and whether it is bytes to be stored as a text: anything, or JSON with one part altered."""
    if isinstance(value, str) and value[:1] in ("{", "[") and rng.random() < 0.6:
        return _altered(rng, json.loads(value)), False
    if rng.random() < 0.15:
        return rng.choice(NOT_UTF_8), True
    return rng.choice(VALUES), False


def _altered(rng: Random, data: Any) -> str:
    node, path = data, list[Any]()
    while isinstance(node, dict | list) and node and (not path or rng.random() < 0.8):
        path.append(rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node)))
        node = node[path[-1]]
    if not path:
        return json.dumps(rng.choice(LEAVES))
    holder = data
    for step in path[:-1]:
        holder = holder[step]
    if rng.random() < 0.25:
        del holder[path[-1]]
    else:
        holder[path[-1]] = rng.choice(LEAVES)
    return json.dumps(data)


def damage(path: Path, cell: Cell, value: Any, *, raw: bool, rechain: bool) -> None:
    """Put a value into a cell, whatever its table declares, and leave the schema as it was. Raises sqlite3.Error.

    `rechain`: compute the ledger's hashes anew, as somebody would who can.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            db.execute(f"DROP TRIGGER {name}")
        declared = db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (cell.table,)).fetchone()[0]
    _declare(path, cell.table, _DECLARED.sub("", declared.replace("STRICT, ", "").replace("STRICT", "")))
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            where = " AND ".join(f"{column} IS ?" for column in cell.columns)
            put = "CAST(? AS TEXT)" if raw else "?"
            another = f"{where} AND {cell.column} IS NOT {put}"
            update = f"UPDATE {cell.table} SET {cell.column} = {put} WHERE {another}"
            if 0 == db.execute(update, (value, *cell.row, value)).rowcount:
                raise sqlite3.IntegrityError("that stands there, or SQLite makes of it what stands there")
            if rechain:
                _chain(db)
    finally:
        _declare(path, cell.table, declared)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for _, sql in triggers:
            db.execute(sql)


def _declare(path: Path, table: str, sql: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (sql, table))


def _chain(db: sqlite3.Connection) -> None:
    db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    prev = ledger.GENESIS
    for idx, at_ms, kind, dfid, body, _, _ in db.execute(
        f"SELECT {ledger.COLUMNS} FROM ledger ORDER BY idx"
    ).fetchall():
        entry = ledger.entry_hash(idx, at_ms, kind, dfid, body, prev)
        db.execute("UPDATE ledger SET prev_hash = ?, entry_hash = ? WHERE idx = ?", (prev, entry, idx))
        prev = entry
