"""The audit of the tables: whatever is changed beside the ledger behind the kernel's back is found and named."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from sds.kernel.audit import tables as audited
from sds.kernel.audit.tables import Tables
from sds.kernel.storage.copying import keys_of_tables
from sds.kernel.storage.ledger import COLUMNS
from sds.kernel.storage.store import Row
from tests.kernel.durable import World
from tests.kernel.tampering import bent, found_after, full_record
from tests.scale import seeded

# Said openly in audit.py: how often an agent was rejected in a row is nowhere else, and a store of another schema
# version is not even opened.
UNSEALED = {("agents", "rejections")}
NOT_PROVED = {
    "executor_breakers",
    "order_lookups",
}  # whether an executor answers, and when it is asked, is told by no ledger


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    made = full_record(folder)
    yield made
    made.close()


def tables(world: World) -> dict[str, list[str]]:
    names = [name for name in keys_of_tables() if name not in {"ledger", *NOT_PROVED}]
    return {name: list(world.store.columns(name)) for name in names}


def test_a_changed_value_in_any_column_of_any_other_table_is_found(world: World):
    """Every row that is not of an open flow; the only exceptions are those that audit.py names."""
    rng = seeded(3)
    missed: set[tuple[str, str]] = set()
    open_flows = world.column("SELECT dfid FROM decision_flows WHERE state = 'ACTIVE'")
    open_events = world.column("SELECT event_id FROM decision_flows WHERE state = 'ACTIVE'")
    for table, columns in tables(world).items():
        by_flow = "dfid" in columns
        rows = world.store.rows(f"SELECT * FROM {table}")
        rows = [row for row in rows if not by_flow or row[columns.index("dfid")] not in open_flows]
        rows = [row for row in rows if table != "case_keys" or row[columns.index("event_id")] not in open_events]
        assert rows
        for column in columns:
            at = columns.index(column)
            row = rng.choice([r for r in rows if r[at] is not None] or rows)
            same = " AND ".join(f"{c} IS ?" for c in columns)
            sql = f"UPDATE {table} SET {column} = ? WHERE {same}"
            value = 1.0 if row[at] is None and column == "confidence" else bent(rng, row[at])
            if column in ("status", "state", "outcome", "phase"):
                value = {"SUCCESS": "FAILED", "ACTIVE": "RETIRED", "CLOSED": "ABORTED", "settled": "released"}.get(
                    row[at], {"status": "PENDING", "state": "CLOSED", "outcome": "ESCALATED", "phase": "DIRTY"}[column]
                )
            if column in ("amount", "attempt_number", "drawn", "used", "parts", "n", "bucket") or (table, column) == (
                "artifacts",
                "version",
            ):
                value = row[at] + 100  # never nothing or less, and never the number of another attempt
            if table == "meta":
                row, value = ("halted", "0"), "1" if column == "value" else "stopped"
            if table == "reservations" and value == "PENDING":
                value = "settled"
            try:
                if not found_after(world, (sql, (value, *row))):
                    missed.add((table, column))
            except (sqlite3.IntegrityError, psycopg.IntegrityError) as error:
                raise AssertionError(f"{table}.{column}: the test's own change was refused") from error
    assert UNSEALED == missed


def test_a_row_deleted_from_any_other_table_is_found(world: World):
    for table in tables(world):
        for (number,) in world.store.rows(f"SELECT count(*) FROM {table}"):
            assert number, table
        if table == "meta":
            continue
        first = tables(world)[table][0]
        open_flow = " WHERE dfid NOT IN (SELECT dfid FROM decision_flows WHERE state = 'ACTIVE')"
        where = open_flow if first == "dfid" else ""
        gone = world.column(f"SELECT {first} FROM {table}{where} LIMIT 1")[0]
        assert found_after(world, (f"DELETE FROM {table} WHERE {first} = ?", (gone,))), table


def test_a_row_added_to_any_other_table_is_found(world: World):
    for table, columns in tables(world).items():
        if table in ("meta", "resources", "spend_totals", "dim_validations", "context_snapshots", "policy_proposals"):
            continue  # a resource that nobody drew on: next test; one row for each flow: the sealed digest above
        if table in ("checkpoints", "clock_steps"):
            continue  # its key is a number: `test_checkpoints`, `test_clock`
        key, rest = columns[0], ", ".join(columns[1:])
        unique = {"gate", "idempotency_key"}
        values = ", ".join(f"{c} || 'x'" if c in unique else c for c in columns[1:])
        sql = f"INSERT INTO {table} ({key}, {rest}) SELECT {key} || 'x', {values} FROM {table} LIMIT 1"
        assert found_after(world, (sql, ())), table


def test_each_settlement_is_noted_in_one_set_so_that_the_time_grows_with_the_record_and_not_with_its_square(
    world: World,
):
    check = Tables(world.store)
    kept = check._kept
    assert [] == check.faults(world.store.rows(f"SELECT {COLUMNS} FROM ledger ORDER BY idx"))
    assert kept
    assert kept is check._kept


def test_no_more_triggers_are_in_memory_than_are_read_at_once(world: World, monkeypatch: pytest.MonkeyPatch):
    """All of the flows are compared, also those that were opened at the same time."""
    monkeypatch.setattr(audited, "READ_AT_ONCE", 2)
    pages, rows_of = list[list[Row]](), world.store.rows

    def rows(sql: str, values: Row = ()) -> list[Row]:
        found = rows_of(sql, values)
        pages.extend([found] if "trigger_event FROM decision_flows" in sql else [])
        return found

    monkeypatch.setattr(world.store, "rows", rows)
    assert [] == Tables(world.store).faults(rows_of(f"SELECT {COLUMNS} FROM ledger ORDER BY idx"))
    assert 2 == max(map(len, pages))
    assert sorted(world.column("SELECT dfid FROM decision_flows")) == sorted(row[1] for page in pages for row in page)


def test_a_counter_made_up_is_found(world: World):
    assert ("spend x: the table says 5, the ledger None",) == found_after(
        world, ("INSERT INTO spend_totals VALUES ('x', 5)", ())
    )
    assert ("resource x: the table says (1, 5), the ledger None",) == found_after(
        world, ("INSERT INTO resources VALUES ('x', 1, 5)", ())
    )


def test_an_event_forgotten_so_that_it_could_be_paid_again_is_found(world: World):
    found = found_after(world, ("DELETE FROM events WHERE event_id = 'paid'", ()))
    assert found[0].startswith("event claims/paid: the table says None, the ledger (")


def test_a_tag_changed_so_that_a_flow_could_be_started_again_is_found(world: World):
    sql = "UPDATE decision_flows SET tag = 'INTERRUPTED' WHERE tag = 'EXECUTION_FAILED'"
    (line,) = found_after(world, (sql, ()))
    assert "the table says ('ABORTED', 'INTERRUPTED'), the ledger ('ABORTED', 'EXECUTION_FAILED')" in line
