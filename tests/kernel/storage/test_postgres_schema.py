"""A record's schema in PostgreSQL: made whole, added to, compared; and servers that cannot be had."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.storage.postgres import schema as schemas
from sds.kernel.storage.postgres.connections import Url, connected
from sds.kernel.storage.postgres.dialect import translated
from sds.kernel.storage.postgres.pipelined import Connection
from sds.kernel.storage.postgres.store import PostgresStore, look_at, records_in
from sds.kernel.storage.sqlite_schema import statements
from tests.stores.server import by_hand, fresh_schema, own_database, server_url, user_with_a_schema


@pytest.fixture(scope="module")
def schema() -> str:
    made = fresh_schema()
    PostgresStore(server_url(), made).close()
    return made


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
def test_the_ledger_only_grows_whoever_writes(schema: str, statement: str, why: str):
    with pytest.raises(psycopg.errors.IntegrityError, match=why):
        by_hand(statement, schema)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("DROP TRIGGER ledger_no_update ON ledger", "schema: `ledger_no_update` was altered"),
        ("ALTER TABLE ledger DISABLE TRIGGER ledger_next", "schema: `ledger_next` was altered"),
        ("ALTER TABLE resources DROP CONSTRAINT resources_drawn_check", "schema: `resources` was altered"),
        ("DROP INDEX one_live_reservation", "schema: `one_live_reservation` was altered"),
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


def test_a_server_that_was_long_away_is_found_although_nobody_asks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("psycopg_pool.base.AttemptWithBackoff.INITIAL_DELAY", 600.0)  # as after a long while
    monkeypatch.setattr("sds.kernel.storage.postgres.connections.WAIT_S", 0.2)
    schema, host = fresh_schema(), Path(server_url().partition("host=")[2])
    with TemporaryDirectory() as folder:
        (way := Path(folder, ".s.PGSQL.5432")).symlink_to(host / way.name)
        with closing(PostgresStore(f"postgresql://postgres@/postgres?host={folder}", schema)) as store:
            way.unlink()
            ended = f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = '{schema}'"
            with pytest.raises(StoreError, match="gives no connection within"):
                # The pool may still have been opening its first connection
                all((by_hand(ended), store.value("SELECT 1")) for _ in range(100))
            given_up = (caplog.text.count("reconnection attempt") >= 8 or time.sleep(0.1) for _ in range(100))
            assert any(given_up), "the pool gave up for good"
            way.symlink_to(host / way.name)
            here = f"SELECT count(*) FROM pg_stat_activity WHERE application_name = '{schema}'"
            assert any(by_hand(here)[0][0] or time.sleep(0.1) for _ in range(100))
            assert 1 == store.value("SELECT 1")


@pytest.mark.parametrize("look", [look_at, records_in, PostgresStore])
def test_a_server_that_ends_once_it_is_asked_is_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch, look: Any):
    def ended(*given: Any, **named: Any) -> Connection:
        db = connected(*given, **named)
        by_hand(f"SELECT pg_terminate_backend({db.info.backend_pid}, 5000)")
        return db

    monkeypatch.setattr("sds.kernel.storage.postgres.store.connected", ended)
    with pytest.raises(StoreError):
        look(server_url(), fresh_schema())


def test_an_address_shows_no_password():
    url = Url("postgresql://ada:hunter2@db.example:5433/sds")
    assert "postgresql://db.example:5433/sds" == url.name
    assert "hunter2" not in repr(url)
    with pytest.raises(UsageError, match="the URL of the store cannot be read") as caught:
        Url("postgresql://ada:hunter%2@db.example/sds")
    assert caught.value.__cause__ is None


# Passwords that are not encoded, or stand where none belongs. libpq takes parts of them for a host, a port or a name.
TORN = (
    "postgresql://ada:sekr@dock/pawl@db.example/sds",
    "postgresql://ada:sekr/dock@db.example/sds",
    "postgresql://ada:77/dock@db.example/sds",
    "postgresql://ada:sekr?x@dock@db.example/sds",
    "postgresql://ada:sekr@@dock@db.example/sds",
    "postgresql://ada:sekr/sds",
    "postgresql://ada:7777777/sds",
    "postgresql://ada@db.example/sds;password=sekr",
    "postgresql://ada@db.example/sds&password=sekr",
    "postgresql://ada@db.example;password=sekr/sds",
    "postgresql://ada;password=sekr@db.example/sds",
    "postgresql://ada%3Asekr@db.example/sds",
    "postgresql://ada@db.example/sds?sslmode=require;password=sekr",
    "postgresql://ada@db.example/sds?dbname=password%3Dsekr",
    "postgresql://ada:sekr%2@db.example/sds",
    "postgresql://ada:sekr dock@db.example/sds",
    "postgresql://ada@db.example/sds?password=sekr&dock",
    "postgresql://ada@one.example:5432,two.example:sekr/sds",
)
# What may be a password's, in any of them
SECRETS = ("sekr", "dock", "pawl", "77", "password=")


@pytest.mark.parametrize("url", TORN)
def test_an_address_whose_password_may_be_torn_is_refused_and_none_of_it_said(url: str):
    with pytest.raises(UsageError, match="the URL of the store cannot be read") as caught:
        Url(url)
    said = f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
    assert [] == [each for each in SECRETS if each in said]


@pytest.mark.parametrize(
    ("url", "name", "password"),
    [
        ("postgresql://ada:p%40ss%2Fw%3Ax@db.example/sds", "postgresql://db.example/sds", "p@ss/w:x"),
        ("postgresql://ada%40corp:p:s=;&?w@db.example/sds", "postgresql://db.example/sds", "p:s=;&?w"),
        ("postgresql://ada@db.example/sds?password=p@ss/w", "postgresql://db.example/sds", "p@ss/w"),
        ("postgresql://ada:pw@[::1]:5433/sds?sslmode=require", "postgresql://::1:5433/sds", "pw"),
        ("postgresql://ada:pw@one:5432,two:5433/sds", "postgresql://one,two:5432,5433/sds", "pw"),
        ("postgresql:///sds?host=/run/pg,/run/pg2&user=a@b", "postgresql:///run/pg,/run/pg2/sds", None),
    ],
)
def test_an_address_that_can_be_read_one_way_is_read(url: str, name: str, password: str | None):
    read = Url(url)
    assert (name, password) == (read.name, read.parameters.get("password"))


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
    with pytest.raises(StoreError, match="it has schema version `999`, of a newer version of this program") as caught:
        PostgresStore(server_url(), schema)
    assert ("run the version" in caught.value.hint, caught.value.retryable) == (True, False)


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        (3, "DROP TABLE monitor_windows, monitor_entries; DROP INDEX flows_adopted, flows_by_opening"),
        (5, "DROP INDEX flows_by_opening"),
        (6, "DROP INDEX snapshots_by_key_and_time; CREATE INDEX snapshots_by_key ON context_snapshots (dfid)"),
        (7, "DROP INDEX ledger_acts, flows_by_parent, reversals_by_saga, reversals_open"),
        (
            8,
            "DROP INDEX orders_by_end, flows_of_statement, flows_waiting; CREATE INDEX flows_escalated ON events (gate)",
        ),
    ],
)
def test_an_older_record_gets_what_it_lacks_and_keeps_the_rest(version: int, lacks: str):
    schema = fresh_schema()
    PostgresStore(server_url(), schema).close()
    by_hand(lacks, schema)
    by_hand(f"UPDATE meta SET value = '{version}' WHERE key = 'schema_version'", schema)
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


def test_what_is_for_sqlites_planner_alone_is_left_out():
    assert b"SELECT 1 FROM a JOIN b ON b.x LIKE '%' WHERE a.y = $1" == translated(
        "SELECT 1 FROM a INDEXED BY i CROSS JOIN b ON b.x LIKE '%' WHERE a.y = ?"
    )


def test_a_schema_that_was_made_beforehand_is_filled_by_a_user_who_may_not_make_one() -> None:
    with own_database() as url, user_with_a_schema(url, "sds_claims") as own:
        with pytest.raises(StoreError, match="permission denied"):
            PostgresStore(own, "sds_other")
        for name in ("a", "b"):
            with closing(PostgresStore(own, "sds_claims")) as store, store.transaction():
                store.insert("resources", resource=name, epoch=0, drawn=0)
        with closing(PostgresStore(url, "sds_claims")) as store:
            assert store.expected_schema == store.schema
            assert 2 == store.value("SELECT count(*) FROM resources")
