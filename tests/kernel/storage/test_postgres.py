"""The store in PostgreSQL: the same promises as the file's, and what a server can do that a file cannot."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.storage import ledger
from sds.kernel.storage.postgres import schema as schemas
from sds.kernel.storage.postgres import store as stores
from sds.kernel.storage.postgres.connections import Url
from sds.kernel.storage.postgres.dialect import translated
from sds.kernel.storage.postgres.store import PostgresStore
from sds.kernel.storage.sqlite import SqliteStore, statements
from sds.kernel.storage.sqlite import expected_schema as sqlite_schema
from tests.postgres import fresh_schema, server_url


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


def by_hand(statement: str, schema: str = "public") -> list[tuple[Any, ...]]:
    with psycopg.connect(server_url(), autocommit=True) as db:
        db.execute(f"SET search_path = {schema}")
        done = db.execute(statement)
        return done.fetchall() if done.description else []


def end_connections(schema: str) -> None:
    """Have the server end every connection to a record, as a restart does."""
    by_hand(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{schema}'")


def test_a_store_has_every_table_index_and_trigger_that_sqlites_has(store: PostgresStore):
    assert set() == {*sqlite_schema()} - {*store.schema}
    assert store.expected_schema == store.schema
    assert [] == store.damage()


def test_tables_have_the_columns_of_sqlites_in_the_same_order(store: PostgresStore, folder: Path):
    with closing(SqliteStore(folder / "k.db")) as other:
        tables = [line.split()[2] for line in statements() if line.lstrip().startswith("CREATE TABLE")]
        assert len(tables) > 10
        assert {name: other.columns(name) for name in tables} == {name: store.columns(name) for name in tables}


def test_a_block_that_raises_leaves_nothing(store: PostgresStore):
    with suppress(ZeroDivisionError), store.transaction():
        put(store)
        raise ZeroDivisionError
    assert [] == drawn(store)


def test_a_statement_that_fails_takes_its_whole_transaction_with_it(store: PostgresStore):
    def both() -> None:
        with store.transaction():
            put(store, "a", 1)
            put(store, "b", -1)

    with pytest.raises(StoreError, match='violates check constraint "resources_drawn_check"'):
        both()
    assert [] == drawn(store)


def test_a_failure_that_was_let_pass_cannot_be_committed(store: PostgresStore):
    def careless() -> None:
        with store.transaction():
            put(store, "a")
            with suppress(StoreError):
                put(store, "a")

    with pytest.raises(StoreError, match="a statement of the transaction had failed"):
        careless()
    assert [] == drawn(store)


def test_a_transaction_inside_a_transaction_is_refused_and_undoes_both(store: PostgresStore):
    def nested() -> None:
        with store.transaction():
            put(store)
            with store.transaction():
                pass

    with pytest.raises(StoreError, match="within a transaction"):
        nested()
    assert [] == drawn(store)


@pytest.mark.parametrize("value", [2**70, "\udcff", "a\0b"])
def test_a_value_that_no_table_can_hold_is_refused_like_any_other_fault(store: PostgresStore, value: object):
    with pytest.raises(StoreError, match="the store cannot hold such a value: "), store.transaction():
        store.insert("resources", resource=str(value), epoch=value if isinstance(value, int) else 1, drawn=0)
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
    [
        "-> '$.a'",
        "->> '$.a'",
        "-> '$.z'",
        "-> '$.w'",
        "->> '$.w'",
        "->> '$.a.b[2]'",
        "->> '$.n'",
        "-> '$.n'",
        "->> '$.gone'",
        "->> '$.a.b[0]'",
        "->> '$.t'",
        "->> '$.f'",
    ],
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


def test_what_only_sqlites_planner_is_told_is_left_out():
    assert "SELECT 1 FROM a JOIN b ON b.x LIKE '%%' WHERE a.y = %s" == translated(
        "SELECT 1 FROM a INDEXED BY i CROSS JOIN b ON b.x LIKE '%' WHERE a.y = ?"
    )


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("UPDATE ledger SET at_ms = 1", "the ledger is append-only: no update"),
        ("DELETE FROM ledger", "the ledger is append-only: no delete"),
        ("TRUNCATE ledger", "the ledger is append-only: no update"),
        ("DELETE FROM checkpoints", "a checkpoint is final: no delete"),
        ("UPDATE erasures SET who = ''", "an erasure is final: no update"),
        ("INSERT INTO ledger VALUES (2, 1, 'HALT', '', '{}', '', '')", "not the next index"),
        ("INSERT INTO ledger VALUES (1, 1, 'HALT', '', '{}', 'x', '')", "not chained to the last entry"),
        ("INSERT INTO ledger VALUES (NULL, 1, 'HALT', '', '{}', 'x', '')", "not the next index"),
    ],
)
def test_the_ledger_only_grows_whoever_writes(schema: str, store: PostgresStore, statement: str, why: str):
    with pytest.raises(psycopg.errors.IntegrityError, match=why):
        by_hand(statement, schema)


def test_a_clock_that_was_set_back_is_written_down():
    with closing(PostgresStore(server_url(), fresh_schema())) as store:
        with store.transaction():
            for at_ms in (1_000_000, 999_000, 100_000):
                ledger.append(store, at_ms, "HALT", "", {})
        assert [(3, 999_000, 100_000)] == store.rows("SELECT * FROM clock_steps")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("DROP TRIGGER ledger_no_update ON ledger", "schema: `ledger_no_update` is not as it was made"),
        ("ALTER TABLE ledger DISABLE TRIGGER ledger_next", "schema: `ledger_next` is not as it was made"),
        ("ALTER TABLE resources DROP CONSTRAINT resources_drawn_check", "schema: `resources` is not as it was made"),
        ("DROP INDEX one_live_reservation", "schema: `one_live_reservation` is not as it was made"),
        ("CREATE TABLE more (x int)", "schema: `more` does not belong here"),
        ("CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'", "refuse()"),
        ("ALTER TABLE agents DISABLE TRIGGER ALL", "database: the constraints of agents are switched off"),
    ],
)
def test_whoever_changes_the_schema_is_found(change: str, fault: str):
    schema = fresh_schema()
    with closing(PostgresStore(server_url(), schema)) as store:
        by_hand(change, schema)
        assert any(fault in each for each in verify.verify(store).faults)


def test_threads_and_stores_take_turns_and_lose_nothing(schema: str, store: PostgresStore):
    with store.transaction():
        put(store)

    def add(own: PostgresStore) -> None:
        for _ in range(10):
            with own.transaction():
                own.run("UPDATE resources SET drawn = ?", (own.value("SELECT drawn FROM resources") + 1,))

    with closing(PostgresStore(server_url(), schema)) as other:
        threads = [threading.Thread(target=add, args=(each,)) for each in (store, other) * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [60] == drawn(store)


def test_reading_waits_for_no_transaction_of_another_thread_and_sees_what_was_committed(store: PostgresStore):
    begun, read = threading.Event(), threading.Event()

    def write() -> None:
        with store.transaction():
            put(store, drawn=7)
            assert [7] == drawn(store)  # its own
            begun.set()
            assert read.wait(20), "reading waited for the transaction"

    writer = threading.Thread(target=write)
    writer.start()
    assert begun.wait(20)
    assert [] == drawn(store)
    read.set()
    writer.join()
    assert [7] == drawn(store)


def test_a_frozen_reader_sees_one_moment_and_cannot_write(store: PostgresStore):
    with store.frozen() as reader:
        assert 0 == reader.value("SELECT count(*) FROM resources")
        with store.transaction():
            put(store)
        assert 0 == reader.value("SELECT count(*) FROM resources")
        with pytest.raises(StoreError, match="read-only transaction"):
            reader.rows("DELETE FROM meta RETURNING key")
    assert 1 == store.value("SELECT count(*) FROM resources")


def test_one_at_a_time_does_what_has_a_name(schema: str, store: PostgresStore):
    with closing(PostgresStore(server_url(), schema)) as other:
        with store.exclusively("recovery") as first, other.exclusively("recovery") as second:
            assert (True, False) == (first, second)
            with other.exclusively("monitors") as another:
                assert another
        with other.exclusively("recovery") as again:
            assert again


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
    assert "is PostgreSQL running" in caught.value.hint
    assert [] == drawn(store)


class LosesReply:
    """A connection that commits, and whose answer is lost."""

    def __init__(self, db: Any) -> None:
        self._db = db

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, sql: str, *values: Any, **more: Any) -> Any:
        done = self._db.execute(sql, *values, **more)
        if sql == "COMMIT":
            self._db.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        return done


def test_a_commit_whose_end_is_unknown_is_an_error_and_the_record_tells(store: PostgresStore):
    def lost() -> None:
        with store.transaction():
            put(store, drawn=9)
            store._own.db = LosesReply(store._own.db)

    with pytest.raises(StoreError, match="lost while it committed: whether it did, the record says"):
        lost()
    assert [9] == drawn(store)


def test_what_the_store_could_not_commit_is_done_again_a_few_times(store: PostgresStore):
    tries: list[int] = []

    def work() -> int:
        tries.append(1)
        if len(tries) < 3:
            store.run("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = 'serialization_failure'; END $$")
        return len(tries)

    def hopeless() -> None:
        tries.append(1)
        store.run("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = 'deadlock_detected'; END $$")

    assert 3 == store.atomically(work)
    tries.clear()
    with pytest.raises(StoreError, match="the store refused: again"):
        store.atomically(hopeless)
    assert stores.AGAIN_MAX == len(tries)


def test_a_writer_waits_only_so_long_for_another(schema: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sds.kernel.storage.postgres.connections.WAIT_S", 1.0)
    with closing(PostgresStore(server_url(), schema)) as other, store.transaction():
        begun = time.monotonic()
        with pytest.raises(StoreError, match="lock timeout") as caught, other.transaction():
            pass
        assert 0.9 < time.monotonic() - begun < 10
    assert "another program holds it: end that, or try again" == caught.value.hint


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("postgresql://sds:hunter2@/nowhere?host={host}", 'database "nowhere" does not exist'),
        ("postgresql://sds:hunter2@127.0.0.1:1/x", "Connection refused"),
        ("postgresql://nobody:hunter2@/postgres?host={host}", 'role "nobody" does not exist'),
    ],
)
def test_a_server_that_cannot_be_had_is_one_line_without_the_password(url: str, why: str):
    host = server_url().partition("host=")[2]
    with pytest.raises(StoreError, match=why) as caught:
        PostgresStore(url.format(host=host).replace("sds:", "postgres:"), fresh_schema())
    assert 1 == len(str(caught.value).splitlines())
    assert "cannot be opened as a decision store" in str(caught.value)
    assert "hunter2" not in f"{caught.value} {caught.value.hint}"


def test_an_address_shows_no_password():
    url = Url("postgresql://ada:hunter2@db.example:5433/sds")
    assert "postgresql://db.example:5433/sds" == url.name
    assert "hunter2" not in repr(url)
    with pytest.raises(UsageError, match="the URL of the store cannot be read") as caught:
        Url("postgresql://ada:hunter%2@db.example/sds")
    assert caught.value.__cause__ is None


def test_the_schema_of_another_program_is_refused_and_left_as_it_was():
    schema = fresh_schema()
    by_hand(f"CREATE SCHEMA {schema}")
    by_hand("CREATE TABLE songs (title text)", schema)
    with pytest.raises(StoreError, match="it is the schema of another program"):
        PostgresStore(server_url(), schema)
    assert [("songs",)] == by_hand(f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'")


def test_a_record_of_another_version_is_refused():
    schema = fresh_schema()
    PostgresStore(server_url(), schema).close()
    by_hand("UPDATE meta SET value = '999' WHERE key = 'schema_version'", schema)
    with pytest.raises(StoreError, match="it has schema version `999`, this program needs"):
        PostgresStore(server_url(), schema)


def test_an_older_record_gets_what_it_lacks_and_keeps_the_rest():
    schema = fresh_schema()
    PostgresStore(server_url(), schema).close()
    by_hand("DROP TABLE monitor_windows, monitor_entries; DROP INDEX flows_adopted", schema)
    by_hand("UPDATE meta SET value = '3' WHERE key = 'schema_version'", schema)
    with closing(PostgresStore(server_url(), schema)) as store:
        assert store.expected_schema == store.schema


def test_several_may_make_the_same_record_at_once():
    schema, failed = f"sds_{secrets.token_hex(4)}", list[str]()

    def make() -> None:
        try:
            PostgresStore(server_url(), schema).close()
        except StoreError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failed


def test_every_trigger_of_the_file_has_its_counterpart():
    wanted = {line.split()[2] for line in statements() if line.lstrip().startswith("CREATE TRIGGER")}
    made = {name for name, text in schemas.named_objects("s") if text.startswith("CREATE TRIGGER")}
    assert wanted == made
