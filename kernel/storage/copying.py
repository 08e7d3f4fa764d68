"""Copying a whole record from one store into another, empty one: every row, in an order that its triggers allow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest

from sds.kernel.canonical import one_line
from sds.kernel.errors import StoreError
from sds.kernel.storage.sqlite_schema import statements
from sds.kernel.storage.store import Reader, Row, Store

ROWS_AT_ONCE = 200
_TABLE = re.compile(r"CREATE TABLE (\w+) \((.*)\)", re.DOTALL)
_KEY_OF_SEVERAL, _KEY_OF_ONE = re.compile(r"PRIMARY KEY \(([^)]*)\)"), re.compile(r"(\w+) \w+ PRIMARY KEY")
_NOT_COPIED = ("meta", "clock_steps")  # `copy` sets `halted`; a trigger writes the clock steps anew from the ledger


@cache
def keys_of_tables() -> dict[str, tuple[str, ...]]:
    """Return the columns of every table's primary key, by table. A table comes after those that it refers to."""
    found: dict[str, tuple[str, ...]] = {}
    for statement in statements():
        if table := _TABLE.search(statement):
            several, one = _KEY_OF_SEVERAL.search(table[2]), _KEY_OF_ONE.search(table[2])
            names = several[1] if several else one[1] if one else ""
            found[table[1]] = tuple(name.strip() for name in names.split(","))
    return found


def rows_there(store: Reader) -> int:
    """Return how many rows a record has; 0: it is empty."""
    return sum(int(store.value(f"SELECT count(*) FROM {table}")) for table in keys_of_tables() if table != "meta")


def copy(source: Reader, target: Store) -> int:
    """Copy all rows of `source` in one transaction of `target`; return how many. Raises StoreError: `target` is not empty.

    `source` must show one moment: a frozen reader, or one in a transaction of its own.
    """
    copied = 0
    with target.transaction():
        if there := rows_there(target):
            raise StoreError(f"`{target.name}` is not empty: it has {there} rows", hint="name an empty store")
        target.run("UPDATE meta SET value = ? WHERE key = 'halted'", ("1" if source.halted else "0",))
        for table, key in keys_of_tables().items():
            if table not in _NOT_COPIED:
                columns = source.columns(table)
                if set(columns) != set(target.columns(table)):
                    raise StoreError(f"table `{table}` has different columns in `{one_line(target.name, 200)}`")
                copied += sum(_put(target, table, columns, rows) for rows in _pages(source, table, columns, key))
    return copied


def _pages(source: Reader, table: str, columns: tuple[str, ...], key: tuple[str, ...]) -> Iterator[list[Row]]:
    """Yield the rows of a table, ROWS_AT_ONCE at a time, in the order of its key."""
    places = [columns.index(name) for name in key]
    named, order = ", ".join(columns), ", ".join(key)
    rows = source.rows(f"SELECT {named} FROM {table} ORDER BY {order} LIMIT {ROWS_AT_ONCE}")
    after = f"({order}) > ({', '.join('?' * len(key))})"
    while rows:
        yield rows
        last = tuple(rows[-1][place] for place in places)
        rows = source.rows(f"SELECT {named} FROM {table} WHERE {after} ORDER BY {order} LIMIT {ROWS_AT_ONCE}", last)


def _put(target: Store, table: str, columns: tuple[str, ...], rows: list[Row]) -> int:
    one = f"({', '.join('?' * len(columns))})"
    sql = f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join([one] * len(rows))}"
    return target.run(sql, tuple(value for row in rows for value in row))


def differing(one: Reader, other: Reader) -> list[str]:
    """Return the tables whose rows differ, derived tables included."""
    found = []
    for table, key in keys_of_tables().items():
        if table == "meta":
            continue
        columns = one.columns(table)
        pages = (_pages(each, table, columns, key) for each in (one, other))
        if any(a != b for a, b in zip_longest(*pages)):
            found.append(table)
    return found
