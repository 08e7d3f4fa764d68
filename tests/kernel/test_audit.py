"""The audit: whatever is changed behind the kernel's back, in the ledger or beside it, is found and named."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sds.kernel import artifacts, audit, recovery, registry
from sds.kernel.human import HumanDesk, Resolution
from sds.kernel.ledger import GENESIS, Head, entry_hash, head
from sds.kernel.store import Store
from tests.kernel.durable import (
    LEASE_MS,
    World,
    compensate,
    contract,
    deny,
    escalate,
    goodwill,
    nonsense,
    refund,
    see_through,
)
from tests.kernel.sagas import REVERT, Script, run, terms
from tests.scale import scale, seeded

# Said openly in audit.py: how often an agent was rejected in a row is nowhere else, and a store of another schema
# version is not even opened.
UNSEALED = {("agents", "rejections")}


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    """Return a record with one of everything: paid, refused, unknown, denied, escalated, aborted, restarted, open, a saga."""
    made = World(folder, terms=terms())
    for number in range(2, 9):
        made.tickets.put(f"T{number}", mood="angry")
    run(made.kernel, made, Script(step_2=deny, compensation=REVERT), event="half settled")
    made.decide(refund(), "paid", confidence=0.5)
    made.decide(compensate, "compensated")
    made.rail.misfortunes = ["refuse", "drop", "lose"]
    made.decide(refund("3.00"), "refused", "T2")
    made.decide(refund("5.00"), "unknown", "T3")
    made.decide(goodwill("1.00"), "resolved at once", "T4")
    made.decide(deny, "denied", "T5")
    made.decide(escalate, "escalated", "T6")
    case = made.decide(escalate, "resolved", "T6").dfid
    denial = '{"action":"DENY","reason_code":"NOT_ELIGIBLE"}'
    HumanDesk(made.kernel, now_ms=made.clock).resolve(case, Resolution("MODIFY", "ada", "a look", denial))
    packet = made.packet("exhausted", "T7")
    for _ in range(3):
        made.kernel.decide(packet, nonsense(packet))
    packet = made.packet("drifted", "T8")
    made.tickets.put("T8", refundable_minor=1)
    made.kernel.decide(packet, refund()(packet))
    see_through(made.kernel, made.event("drifted", "T8"), refund("0.01"))
    made.packet("abandoned", "T5")
    made.clock.advance(LEASE_MS)
    made.rail.blind = True
    recovery.recover(made.kernel, now_ms=made.clock())
    registry.transition(made.store, "claims-agent", "SUSPENDED", by="operator", reason="a look", now_ms=made.clock())
    registry.transition(made.store, "claims-agent", "ACTIVE", by="operator", reason="all well", now_ms=made.clock())
    registry.set_halted(made.store, halted=True, by="operator", reason="a break", now_ms=made.clock())
    registry.set_halted(made.store, halted=False, by="operator", reason="over", now_ms=made.clock())
    other = contract(("gate: claims", "gate: others"), ("agent_id: claims-agent", "agent_id: others-agent"))
    registry.register(made.store, other, by="registry", now_ms=made.clock())
    registry.revoke(made.store, other.hash, who="me", reason="a mistake", now_ms=made.clock())
    made.decide(escalate, "escalated again", "T6")
    for text, reason in (("Fares are net.", "asked for"), ("Fares are gross.", "they were gross")):
        artifacts.put(made.store, "fares", text, who="desk", reason=reason, now_ms=made.clock())
    made.clock.advance(1)
    artifacts.sweep(made.store, days_max=0, who="desk", reason="a try", now_ms=made.clock())
    made.packet("still open", "T5")
    made.kernel.decide(packet := made.packet("open, once rejected", "T6"), nonsense(packet))
    assert () == audit.verify(made.store).faults
    yield made
    made.close()


def faults(world: World, expected: Head | None = None) -> tuple[str, ...]:
    return audit.verify(world.store, expected).faults


class Stranger:
    """A connection that no trigger and no foreign key stops."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        rows = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        self._triggers = dict(rows)
        for name in self._triggers:
            db.execute(f"DROP TRIGGER {name}")

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        return self._db.execute(sql, values)

    def hide(self) -> None:
        """Put the triggers back, as somebody would who wants to go unnoticed."""
        for sql in self._triggers.values():
            self._db.execute(sql)


@contextmanager
def tampering(world: World) -> Iterator[Stranger]:
    """Let a stranger at the file, and restore it afterwards."""
    with closing(sqlite3.connect(world.path, isolation_level=None)) as db, closing(sqlite3.connect(":memory:")) as kept:
        db.backup(kept)
        yield Stranger(db)
        kept.backup(db)


def found_after(
    world: World, *statements: tuple[str, tuple[Any, ...]], expected: Head | None = None
) -> tuple[str, ...]:
    with tampering(world) as db:
        for sql, values in statements:
            db.execute(sql, values)
        db.hide()
        return faults(world, expected)


def bent(rng: Random, value: Any) -> Any:
    """Return a stored value with one byte changed, of the same type."""
    if value is None:
        return "x"
    if isinstance(value, int):
        return value + rng.choice((-1, 1))
    if isinstance(value, float):
        return value + 1.0
    data = bytearray(value if isinstance(value, bytes) else value.encode())
    if not data:
        return value + (b"x" if isinstance(value, bytes) else "x")
    place = rng.randrange(len(data))
    data[place] = (data[place] + 1 + rng.randrange(126)) % 127 if data[place] < 128 else data[place] ^ 1
    return bytes(data) if isinstance(value, bytes) else data.decode()


def test_a_flipped_byte_in_any_column_of_any_entry_is_found_and_its_index_named(world: World):
    rng = seeded(1)
    entries = world.store.rows("SELECT * FROM ledger")
    columns = ("idx", "at_ms", "kind", "dfid", "body", "prev_hash", "entry_hash")
    for entry in entries if scale(0, 1) else rng.sample(entries, 8):
        for column, value in zip(columns[1:], entry[1:], strict=True):
            sql = f"UPDATE OR IGNORE ledger SET {column} = ? WHERE idx = ?"
            found = found_after(world, (sql, (bent(rng, value), entry[0])))
            assert any(line.startswith((f"entry {entry[0]}:", f"entry {entry[0] + 1}:")) for line in found), column


def test_an_index_that_was_changed_is_found(world: World):
    last = head(world.store).idx
    found = found_after(world, ("UPDATE ledger SET idx = ? WHERE idx = ?", (last + 5, last)))
    assert f"entry {last}: missing (the next entry is {last + 5})" == found[0]


def test_a_byte_flipped_in_the_file_itself_is_found(world: World):
    """Any bit, so that text stops being text, too: the check reports, it does not fall over."""
    rng = seeded(2)
    entries = world.store.rows("SELECT idx, body, entry_hash FROM ledger")
    world.store.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    world.close()
    whole = world.path.read_bytes()
    for idx, body, own_hash in rng.sample(entries, scale(12, len(entries))):
        needle = rng.choice((body, own_hash)).encode()
        place = whole.index(needle) + rng.randrange(len(needle))
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.randrange(8)
        world.path.write_bytes(bytes(flipped))
        with closing(Store(world.path)) as store:
            found = audit.verify(store).faults
        assert any(f"entry {n}:" in line for line in found for n in (idx, idx + 1)), found
    world.path.write_bytes(whole)


@pytest.mark.parametrize("where", ["first", "middle", "last but one"])
def test_a_dropped_entry_is_found_and_named(world: World, where: str):
    last = head(world.store).idx
    idx = {"first": 1, "middle": last // 2, "last but one": last - 1}[where]
    found = found_after(world, ("DELETE FROM ledger WHERE idx = ?", (idx,)))
    assert f"entry {idx}: missing (the next entry is {idx + 1})" == found[0]


def test_a_dropped_entry_whose_followers_move_up_is_found(world: World):
    found = found_after(
        world,
        ("DELETE FROM ledger WHERE idx = 4", ()),
        ("UPDATE ledger SET idx = -idx WHERE idx > 4", ()),
        ("UPDATE ledger SET idx = -idx - 1 WHERE idx < 0", ()),
    )
    assert "entry 4: not chained to entry 3" == found[0]


def test_swapped_entries_are_found(world: World):
    found = found_after(
        world,
        ("UPDATE ledger SET idx = -5 WHERE idx = 5", ()),
        ("UPDATE ledger SET idx = 5 WHERE idx = 6", ()),
        ("UPDATE ledger SET idx = 6 WHERE idx = -5", ()),
    )
    assert {"entry 5: not chained to entry 4", "entry 5: content does not match its hash"} <= set(found)


@pytest.mark.parametrize("idx", [0, -7])
def test_an_entry_put_before_the_first_is_found(world: World, idx: int):
    row = (idx, 1, "HALT", "", "{}", GENESIS, entry_hash(idx, 1, "HALT", "", "{}", GENESIS))
    found = found_after(world, ("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?)", row))
    assert f"entry 1: missing (the next entry is {idx})" == found[0]


@pytest.mark.parametrize(
    ("kind", "body"), [("PAID", "{}"), ("DECIDED", "[]"), ("SETTLED", "{}"), ("AGENT", "nonsense")]
)
def test_an_appended_entry_that_this_program_does_not_write_is_found(world: World, kind: str, body: str):
    last = head(world.store)
    row = (last.idx + 1, 1, kind, "x", body, last.entry_hash)
    found = found_after(
        world, ("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, entry_hash(*row[:5], last.entry_hash)))
    )
    assert (f"entry {last.idx + 1}: not an entry this program writes",) == found


def test_an_order_settled_twice_is_found(world: World):
    last = head(world.store)
    (dfid,) = world.column("SELECT dfid FROM execution_log WHERE status = 'SUCCESS' LIMIT 1")
    body = '{"detail":"","kept":true,"reference":"","status":"FAILED"}'
    row = (last.idx + 1, 1, "RESOLVED", dfid, body, last.entry_hash)
    found = found_after(
        world,
        (
            "INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*row, entry_hash(last.idx + 1, 1, "RESOLVED", str(dfid), body, last.entry_hash)),
        ),
    )
    assert (f"entry {last.idx + 1}: not an entry this program writes",) == found


def tables(world: World) -> dict[str, list[str]]:
    names = [name for name in world.column("SELECT name FROM sqlite_master WHERE type = 'table'") if name != "ledger"]
    return {str(n): [str(row[1]) for row in world.store.rows(f"PRAGMA table_info({n})")] for n in names}


def test_a_changed_value_in_any_column_of_any_other_table_is_found(world: World):
    """Every row that is not of an open flow; the only exceptions are those that audit.py names."""
    rng = seeded(3)
    missed: set[tuple[str, str]] = set()
    open_flows = world.column("SELECT dfid FROM decision_flows WHERE state = 'ACTIVE'")
    for table, columns in tables(world).items():
        by_flow = "dfid" in columns
        rows = world.store.rows(f"SELECT * FROM {table}")
        rows = [row for row in rows if not by_flow or row[columns.index("dfid")] not in open_flows]
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
            if column in ("amount", "attempt_number", "drawn", "used", "parts") or (table, column) == (
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
            except sqlite3.IntegrityError as error:
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
        key, rest = columns[0], ", ".join(columns[1:])
        unique = {"gate", "idempotency_key"}
        values = ", ".join(f"{c} || 'x'" if c in unique else c for c in columns[1:])
        sql = f"INSERT INTO {table} ({key}, {rest}) SELECT {key} || 'x', {values} FROM {table} LIMIT 1"
        assert found_after(world, (sql, ())), table


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


@pytest.mark.parametrize("name", ["ledger_no_update", "one_live_reservation"])
def test_a_missing_trigger_or_index_is_named(world: World, name: str):
    kind = "TRIGGER" if name.startswith("ledger") else "INDEX"
    with closing(sqlite3.connect(world.path, isolation_level=None)) as db:
        db.execute(f"DROP {kind} {name}")
    assert (f"schema: `{name}` is not as it was made",) == faults(world)


def test_a_trigger_that_does_not_belong_is_named(world: World):
    with closing(sqlite3.connect(world.path, isolation_level=None)) as db:
        db.execute("CREATE TRIGGER quiet AFTER INSERT ON spend BEGIN DELETE FROM spend; END")
    assert ("schema: `quiet` does not belong here",) == faults(world)


def test_without_a_head_the_check_says_what_it_cannot_see(world: World):
    report = audit.verify(world.store)
    assert "without --head: entries cut off at the end, or a ledger rewritten as a whole" == report.blind
    assert None is audit.verify(world.store, report.head).blind


def cut_off(db: Stranger, dfid: str) -> None:
    """Undo the last flow everywhere: ledger, tables, counters."""
    db.execute("DELETE FROM ledger WHERE dfid = ?", (dfid,))
    db.execute("DELETE FROM events WHERE dfid = ?", (dfid,))
    for table in ("context_snapshots", "policy_proposals", "dim_validations", "attempts", "decision_flows"):
        db.execute(f"DELETE FROM {table} WHERE dfid = ?", (dfid,))


def test_entries_cut_off_at_the_end_are_seen_only_with_a_head(world: World):
    packet = world.packet("last", "T5")
    world.kernel.decide(packet, deny(packet))
    kept = head(world.store)
    with tampering(world) as db:
        cut_off(db, packet.dfid)
        db.hide()
        assert () == faults(world)
        assert (
            f"entry {kept.idx}: missing (the ledger ends at {kept.idx - 1}, the head kept says {kept.idx})",
        ) == faults(world, kept)


def test_entries_cut_off_while_the_tables_stay_are_seen_without_a_head(world: World):
    assert found_after(world, ("DELETE FROM ledger WHERE idx = ?", (head(world.store).idx,)))


def rewritten(db: Stranger) -> None:
    """Write the ledger anew from the start, an hour earlier, with all hashes right."""
    prev = GENESIS
    for idx, at_ms, kind, dfid, body in db.execute("SELECT idx, at_ms, kind, dfid, body FROM ledger").fetchall():
        own = entry_hash(idx, at_ms - 3_600_000, kind, dfid, body, prev)
        db.execute(
            "UPDATE ledger SET at_ms = ?, prev_hash = ?, entry_hash = ? WHERE idx = ?",
            (at_ms - 3_600_000, prev, own, idx),
        )
        prev = own
    db.execute("UPDATE execution_log SET executed_at_ms = executed_at_ms - 3600000")
    db.execute("UPDATE contract_revocations SET revoked_at_ms = revoked_at_ms - 3600000")
    db.execute("UPDATE artifacts SET ended_at_ms = ended_at_ms - 3600000")


def test_a_ledger_rewritten_as_a_whole_is_seen_only_with_a_head(world: World):
    kept = head(world.store)
    with tampering(world) as db:
        rewritten(db)
        db.hide()
        assert () == faults(world)
        assert (f"entry {kept.idx}: not the entry the head names",) == faults(world, kept)


def test_an_older_head_still_holds_after_more_was_written(world: World):
    kept = head(world.store)
    packet = world.packet("later", "T5")
    world.kernel.decide(packet, deny(packet))
    assert () == faults(world, kept)
    assert () == faults(world, Head(0, GENESIS))
    assert ("entry 0: not the entry the head names",) == faults(world, Head(0, "f" * 64))


def test_the_check_reads_one_moment_while_decisions_go_on(world: World):
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            number += 1
            world.decide(refund("0.01"), f"busy {number}", "T5")

    thread = threading.Thread(target=write)
    thread.start()
    found = [audit.verify(world.store).faults for _ in range(10)]
    done.set()
    thread.join()
    assert [()] * 10 == found


def test_damaged_pages_are_reported(world: World):
    world.store.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    with world.path.open("r+b") as file:
        file.seek(4096 * 12)
        file.write(b"\xff" * 4096 * 3)
    with closing(Store(world.path)) as store:
        assert audit.verify(store).faults[0].startswith("database: ")


def test_a_flow_is_read_back_whole(world: World):
    (dfid,) = world.column("SELECT dfid FROM events WHERE event_id = 'unknown'")
    record = audit.flow_record(world.store, str(dfid))
    assert record is not None
    assert ("UNKNOWN", "ACCEPTED", "REFUND_TICKET") == (
        record["execution_log"]["status"],
        record["dim_validations"]["outcome"],
        record["policy_proposals"]["policy_kind"],
    )
    assert ["RESERVED", "DECIDED", "UNKNOWN"] == [entry["kind"] for entry in record["ledger"]]
    assert ["live"] == [row["status"] for row in record["reservations"]]
    assert "Claim: please" in record["context_snapshots"]["prompt"]
    assert record["policy_proposals"]["proposal"].startswith('{"action":"REFUND_TICKET"')


def test_a_flow_that_never_was_has_no_record(world: World):
    assert None is audit.flow_record(world.store, "flow-99999")
