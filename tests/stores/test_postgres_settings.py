"""What operators of a PostgreSQL set for a role or do to a schema: it changes nothing, or the record is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from signal import SIGINT

import psycopg
import pytest
from psycopg import errors

from sds.kernel.audit import verify
from sds.kernel.errors import SdsError, StoreError, UsageError
from sds.kernel.storage.postgres import schema as schemas
from sds.kernel.storage.postgres.connections import Url
from sds.kernel.storage.postgres.errors import refused
from sds.kernel.storage.postgres.store import PostgresStore, look_at
from tests.stores.server import by_hand, fresh_schema, role_with, server_url
from tests.storms.servers import Server, postgresql

NUL = r'{"z":"p\u0000q"}'
ODD = (
    "standard_conforming_strings = off",
    "quote_all_identifiers = on",
    "transform_null_equals = on",
    "default_transaction_read_only = on",
    "default_transaction_deferrable = on",
    "bytea_output = 'escape'",
    "DateStyle = 'SQL, DMY'",
    "extra_float_digits = -15",
    "search_path = nowhere",
    "client_encoding = LATIN1",
    "plan_cache_mode = force_custom_plan",
    "synchronous_commit = off",
)


@pytest.fixture
def schema() -> str:
    made = fresh_schema()
    PostgresStore(server_url(), made).close()
    return made


def add(store: PostgresStore, name: str) -> None:
    with store.transaction():
        store.insert("resources", resource=name, epoch=0, drawn=0)


@pytest.mark.parametrize("setting", ODD)
def test_a_record_is_made_read_and_verified_alike_whatever_is_set_for_a_role(setting: str) -> None:
    with role_with(setting) as url, closing(PostgresStore(url, fresh_schema())) as store:
        assert () == verify.verify(store).faults
        add(store, "ä")
        assert ["ä"] == [row[0] for row in store.rows("SELECT resource FROM resources WHERE resource <> '\\'")]
        assert r'"p\u0000q"' == store.value("SELECT CAST(? AS TEXT) -> '$.z'", (NUL,))
        assert "on" == store.value("SELECT current_setting('synchronous_commit')")


def test_the_password_may_stand_in_a_file_instead_of_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pgpass"
    file.write_text("*:*:*:*:from-the-file\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    monkeypatch.delenv("PGPASSWORD", raising=False)
    url = Url(server_url())
    with psycopg.connect(url.conninfo) as db:
        assert "from-the-file" == db.info.password
    assert "from-the-file" not in f"{url!r} {url.name}"


@pytest.mark.parametrize("setting", ["plan_cache_mode = auto", "plan_cache_mode = force_custom_plan"])
def test_a_statement_is_planned_once_whatever_its_values_are(setting: str) -> None:
    with role_with(setting) as url, closing(PostgresStore(url, fresh_schema())) as store:
        inserts = "FROM pg_prepared_statements WHERE statement LIKE 'INSERT INTO resources%'"
        with store.transaction():  # one connection, whose statements they are
            for name in "abc":
                store.insert("resources", resource=name, epoch=0, drawn=0)
            assert [(3, 0)] == store.rows(f"SELECT sum(generic_plans), sum(custom_plans) {inserts}")


def test_no_statement_is_compiled_and_none_runs_in_parallel_since_functions_catch_errors() -> None:
    eager = ("jit = on", "max_parallel_workers_per_gather = 4")
    with role_with(*eager) as url, closing(PostgresStore(url, fresh_schema())) as store:
        settings = "SELECT current_setting('jit'), current_setting('max_parallel_workers_per_gather')"
        assert [("off", "0")] == store.rows(settings)


def test_what_waits_for_more_than_the_disk_still_does() -> None:
    with role_with("synchronous_commit = remote_apply") as url, closing(PostgresStore(url, fresh_schema())) as store:
        assert "remote_apply" == store.value("SELECT current_setting('synchronous_commit')")


def test_no_time_limit_of_a_role_ends_what_reads_a_whole_record(schema: str) -> None:
    with role_with("statement_timeout = '400ms'") as url, closing(PostgresStore(url, schema)) as store:
        with store.frozen() as moment:
            assert [(1,)] == moment.rows("SELECT 1 FROM pg_sleep(0.6)")
        with pytest.raises(StoreError, match="statement timeout"):
            store.rows("SELECT 1 FROM pg_sleep(0.6)")


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("session_replication_role = replica", "the triggers of the record are skipped: `replica`"),
        ("zero_damaged_pages = on", "the server empties pages that are damaged: `on`"),
    ],
)
def test_a_role_whose_record_would_not_be_kept_is_refused(schema: str, setting: str, why: str) -> None:
    with role_with(setting) as url:
        for opened in (PostgresStore, look_at):
            with pytest.raises(SdsError, match=why):
                opened(url, schema)


CANCELLED = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
SWALLOWS = """
CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER audited BEFORE INSERT ON spend FOR EACH ROW EXECUTE FUNCTION swallow();
"""


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("ALTER TABLE spend SET UNLOGGED", "the table `spend` is unlogged: a crash of the server would empty it"),
        (SWALLOWS, "the trigger `audited` on `spend` may swallow or alter rows"),
        (
            SWALLOWS.replace("audited", "ledger_next"),
            "the trigger `ledger_next` on `spend` may swallow or alter rows",
        ),
        (
            "CREATE RULE nothing AS ON UPDATE TO agents DO INSTEAD NOTHING",
            "the rule `nothing` on `agents` may swallow or alter rows",
        ),
    ],
)
def test_a_record_that_may_lose_rows_is_refused_to_who_opens_it_and_on_every_new_connection(
    schema: str, monkeypatch: pytest.MonkeyPatch, statement: str, why: str
) -> None:
    monkeypatch.setattr("sds.kernel.storage.postgres.connections.WAIT_S", 0.5)
    with closing(PostgresStore(server_url(), schema)) as store:
        by_hand(statement, schema)
        by_hand(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = '{schema}'")
        with pytest.raises(StoreError, match="gives no connection"):
            add(store, "r")
    with pytest.raises(StoreError, match=f"it may lose rows: {why}") as caught:
        PostgresStore(server_url(), schema)
    assert not caught.value.retryable


def test_a_row_that_a_trigger_swallows_while_connections_are_open_is_an_error(schema: str) -> None:
    with closing(PostgresStore(server_url(), schema)) as store:
        add(store, "r")
        by_hand(SWALLOWS.replace("ON spend", "ON resources"), schema)
        with pytest.raises(StoreError, match="a trigger or rule of the database swallowed a row"):
            add(store, "s")


def test_a_trigger_that_only_looks_on_is_none_of_these(schema: str) -> None:
    by_hand(SWALLOWS.replace("BEFORE", "AFTER"), schema)
    PostgresStore(server_url(), schema).close()


def test_rows_that_a_policy_hides_are_an_error(schema: str) -> None:
    by_hand("ALTER TABLE agents ENABLE ROW LEVEL SECURITY; CREATE POLICY own ON agents USING (false)", schema)
    with role_with(superuser=False) as url:
        role = psycopg.conninfo.conninfo_to_dict(url)["user"]
        by_hand(f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}")
        reader = look_at(url, schema)
        assert reader is not None
        with closing(reader), pytest.raises(StoreError, match="row-level security policy"):
            reader.rows("SELECT * FROM agents")


def test_who_may_not_use_the_schema_is_told_so_and_not_that_it_is_empty(schema: str) -> None:
    with role_with(superuser=False) as url:
        for opened in (PostgresStore, look_at):
            with pytest.raises(UsageError, match="the store's user may not use the schema") as caught:
                opened(url, schema)
            assert "operations.md of the documentation" in caught.value.hint


def test_who_may_make_no_schema_is_told_so_and_not_that_the_record_was_altered(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "_expected", {})  # as in a process that has compared nothing
    with role_with(superuser=False) as url:
        role = psycopg.conninfo.conninfo_to_dict(url)["user"]
        by_hand(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
        by_hand(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}")
        with closing(PostgresStore(url, schema)) as store:
            add(store, "r")
            with pytest.raises(UsageError, match="this user cannot verify the record"):
                verify.verify(store)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgresql() as made:
        yield made


def test_a_commit_that_did_not_wait_for_its_standby_is_an_error(server: Server) -> None:
    """As `statement_timeout` or `pg_cancel_backend` make it: PostgreSQL itself calls it a success."""
    schema, added, failed = fresh_schema(), list[str](), list[StoreError]()

    def write() -> None:  # a server takes a while to take a setting up: until then, commits do not wait
        while not failed:
            added.append(f"r{len(added)}")
            try:
                add(store, added[-1])
            except StoreError as error:
                failed.append(error)

    with psycopg.connect(server.url, autocommit=True) as db, closing(PostgresStore(server.url, schema)) as store:
        db.execute("ALTER SYSTEM SET synchronous_standby_names = 'gone'")
        db.execute("SELECT pg_reload_conf()")
        try:
            writer = threading.Thread(target=write)
            writer.start()
            while writer.is_alive() and not db.execute(CANCELLED).fetchone():
                time.sleep(0.02)
            writer.join()
        finally:
            db.execute("ALTER SYSTEM RESET synchronous_standby_names")
            db.execute("SELECT pg_reload_conf()")
        assert len(added) == store.value("SELECT count(*) FROM resources")
        add(store, "s")
    assert [
        "the store refused: the commit was made, but a standby may lack it: the wait for the standby was cancelled"
    ] == [str(each) for each in failed]


def test_another_cluster_is_another_server_although_both_are_on_their_first_timeline(server: Server) -> None:
    schema = fresh_schema()
    with closing(PostgresStore(server_url(), schema)) as here, closing(PostgresStore(server.url, schema)) as there:
        before, after = here.generation, there.generation
    assert before.timeline[-8:] == after.timeline[-8:]
    assert after.replaced(before)
    server.stop(SIGINT)
    server.start()
    with closing(PostgresStore(server.url, schema)) as there:
        assert after != there.generation
        assert not there.generation.replaced(after)


def test_what_a_role_may_no_longer_do_may_be_done_once_it_may_again(schema: str) -> None:
    with role_with(superuser=False) as url:
        role = psycopg.conninfo.conninfo_to_dict(url)["user"]
        by_hand(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
        by_hand(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}")
        with closing(PostgresStore(url, schema)) as store:
            by_hand(f"REVOKE INSERT ON resources FROM {role}", schema)
            with pytest.raises(StoreError, match="permission denied") as caught:
                add(store, "r")
            by_hand(f"GRANT INSERT ON resources TO {role}", schema)
            add(store, "r")
    assert caught.value.retryable


@pytest.mark.parametrize(
    "error", [errors.IdleInTransactionSessionTimeout, errors.TransactionTimeout, errors.ReadOnlySqlTransaction]
)
def test_what_a_server_of_another_version_or_part_says_may_pass(error: type[psycopg.Error]) -> None:
    assert refused(error(), "the store refused").retryable
