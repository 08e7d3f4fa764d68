"""The store in PostgreSQL: the same promises as the file's, and what a server can do that a file cannot."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sds.kernel.audit.orders import PAGES
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.flow.in_flight import ORDER, UNFINISHED
from sds.kernel.flow.monitored import REACTIVATED
from sds.kernel.flow.observe import asking_for_open
from sds.kernel.storage.ledger import KEYS_LOST
from sds.kernel.storage.postgres import store as stores
from sds.kernel.storage.postgres.connections import Pool, Url
from sds.kernel.storage.postgres.pipelined import Connection
from sds.kernel.storage.postgres.store import PostgresStore
from sds.kernel.storage.sqlite import SqliteStore, statements
from sds.kernel.storage.sqlite import expected_schema as sqlite_schema
from tests.stores.pooler import pooled
from tests.stores.server import by_hand, fresh_schema, role_with, server_url


@pytest.fixture(scope="module")
def schema() -> str:
    return fresh_schema()


@pytest.fixture
def store(schema: str) -> Iterator[PostgresStore]:
    with closing(PostgresStore(server_url(), schema)) as made:
        yield made
        with made.transaction():
            made.run("DELETE FROM resources")


def put(store: PostgresStore, name: str = "r", drawn: object = 0) -> None:
    store.insert("resources", resource=name, epoch=0, drawn=drawn)


def drawn(store: PostgresStore) -> list[int]:
    return [row[0] for row in store.rows("SELECT drawn FROM resources ORDER BY resource")]


def end_connections(schema: str) -> None:
    """Have the server end every connection to a record, as a restart does."""
    by_hand(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = '{schema}'")


def test_a_store_has_every_table_index_and_trigger_that_sqlites_has(store: PostgresStore):
    assert set() == {*sqlite_schema()} - {*store.schema}
    assert store.expected_schema == store.schema
    assert [] == store.damage()


def test_tables_have_the_columns_of_sqlites_in_the_same_order(store: PostgresStore, folder: Path):
    with closing(SqliteStore(folder / "k.db")) as other:
        tables = [line.split()[2] for line in statements() if line.lstrip().startswith("CREATE TABLE")]
        assert len(tables) > 10
        assert {name: other.columns(name) for name in tables} == {name: store.columns(name) for name in tables}


def test_what_follows_a_refusal_is_not_taken_to_be_prepared(store: PostgresStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sds.kernel.storage.postgres.pipelined.PREPARED_MAX", 4)
    for value, found in ((-1, []), (1, [2])):
        with suppress(StoreError), store.transaction():
            put(store, drawn=value)
            store.write("UPDATE resources SET drawn = drawn + ? WHERE resource = 'r'", (1,))
        assert found == drawn(store)


def test_a_failure_that_was_let_pass_cannot_be_committed(store: PostgresStore):
    def careless() -> None:
        with store.transaction():
            put(store, "a")
            with suppress(StoreError):
                store.run("INSERT INTO resources VALUES ('a', 0, 0)")

    with pytest.raises(StoreError, match="a statement of the transaction had failed"):
        careless()
    assert [] == drawn(store)


@pytest.mark.parametrize("value", [2**70, "\udcff", "a\0b"])
def test_a_value_that_no_table_can_hold_is_refused_like_any_other_fault(store: PostgresStore, value: object):
    with pytest.raises(StoreError, match="the store cannot hold such a value: "), store.transaction():
        store.insert("resources", resource=str(value), epoch=value if isinstance(value, int) else 1, drawn=0)
    assert [] == drawn(store)


def test_what_was_written_is_there_for_what_reads_and_counts_behind_it(store: PostgresStore):
    with store.transaction():
        put(store, "a", 1)
        put(store, "b", 2)
        assert [1, 2] == drawn(store)
        put(store, "c", 3)
        assert 3 == store.run("UPDATE resources SET drawn = drawn + 1")
    assert [2, 3, 4] == drawn(store)


@pytest.mark.parametrize("behind", ["read", "counted", "committed"])
def test_what_was_refused_is_named_by_whatever_comes_behind_it(store: PostgresStore, behind: str):
    def careless() -> None:
        with store.transaction():
            put(store, "a")
            put(store, "a")
            if behind == "read":
                drawn(store)
            elif behind == "counted":
                store.run("UPDATE resources SET drawn = 5")

    with pytest.raises(
        StoreError, match='the store refused: duplicate key value violates unique constraint "resources_pkey"'
    ):
        careless()
    assert [] == drawn(store)


def test_numbers_and_truths_are_integers_whatever_the_server_makes_of_them(store: PostgresStore):
    with store.transaction():
        put(store, "a", 2**62)
        put(store, "b", True)
    row = store.row("SELECT SUM(drawn), COUNT(*), MAX(drawn) > 1, CAST(0.5 AS NUMERIC) FROM resources")
    assert (2**62 + 1, 2, 1, 0.5) == row
    assert [int, int, int, float] == [type(value) for value in row or ()]


JSON = r'{"a":{"b":[1,2.5,"x"]},"t":true,"f":false,"n":null,"z":"p\u0000q","w":"\\u0000","k":"v\u0000"}'


@pytest.mark.parametrize(
    "asked",
    [f"-> '$.{path}'" for path in ("a", "z", "w", "n")]
    + [f"->> '$.{path}'" for path in ("a", "w", "a.b[2]", "n", "gone", "a.b[0]", "t", "f")],
)
def test_parts_of_json_are_what_sqlite_says_with_a_nul_in_it_too(store: PostgresStore, folder: Path, asked: str):
    sql = f"SELECT CAST(? AS TEXT) {asked}"
    with closing(SqliteStore(folder / "k.db")) as other:
        found = other.value(sql, (JSON,))
    assert (None if found is None else str(found)) == store.value(sql, (JSON,))


@pytest.mark.parametrize("path", ["$.a", "$.t", "$.f", "$.n", "$.a.b", "$.a.b[0]", "$.a.b[1]", "$.z", "$.gone"])
def test_types_of_json_are_what_sqlite_says(store: PostgresStore, folder: Path, path: str):
    sql = f"SELECT json_type(CAST(? AS TEXT), '{path}')"
    with closing(SqliteStore(folder / "k.db")) as other:
        assert other.value(sql, (JSON,)) == store.value(sql, (JSON,))


def test_what_is_no_json_is_none(store: PostgresStore):
    sql = "SELECT json_valid(CAST(? AS TEXT))"
    assert [1, 0, 0] == [store.value(sql, (text,)) for text in (JSON, "{", "")]


def test_names_are_ordered_by_their_bytes(store: PostgresStore):
    with store.transaction():
        for name in ("b", "a", "B", "ä", "_", "Z"):
            put(store, name)
    assert ["B", "Z", "_", "a", "b", "ä"] == [
        row[0] for row in store.rows("SELECT resource FROM resources ORDER BY resource")
    ]


def test_nothing_is_among_none(store: PostgresStore):
    with store.transaction():
        put(store)
    assert [] == store.rows("SELECT drawn FROM resources WHERE resource IN ()")


def test_a_connection_that_died_is_replaced(schema: str, store: PostgresStore):
    with store.transaction():
        put(store, drawn=3)
    end_connections(schema)
    assert [3] == drawn(store)
    end_connections(schema)
    with store.transaction():
        store.run("UPDATE resources SET drawn = 4")
    assert [4] == drawn(store)


def test_a_transaction_whose_connection_dies_has_done_nothing(schema: str, store: PostgresStore):
    def cut() -> None:
        with store.transaction():
            put(store)
            end_connections(schema)
            put(store, "s")

    with pytest.raises(StoreError) as caught:
        cut()
    assert "check that PostgreSQL is running" in caught.value.hint
    assert [] == drawn(store)


class LosesReply:
    """A connection that commits, and whose answer is lost."""

    def __init__(self, db: Any) -> None:
        self._db = db

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def together(self, *asked: Any) -> Any:
        done = self._db.together(*asked)
        if asked[-1][0] == "COMMIT":
            self._db.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        return done


def test_a_commit_whose_end_is_unknown_is_an_error_and_the_record_tells(store: PostgresStore):
    def lost() -> None:
        with store.transaction():
            put(store, drawn=9)
            assert [9] == drawn(store)  # nothing waits any more: the commit goes alone
            own = store._transaction_of_thread()
            assert own is not None
            own._db = LosesReply(own._db)  # type: ignore[assignment]

    with pytest.raises(StoreError, match="lost during the commit: the record shows whether it was made"):
        lost()
    assert [9] == drawn(store)


def test_a_writer_waits_only_so_long_for_another(schema: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sds.kernel.storage.postgres.connections.WAIT_S", 1.0)
    with closing(PostgresStore(server_url(), schema)) as other, store.transaction():
        begun = time.monotonic()
        with pytest.raises(StoreError, match="lock timeout") as caught, other.transaction():
            pass
        assert 0.9 < time.monotonic() - begun < 10
    assert "another program holds the record: end that program, or try again" == caught.value.hint


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_a_transaction_sees_what_was_committed_before_its_lock_whatever_the_server_sets(
    schema: str, store: PostgresStore, isolation: str
) -> None:
    """So does what it asks first, which goes along with begin and lock, prepared by the driver by then or not."""
    found = list[object]()

    def ask() -> None:
        with made.transaction("SELECT drawn, current_setting('transaction_isolation') FROM resources") as rows:
            found.append(rows)

    locked = f"SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory' AND application_name = '{schema}'"
    with (
        role_with(f"default_transaction_isolation = '{isolation}'") as url,
        closing(PostgresStore(url, schema)) as made,
    ):
        for _ in range(8):
            ask()
        waits = threading.Thread(target=ask)
        with store.transaction():
            waits.start()
            assert any(by_hand(locked) or time.sleep(0.01) for _ in range(2_000))
            put(store, drawn=3)
        waits.join()
    assert [*[[]] * 8, [(3, "read committed")]] == found


def test_a_host_that_is_gone_is_noticed_within_seconds_unless_the_url_says_otherwise() -> None:
    usual, own = Url("postgresql://db.example/sds"), Url("postgresql://db.example/sds?tcp_user_timeout=60000")
    assert "tcp_user_timeout=10000" in usual.conninfo
    assert "keepalives_idle=10" in usual.conninfo
    assert "tcp_user_timeout=60000" in own.conninfo


def test_a_connection_pooler_is_refused_for_it_may_hand_over_a_connection_to_another_record(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pooled(server_url()) as pooler:
        with psycopg.connect(pooler) as db:
            assert (1,) == db.execute("SELECT 1").fetchone()
        with pytest.raises(UsageError, match="a connection pooler answers, not PostgreSQL itself"):
            PostgresStore(pooler, schema)
        with pytest.raises(UsageError, match="a connection pooler"):
            stores.look_at(pooler, schema)
        monkeypatch.setattr("sds.kernel.storage.postgres.connections.WAIT_S", 0.5)
        pool = Pool(Url(pooler), schema)
        with closing(pool), pytest.raises(StoreError, match="gives no connection"):
            pool.take()


def test_a_record_is_another_once_its_schema_was_replaced_and_not_because_connections_ended() -> None:
    schema = fresh_schema()
    with closing(PostgresStore(server_url(), schema)) as store:
        before = store.generation
        with store.transaction():
            assert before == store.generation
        end_connections(schema)
        assert before == store.generation
        assert re.fullmatch("[0-9]+/[0-9A-F]{8}", before.timeline)
        assert before.began == str(by_hand("SELECT pg_postmaster_start_time()::text")[0][0])
        by_hand(f"DROP SCHEMA {schema} CASCADE")
        with closing(PostgresStore(server_url(), schema)):
            assert before != (now := store.generation)
            with store.transaction():
                assert now == store.generation
            assert not now.replaced(before)


def test_a_select_that_writes_is_refused_by_the_server(store: PostgresStore):
    for statement in ("SELECT 1 AS x INTO made", "SELECT * FROM meta FOR UPDATE"):
        with pytest.raises(StoreError, match="read-only transaction"):
            store.rows(statement)
    with store.transaction():
        put(store)
    assert [0] == drawn(store)


def test_a_page_of_orders_is_read_from_where_it_begins(store: PostgresStore):
    def planned(db: Connection) -> str:
        db.together(("SET LOCAL enable_sort = off", ()))  # a record of this size is read whole unless that is dear
        done = db.together((f"EXPLAIN (COSTS OFF) {PAGES[1]}", ("claims", 0, 0, "", 1 << 53, "", 9)))
        return "\n".join(row[0] for row in done.rows)

    with store.transaction():
        plan = store._on_connection(planned).partition("SubPlan")[0]
    assert "orders_by_end" in plan
    assert "Sort" not in plan


SAGAS = """
INSERT INTO sagas SELECT 'saga-' || n, 'S', '[]', '[]', 'ENDED', NULL FROM generate_series(1, 20000) AS n;
INSERT INTO decision_flows SELECT 'flow-' || n, 'a', '{}', NULL, 'claims', 'e' || n, 'c', 0, n,
    CASE WHEN n % 1000 > 0 THEN 'CLOSED' ELSE 'ACTIVE' END, NULL, n FROM generate_series(1, 20000) AS n
"""


def test_recovery_reads_no_sagas_that_have_ended():
    schema = fresh_schema()
    with closing(PostgresStore(server_url(), schema)) as store:
        by_hand(f"SET session_replication_role = replica; {SAGAS}; ANALYZE sagas; ANALYZE decision_flows", schema)
        asked = f"EXPLAIN (COSTS OFF) {UNFINISHED}", ("claims",)
        plan = "\n".join(row[0] for row in store._on_connection(lambda db: db.together(asked).rows))
        assert 20 == len(store.rows(UNFINISHED, ("claims",)))
    assert "flows_unfinished" in plan
    assert "Seq Scan on sagas" not in plan
    assert "Seq Scan on decision_flows" not in plan


LONG = """
INSERT INTO ledger SELECT n, n, CASE WHEN n % 100 > 0 THEN 'DECIDED' ELSE 'AGENT' END,
    CASE WHEN n % 100 > 0 THEN 'flow-' || n ELSE '' END, '{"agent_id":"a' || n % 7 || '","status":"ACTIVE"}', '', n::text
FROM generate_series(1, 20000) AS n
"""


def plan(store: PostgresStore, sql: str, values: tuple[Any, ...]) -> str:
    asked = f"EXPLAIN (COSTS OFF) {sql}", values
    return "\n".join(row[0] for row in store._on_connection(lambda db: db.together(asked).rows))


def test_what_operators_did_is_found_by_its_index_in_a_long_ledger():
    schema = fresh_schema()
    with closing(PostgresStore(server_url(), schema)) as store:
        by_hand(f"SET session_replication_role = replica; {LONG}; ANALYZE ledger", schema)
        assert 19_900 == store.value(REACTIVATED, ("a6",))
        for sql, values in ((KEYS_LOST, ()), (REACTIVATED, ("a6",))):
            found = plan(store, sql, values)
            assert "ledger_acts" in found
            assert "Seq Scan" not in found


KNOWN = """
INSERT INTO resources SELECT 'r-' || n, 2, 0 FROM generate_series(1, 800) AS n;
INSERT INTO reservations SELECT 'flow-' || n, 'r-' || n, 1, 'settled' FROM generate_series(1, 800) AS n
"""


def test_a_decision_reads_its_own_resources_not_all_that_are_known_or_were_ever_held():
    """Until the server cleans it, the index of what is held still has what was held before."""
    schema = fresh_schema()
    with closing(PostgresStore(server_url(), schema)) as store:
        by_hand(KNOWN, schema)
        reserving = plan(store, *asking_for_open("flow-1", "a1", "", ("r-1", "r-2"), ()))
        assert "one_live_reservation" in reserving
        assert "Index Cond: (resource = u.resource)" in reserving
        settling = plan(store, ORDER, ("flow-1",))
        assert "Index Cond: (resource = r.resource)" in settling
        assert "Seq Scan on resources" not in settling
