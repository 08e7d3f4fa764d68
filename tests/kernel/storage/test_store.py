"""The store: durable settings, whole transactions, and one line for every way a file can be unusable."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import StoreError
from sds.kernel.storage.sqlite import SqliteStore, connect
from sds.kernel.storage.sqlite_schema import expected_schema
from sds.kernel.storage.store import SCHEMA_VERSION, Store, refuse_newer
from tests.scale import scale

pytestmark = pytest.mark.sqlite_alone("its file and its settings; `test_postgres` is the same for a server")

WRITE = "check that you may write in its folder"
RESTORE = "restore the record from a backup, or use another folder"


@pytest.fixture
def store(folder: Path):
    with closing(SqliteStore(folder / "kernel.db")) as made:
        yield made


def refusal(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        SqliteStore(path)
    message = str(caught.value)
    assert 1 == len(message.splitlines())
    assert message.startswith(f"`{path}` cannot be opened as a decision store: ")
    return message.partition("store: ")[2] + (f" ({caught.value.hint})" if caught.value.hint else "")


def test_a_store_writes_ahead_and_waits_for_the_disk(store: Store):
    assert [("wal",)] == store._fetched("PRAGMA journal_mode")
    assert [(2,)] == store._fetched("PRAGMA synchronous")  # FULL


def test_every_table_is_strict(store: Store):
    tables = {row[1]: row[5] for row in store._fetched("PRAGMA table_list") if not row[1].startswith("sqlite_")}
    assert dict.fromkeys(tables, 1) == tables


def test_a_store_has_exactly_the_schema_of_its_file(store: Store):
    assert expected_schema() == store.schema


@pytest.mark.parametrize("value", [2**70, "\udcff"])
def test_a_value_that_no_table_can_hold_is_refused_like_any_other_fault(store: Store, value: object):
    with pytest.raises(StoreError, match="the store cannot hold such a value: "), store.transaction():
        store.insert("resources", resource=value, epoch=1, drawn=0)
    with pytest.raises(StoreError, match="the store cannot hold such a value: "):
        store.rows("SELECT 1 FROM resources WHERE resource = ?", (value,))
    assert [] == store.rows("SELECT * FROM resources")


def test_a_strict_table_refuses_a_value_of_another_type(store: Store):
    with pytest.raises(StoreError, match="cannot store TEXT value in INTEGER column"), store.transaction():
        store.insert("resources", resource="a", epoch="first", drawn=0)


def test_a_store_makes_the_folders_it_needs(folder: Path):
    with closing(SqliteStore(folder / "a" / "b" / "kernel.db")) as store:
        assert not store.halted


def test_a_file_that_is_no_database_is_refused(folder: Path):
    (folder / "k.db").write_bytes(b"these are not the pages of a database, whatever their name says" * 100)
    assert f"file is not a database ({RESTORE})" == refusal(folder / "k.db")


def test_a_folder_is_refused(folder: Path):
    assert f"unable to open database file ({WRITE})" == refusal(folder)


def test_a_path_below_a_file_is_refused(folder: Path):
    (folder / "file").touch()
    assert "file exists" in refusal(folder / "file" / "k.db") or "not a directory" in refusal(folder / "file" / "k.db")


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_refused_or_found_damaged(folder: Path, kept: float):
    path = folder / "k.db"
    SqliteStore(path).close()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    assert "malformed" in refusal(path) or "not a database" in refusal(path)


@pytest.mark.parametrize(
    "text", [b"CREATE TABLE events", b"events_no_delete", b"is final: no update", b"body_hash TEXT"]
)
@pytest.mark.parametrize("byte", [b"\xff", b"\xc3", b"\x80"])
def test_a_file_whose_schema_is_no_text_is_refused_in_one_line(folder: Path, text: bytes, byte: bytes):
    path = folder / "k.db"
    SqliteStore(path).close()
    whole = path.read_bytes()
    for at in (0, 3, len(text) - 1):
        path.write_bytes(whole.replace(text, text[:at] + byte + text[at + 1 :]))
        with suppress(StoreError), closing(SqliteStore(path)) as store:
            assert verify.verify(store).faults or text not in whole
    path.write_bytes(whole.replace(b"CREATE TABLE", b"CREATE T\xffBLE"))
    assert "codec can't decode" in refusal(path)
    assert 1 == len(refusal(path).splitlines())


@pytest.mark.parametrize("mode", ["delete", "memory"])
def test_a_file_system_without_a_write_ahead_log_is_refused(folder: Path, mode: str):
    """SQLite answers the mode it stays in, and raises nothing."""
    path = folder / "k.db"

    def connect_without(path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=_WithoutWal)

    class _WithoutWal(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            return super().execute(sql.replace("journal_mode=WAL", f"journal_mode={mode}"), *values)

    with pytest.raises(StoreError, match=rf"offers no write-ahead log \(journal mode {mode}\)"):
        SqliteStore(path, connect=connect_without)
    with closing(sqlite3.connect(path)) as db:
        assert [] == db.execute("SELECT name FROM sqlite_master").fetchall()


def test_the_database_of_another_program_is_refused_and_left_as_it_was(folder: Path):
    path = folder / "other.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE songs (title TEXT)")
    assert "it is the database of another program" == refusal(path)
    with closing(sqlite3.connect(path)) as db:
        assert [("songs",)] == db.execute("SELECT name FROM sqlite_master").fetchall()


@pytest.mark.parametrize("version", ["999", "0", "eight"])
def test_a_store_of_another_version_is_refused_and_a_newer_one_with_what_to_do(folder: Path, version: str):
    path = folder / "k.db"
    with closing(SqliteStore(path)) as store, store.transaction():
        store.run("UPDATE meta SET value = ? WHERE key = 'schema_version'", (version,))
    with pytest.raises(StoreError, match=f"it has schema version `{version}`, .* needs `{SCHEMA_VERSION}`$") as caught:
        SqliteStore(path)
    newer = version == "999"
    assert (newer, newer) == ("run the version" in caught.value.hint, not caught.value.retryable)


@pytest.mark.parametrize("version", [None, 999, "9" * 5_000, "\u00b29", ""])
def test_a_version_that_damage_has_made_is_no_newer_one(version: object):
    refuse_newer(version)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not write here")
def test_a_folder_that_may_not_be_written_is_refused(folder: Path):
    folder.chmod(0o555)
    program = (
        "import os, sys, pathlib\n"
        "from sds.kernel.storage.sqlite import SqliteStore\n"
        "from sds.kernel.errors import StoreError\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: SqliteStore(pathlib.Path(sys.argv[1]) / 'k.db')\n"
        "except StoreError as error: print(error, error.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, folder], capture_output=True, text=True, check=False, timeout=60
    )
    assert ["", 1] == [done.stderr, len(done.stdout.splitlines())]
    assert f"permission denied {WRITE}" in done.stdout


def test_many_threads_may_open_the_same_fresh_path_at_once(folder: Path):
    for turn in range(scale(10, 100)):
        path, start, failed = folder / f"{turn}.db", threading.Barrier(8), list[str]()

        def first(path: Path = path, start: threading.Barrier = start, failed: list[str] = failed) -> None:
            start.wait()
            try:
                SqliteStore(path).close()
            except StoreError as error:
                failed.append(str(error))

        threads = [threading.Thread(target=first) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [] == failed


def test_a_fresh_file_that_another_holds_too_long_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch):
    path = folder / "k.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with monkeypatch.context() as patched:
            patched.setattr("sds.kernel.storage.sqlite.BUSY_MS", 50)
            assert "database is locked (another program holds the record: end that program, or try again)" == refusal(
                path
            )
        other.execute("ROLLBACK")
    SqliteStore(path).close()


def test_a_fresh_file_that_another_holds_for_a_moment_is_waited_for(folder: Path):
    """SQLite itself does not wait there, and says BUSY, or an extended code of it, at once."""
    refused = iter([sqlite3.SQLITE_BUSY, sqlite3.SQLITE_BUSY_RECOVERY])

    class Busy(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if "journal_mode" in sql and (code := next(refused, 0)):
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = code
                raise error
            return super().execute(sql, *values)

    def connect_busy(path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Busy)

    SqliteStore(folder / "k.db", connect=connect_busy).close()
    assert 0 == next(refused, 0)


def test_several_processes_may_make_the_same_store_at_once(folder: Path):
    program = "import pathlib, sys; from sds.kernel.storage.sqlite import SqliteStore; SqliteStore(pathlib.Path(sys.argv[1])).close()"
    command = [sys.executable, "-c", program, folder / "k.db"]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    assert [b""] * 4 == [child.communicate(timeout=60)[1] for child in children]
    with closing(SqliteStore(folder / "k.db")) as store:
        assert expected_schema() == store.schema


def test_the_connection_is_made_by_what_is_passed_in(folder: Path):
    made: list[Path] = []

    def how(path: Path) -> sqlite3.Connection:
        made.append(path)
        return connect(path)

    SqliteStore(folder / "k.db", connect=how).close()
    assert [folder / "k.db"] == made


IN_VERSION_1 = frozenset(
    [
        "meta",
        "contracts",
        "agents",
        "events",
        "decision_flows",
        "flows_unfinished",
        "context_snapshots",
        "policy_proposals",
        "dim_validations",
        "attempts",
        "execution_log",
        "reservations",
        "one_live_reservation",
        "resources",
        "spend",
        "spend_totals",
        "ledger",
        "ledger_by_dfid",
        "one_decided",
        "ledger_no_update",
        "ledger_no_delete",
        "ledger_next",
    ]
)


OLD_INDEXES = (
    "CREATE INDEX snapshots_by_key ON context_snapshots (CASE WHEN json_valid(body) THEN body ->> '$.key' END)",
    "CREATE INDEX flows_escalated ON decision_flows (state) WHERE state = 'ESCALATED'",
)
NEWER_INDEXES = (
    "flows_by_opening",
    "snapshots_by_key_and_time",
    "flows_waiting",
    "orders_by_end",
    "flows_of_statement",
)


def test_a_record_of_version_5_gets_the_indexes_that_it_lacks_for_those_it_has(folder: Path):
    path = folder / "k.db"
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as db:
        for change in (*(f"DROP INDEX {name}" for name in NEWER_INDEXES), *OLD_INDEXES):
            db.execute(change)
        db.execute("UPDATE meta SET value = '5' WHERE key = 'schema_version'")
        db.commit()
    with closing(SqliteStore(path)) as store:
        assert expected_schema() == store.schema


def test_an_older_record_gets_the_tables_it_lacks_and_keeps_the_rest(folder: Path):
    path = folder / "k.db"
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as db:
        newer = "SELECT type, name FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type = 'table'"
        for kind, name in db.execute(newer).fetchall():
            if name not in IN_VERSION_1:
                db.execute(f"DROP {kind} {name}")
        assert IN_VERSION_1 == {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE sql IS NOT NULL")}
        db.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
        db.commit()
    with closing(SqliteStore(path)) as store:
        assert expected_schema() == store.schema
        assert SCHEMA_VERSION == store.value("SELECT value FROM meta WHERE key = 'schema_version'")


IGNORES = "BEGIN SELECT RAISE(IGNORE); END"


@pytest.mark.parametrize(
    ("name", "statements"),
    [
        ("quiet", [f"CREATE TRIGGER quiet BEFORE INSERT ON spend {IGNORES}"]),
        ("quiet", [f"create trigger if not exists quiet insert on ledger {IGNORES}"]),
        ("x AFTER y", [f'CREATE TRIGGER "x AFTER y" DELETE ON spend {IGNORES}']),
        ("spend", [f"CREATE TRIGGER spend BEFORE INSERT ON spend {IGNORES}"]),
        ("ledger_next", ["DROP TRIGGER ledger_next", f"CREATE TRIGGER ledger_next BEFORE INSERT ON ledger {IGNORES}"]),
        ("spend", ["DROP TABLE spend", "CREATE VIEW spend AS SELECT 'd' AS dfid, 's' AS scope, 0 AS amount"]),
    ],
)
def test_a_record_that_may_lose_rows_is_refused(folder: Path, name: str, statements: list[str]):
    path = folder / "kernel.db"
    SqliteStore(path).close()
    with closing(connect(path)) as db:
        for statement in statements:
            db.execute(statement)
    why = f"it may lose rows: the trigger or view `{name}` may swallow or alter them"
    assert f"{why} (undo what was done to the schema)" == refusal(path)


def test_a_trigger_that_comes_after_a_row_is_left_to_the_verification(folder: Path):
    path = folder / "kernel.db"
    SqliteStore(path).close()
    with closing(connect(path)) as db:
        db.execute("CREATE TRIGGER told AFTER INSERT ON spend BEGIN SELECT 1; END")
    with closing(SqliteStore(path)) as store:
        assert ("schema: `told` does not belong here",) == verify.verify(store).faults
