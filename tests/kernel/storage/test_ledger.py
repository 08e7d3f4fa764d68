"""The ledger: nothing but the next entry gets in, over any connection, and a chain shows what went past that."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from sds.kernel.storage import ledger
from sds.kernel.storage.ledger import GENESIS, Head, entry_hash, rows_digest, verify_chain
from sds.kernel.storage.store import Row, Store
from tests.kernel.durable import World, deny, nonsense, refund
from tests.stores.opened import SQLITE, Chosen, opened_store

ENTRIES = "SELECT idx, at_ms, kind, dfid, body, prev_hash, entry_hash FROM ledger ORDER BY idx"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with closing(opened_store(folder / "k.db")) as made:
        with made.transaction():
            for number in range(1, 4):
                ledger.append(made, number, "DECIDED", f"flow-{number}", {"n": number})
        yield made


@pytest.fixture(params=["the kernel's connection", "a stranger's connection"])
def db(request: pytest.FixtureRequest, store: Store) -> Iterator[sqlite3.Connection]:
    """Triggers belong to the file: they bind a shell that knows none of our settings, too."""
    if Chosen.kind != SQLITE:
        pytest.skip("SQLite's alone: its SQL; `test_postgres_schema` is the same for a server")
    if request.param == "the kernel's connection":
        yield store._db
        return
    with closing(sqlite3.connect(store.path, isolation_level=None)) as made:
        yield made


def entry(store: Store, *, idx: int = 4, dfid: str = "flow-4", prev: str | None = None) -> tuple[object, ...]:
    prev = ledger.head(store).entry_hash if prev is None else prev
    return idx, 4, "DECIDED", dfid, "{}", prev, entry_hash(idx, 4, "DECIDED", dfid, "{}", prev)


INSERT = "INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?)"


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("UPDATE ledger SET at_ms = 0 WHERE idx = 1", "no update"),
        ("UPDATE OR REPLACE ledger SET idx = 1 WHERE idx = 3", "no update"),
        ("UPDATE ledger SET body = body", "no update"),
        ("DELETE FROM ledger WHERE idx = 3", "no delete"),
        ("DELETE FROM ledger", "no delete"),
        ("INSERT OR REPLACE INTO ledger SELECT * FROM ledger WHERE idx = 2", "not the next index"),
        ("REPLACE INTO ledger SELECT * FROM ledger WHERE idx = 3", "not the next index"),
        (
            "INSERT INTO ledger SELECT * FROM ledger WHERE idx = 2 ON CONFLICT (idx) DO UPDATE SET at_ms = 9",
            "not the next index",
        ),
        ("INSERT OR IGNORE INTO ledger SELECT * FROM ledger WHERE idx = 2", "not the next index"),
    ],
)
def test_what_is_written_stays(db: sqlite3.Connection, store: Store, sql: str, why: str):
    before = store.rows(ENTRIES)
    with pytest.raises(sqlite3.IntegrityError, match=f"the ledger is append-only: {why}"):
        db.execute(sql)
    assert before == store.rows(ENTRIES)


@pytest.mark.parametrize("idx", [None, 0, -1, 3, 5, 2**62])
def test_only_the_next_index_is_taken(db: sqlite3.Connection, store: Store, idx: int | None):
    with pytest.raises(sqlite3.IntegrityError, match="not the next index"):
        db.execute(f"INSERT {INSERT}", (idx, *entry(store)[1:]))


@pytest.mark.parametrize("prev", [GENESIS, "", "f" * 64])
def test_only_a_chained_entry_is_taken(db: sqlite3.Connection, store: Store, prev: str):
    with pytest.raises(sqlite3.IntegrityError, match="not chained to the last entry"):
        db.execute(f"INSERT {INSERT}", entry(store, prev=prev))


@pytest.mark.parametrize("column", range(1, 7))
def test_no_column_may_be_empty(db: sqlite3.Connection, store: Store, column: int):
    values = list(entry(store))
    values[column] = None
    with pytest.raises(sqlite3.IntegrityError, match="NOT NULL"):
        db.execute(f"INSERT {INSERT}", values)


def test_a_flow_is_decided_once_and_replacement_cannot_change_that(db: sqlite3.Connection, store: Store):
    """`INSERT OR REPLACE` deletes the older row of a unique index without asking delete triggers."""
    with pytest.raises(sqlite3.IntegrityError, match="this flow is decided"):
        db.execute(f"INSERT OR REPLACE {INSERT}", entry(store, dfid="flow-2"))
    assert [1, 2, 3] == [row[0] for row in store.rows(ENTRIES)]


def test_the_next_chained_entry_is_taken(db: sqlite3.Connection, store: Store):
    db.execute(f"INSERT {INSERT}", entry(store))
    assert ([], Head(4, str(entry(store, prev=str(store.rows(ENTRIES)[2][6]))[6]))) == verify_chain(store.rows(ENTRIES))


def test_a_new_ledger_is_chained_to_genesis(folder: Path):
    with closing(opened_store(folder / "new.db")) as store:
        assert Head(0, GENESIS) == ledger.head(store)
        with store.transaction():
            first = ledger.append(store, 5, "HALT", "", {"by": "me"})
        assert (1, 5, "HALT", "", '{"by":"me"}', GENESIS, first.entry_hash) == store.rows(ENTRIES)[0]


def test_an_entry_that_is_rolled_back_was_never_there(store: Store):
    before = ledger.head(store)
    with suppress(ZeroDivisionError), store.transaction():
        ledger.append(store, 9, "HALT", "", {})
        raise ZeroDivisionError
    assert before == ledger.head(store)


def test_no_two_entries_share_a_hash_form():
    base = entry_hash(12, 3, "A", "b", "{}", GENESIS)
    others = [(1, 23, "A", "b", "{}"), (12, 3, "Ab", "", "{}"), (12, 3, "A", "b", "{ }"), (12, 3, "A", "b\ud800", "{}")]
    assert base not in [entry_hash(*other, GENESIS) for other in others]


def test_no_two_different_rows_share_a_digest():
    rows = [
        (1,), ("1",), (1.0,), (b"1",), (None,), ("None",), ("",), (1, ""), (1, None), (float("inf"),), ("\udcff",), ("ÿ",),
    ]  # fmt: skip
    sets = [[], [()], *([row] for row in rows), [(1,), (2,)], [(1, 2)], [(2,), (1,)]]
    assert len(sets) == len({rows_digest(one) for one in sets})


# As printed in DIR 4.2, line breaks and all.
DIR_4_2 = """
SELECT f.dfid
, f.agent_id
, f.trigger_event
, c.snapshot_id AS context_hash
, p.justification AS agent_reasoning
, p.policy_kind AS proposed_action
, p.confidence
, v.outcome AS validation_result
, v.reason_code AS rejection_reason
, e.idempotency_key
, e.status AS execution_status
FROM decision_flows f
LEFT JOIN context_snapshots c
ON f.dfid = c.dfid
LEFT JOIN policy_proposals p
ON f.dfid = p.dfid
LEFT JOIN dim_validations v
ON f.dfid = v.dfid
LEFT JOIN execution_log e
ON f.dfid = e.dfid
WHERE f.dfid = '550e8400-e29b-41d4-a716-446655440000';
"""


def joined(world: World, dfid: str) -> list[Row]:
    """Ask what DIR 4.2 asks, of the flow with this id."""
    return world.store.rows(DIR_4_2.replace("550e8400-e29b-41d4-a716-446655440000", dfid))


def test_the_join_of_dir_4_2_runs_as_printed(world: World):
    world.decide(deny, "C0")
    packet = world.packet("C1")
    answer = world.kernel.decide(packet, refund()(packet))
    (trigger,) = world.column("SELECT trigger_event FROM decision_flows WHERE dfid = ?", packet.dfid)
    assert ("C1", "T1", ["claim_id", "text", "ticket_id"]) == (
        *(json.loads(str(trigger))[name] for name in ("claim_id", "ticket_id")),
        list(json.loads(str(trigger))),
    )
    assert [
        (
            packet.dfid,
            "claims-agent",
            trigger,
            packet.snapshot.id,
            "NOT_TRAVELLED",
            "REFUND_TICKET",
            None,
            "ACCEPTED",
            None,
            world.rail.sent[0],
            "SUCCESS",
        )
    ] == joined(world, answer.dfid)


def test_the_join_tells_of_a_rejection(world: World):
    packet = world.packet()
    for _ in range(3):
        world.kernel.decide(packet, nonsense(packet))
    (row,) = joined(world, packet.dfid)
    assert (None, None, None, "REJECTED", "SCHEMA_INVALID", None, None) == row[4:]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_entries_are_read_a_few_at_a_time_and_none_is_left_out(
    store: Store, at_once: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ledger, "READ_AT_ONCE", at_once)
    asked = list[int]()
    rows = store.rows
    monkeypatch.setattr(store, "rows", lambda *of: asked.append(len(found := rows(*of))) or found)
    assert rows(ENTRIES) == list(ledger.entries(store))
    assert max(asked) <= at_once
