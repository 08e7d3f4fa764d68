"""The audit: what is changed, dropped, added or cut off behind the kernel's back, in the ledger or the file, is found."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.storage.ledger import GENESIS, Head, entry_hash, head
from sds.kernel.storage.store import Row
from tests.kernel.durable import PUBLIC, World, deny, refund
from tests.kernel.tampering import bent, chained, faults, found_after, full_record, tampering
from tests.scale import scale, seeded
from tests.stores.opened import POSTGRESQL, SQLITE, Chosen, opened_store
from tests.stores.records import Stranger, alone


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    made = full_record(folder)
    yield made
    made.close()


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


@pytest.mark.sqlite_alone("bytes of its file; the server checks its own")
def test_a_byte_flipped_in_the_file_itself_is_found(world: World):
    """Any bit, so that text stops being text, too: the check reports, it does not fall over."""
    rng = seeded(2)
    entries = world.store.rows("SELECT idx, body, entry_hash FROM ledger")
    assert world.store.truncate_log()
    world.close()
    whole = world.path.read_bytes()
    for idx, body, own_hash in rng.sample(entries, scale(12, len(entries))):
        needle = rng.choice((body, own_hash)).encode()
        place = whole.index(needle) + rng.randrange(len(needle))
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.randrange(8)
        world.path.write_bytes(bytes(flipped))
        with closing(opened_store(world.path)) as store:
            found = verify.verify(store).faults
        # an entry's hash lies in the next one, and in the checkpoint that signs it
        named = {f"entry {idx}", f"entry {idx + 1}", f"checkpoint {idx}"}
        assert named & {line.partition(":")[0] for line in found}, found
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
    ("kind", "body"), [("PAID", "{}"), ("DECIDED", "[]"), ("SETTLED", "{}"), ("VOIDING", "{}"), ("AGENT", "nonsense")]
)
def test_an_appended_entry_that_this_program_does_not_write_is_found(world: World, kind: str, body: str):
    last = head(world.store)
    row = (last.idx + 1, world.clock(), kind, "x", body, last.entry_hash)
    found = found_after(
        world, ("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, entry_hash(*row[:5], last.entry_hash)))
    )
    assert (f"entry {last.idx + 1}: not an entry this program writes",) == found


def after_entry(world: World, kind: str, dfid: object, body: str) -> tuple[str, ...]:
    """Return what is found once an entry is added that is chained as it should be."""
    last = head(world.store)
    row = (last.idx + 1, world.clock(), kind, str(dfid), body, last.entry_hash)
    added = (*row, entry_hash(*row[:5], last.entry_hash))
    found = found_after(world, ("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?)", added))
    return tuple(line.replace(f"entry {last.idx + 1}", "the entry") for line in found)


@pytest.mark.parametrize("kind", ["SETTLED", "RESOLVED", "UNKNOWN"])
@pytest.mark.parametrize("status", ["SUCCESS", "FAILED"])
def test_an_order_settled_twice_is_found(world: World, status: str, kind: str):
    """Whatever its end was: one that had failed, too, is not paid by an entry."""
    (*dfids,) = world.column("SELECT dfid FROM execution_log WHERE status = ?", status)
    assert dfids
    for dfid in dfids:
        for other in ("SUCCESS", "FAILED", "UNKNOWN"):
            body = json.dumps({"detail": "", "kept": True, "reference": "", "status": other, "tag": None})
            assert ("the entry: not an entry this program writes",) == after_entry(world, kind, dfid, body)


@pytest.mark.parametrize("state", ["CLOSED", "ABORTED", "EXECUTING"])
def test_a_human_entry_about_a_flow_that_no_human_was_asked_about_is_found(world: World, state: str):
    (dfid, *_) = world.column("SELECT dfid FROM decision_flows WHERE state = ?", state)
    body = json.dumps({"state": "CLOSED", "tag": None, "rows": {}})
    assert ("the entry: not an entry this program writes",) == after_entry(world, "HUMAN", dfid, body)


@pytest.mark.parametrize("name", ["ledger_no_update", "one_live_reservation"])
def test_a_missing_trigger_or_index_is_named(world: World, name: str):
    kind = "TRIGGER" if name.startswith("ledger") else "INDEX"
    table = " ON ledger" if kind == "TRIGGER" and Chosen.kind == POSTGRESQL else ""
    alone(world.store, f"DROP {kind} {name}{table}")
    assert (f"schema: `{name}` was altered",) == faults(world)


def test_a_trigger_that_does_not_belong_is_named(world: World):
    does = {SQLITE: "BEGIN DELETE FROM spend; END", POSTGRESQL: "EXECUTE FUNCTION refuse('spend')"}[Chosen.kind]
    alone(world.store, f"CREATE TRIGGER quiet AFTER INSERT ON spend {does}")
    assert ("schema: `quiet` does not belong here",) == faults(world)


def test_a_trigger_with_the_name_of_something_that_does_belong_is_named(world: World):
    name, drop, does = {
        SQLITE: ("flows_unfinished", "DROP INDEX flows_unfinished", "BEGIN DELETE FROM spend; END"),
        POSTGRESQL: (
            "clock_was_set_back",
            "DROP TRIGGER clock_was_set_back ON ledger",
            "EXECUTE FUNCTION refuse('spend')",
        ),
    }[Chosen.kind]
    as_it_was = world.store.schema[name].removesuffix(" O")
    for statement in (drop, f"CREATE TRIGGER {name} AFTER INSERT ON spend {does}", as_it_was):
        alone(world.store, statement)
    assert (f"schema: `{name}` was altered",) == faults(world)


def test_without_a_head_the_check_says_what_it_cannot_see(world: World):
    report = verify.verify(world.store, public=PUBLIC)
    assert "without --head: entries cut off at the end" == report.blind
    packet = world.packet("more", "T5")
    world.kernel.decide(packet, deny(packet))
    report = verify.verify(world.store, public=PUBLIC)
    assert f", or others in the place of the 1 after entry {report.head.idx - 1}" in str(report.blind)
    assert None is verify.verify(world.store, report.head).blind
    none = "without --head or --public-key: entries cut off at the end, or a ledger rewritten as a whole"
    assert none == verify.verify(world.store).blind


WINDOWS = ("monitor_windows", "monitor_entries", "monitor_buckets")


def cut_off(db: Stranger, dfid: str, windows: dict[str, list[Row]]) -> None:
    """Undo the last flow everywhere: ledger, tables, counters. `windows`: the rows of the monitors before it."""
    for table, rows in windows.items():
        db.execute(f"DELETE FROM {table}")
        for row in rows:
            db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    db.execute("DELETE FROM case_keys WHERE event_id = (SELECT event_id FROM events WHERE dfid = ?)", (dfid,))
    db.execute("DELETE FROM ledger WHERE dfid = ?", (dfid,))
    db.execute("DELETE FROM events WHERE dfid = ?", (dfid,))
    for table in ("context_snapshots", "policy_proposals", "dim_validations", "attempts", "decision_flows"):
        db.execute(f"DELETE FROM {table} WHERE dfid = ?", (dfid,))


def test_entries_cut_off_at_the_end_are_seen_only_with_a_head(world: World):
    windows = {table: world.store.rows(f"SELECT * FROM {table}") for table in WINDOWS}
    packet = world.packet("last", "T5")
    world.kernel.decide(packet, deny(packet))
    kept = head(world.store)
    with tampering(world) as db:
        cut_off(db, packet.dfid, windows)
        db.hide()
        assert () == faults(world)
        assert (
            f"entry {kept.idx}: missing (the ledger ends at {kept.idx - 1}, the given head is at {kept.idx})",
        ) == faults(world, kept)


def test_entries_cut_off_while_the_tables_stay_are_seen_without_a_head(world: World):
    assert found_after(world, ("DELETE FROM ledger WHERE idx = ?", (head(world.store).idx,)))


@pytest.mark.parametrize("value", ["5", "null", "[]", '"x"', "{}", "1.5", '{"x": []}'])
def test_an_entry_of_whatever_form_is_found_and_named(world: World, value: str):
    """Not only one that lacks something: whoever writes the ledger anew may put anything in any place."""
    rng = seeded(11)
    for kind in world.column("SELECT DISTINCT kind FROM ledger"):
        idx, text = rng.choice(world.store.rows("SELECT idx, body FROM ledger WHERE kind = ?", (kind,)))
        body = json.loads(text)
        names = list(body) if scale(0, 1) else rng.sample(list(body), min(1, len(body)))
        for altered in (value, *(json.dumps(body | {name: json.loads(value)}) for name in names)):
            with tampering(world) as db:
                db.execute("UPDATE ledger SET body = ? WHERE idx = ?", (altered, idx))
                chained(db)
                db.hide()
                found = faults(world)
            named = f"entry {idx}: not an entry this program writes"
            assert altered != value or named in found or kind in ("HALT", "RESUME", "OPERATOR"), (kind, altered, found)


def test_an_older_head_still_holds_after_more_was_written(world: World):
    kept = head(world.store)
    packet = world.packet("later", "T5")
    world.kernel.decide(packet, deny(packet))
    assert () == faults(world, kept)
    assert () == faults(world, Head(0, GENESIS))
    assert ("entry 0: not the entry that the given head names",) == faults(world, Head(0, "f" * 64))


def test_the_check_reads_one_moment_while_decisions_go_on(world: World):
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            number += 1
            world.decide(refund("0.01"), f"busy {number}", "T5")

    thread = threading.Thread(target=write)
    thread.start()
    found = [verify.verify(world.store).faults for _ in range(10)]
    done.set()
    thread.join()
    assert [()] * 10 == found


@pytest.mark.sqlite_alone("pages of its file; the server checks its own")
def test_damaged_pages_are_reported(world: World):
    assert world.store.truncate_log()
    with world.path.open("r+b") as file:
        file.seek(4096 * 12)
        file.write(b"\xff" * 4096 * 3)
    with closing(opened_store(world.path)) as store:
        assert verify.verify(store).faults[0].startswith("database: ")


def test_a_flow_is_read_back_whole(world: World):
    (dfid,) = world.column("SELECT dfid FROM events WHERE event_id = 'unknown'")
    record = verify.flow_record(world.store, str(dfid))
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
    assert None is verify.flow_record(world.store, "flow-99999")


def test_an_announcement_to_void_what_is_settled_is_found(world: World):
    last = head(world.store)
    (dfid,) = world.column("SELECT dfid FROM execution_log WHERE status = 'SUCCESS' LIMIT 1")
    row = (last.idx + 1, world.clock(), "VOIDING", str(dfid), "{}", last.entry_hash)
    found = found_after(
        world, ("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, entry_hash(*row[:5], last.entry_hash)))
    )
    assert (f"entry {last.idx + 1}: not an entry this program writes",) == found
