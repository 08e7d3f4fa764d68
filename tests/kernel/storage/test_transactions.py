"""Transactions of either store, what reads beside them, and what only one at a time does."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from sds.kernel.errors import StoreError, UsageError
from sds.kernel.flow.states import move_on
from sds.kernel.storage.sqlite import SqliteStore
from sds.kernel.storage.store import Store
from tests.kernel.durable import together
from tests.stores.opened import SQLITE, Chosen, opened_store
from tests.submission.parts import in_a_fork


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with closing(opened_store(folder / "kernel.db")) as made:
        yield made


def test_a_block_that_raises_leaves_nothing(store: Store):
    with suppress(ZeroDivisionError), store.transaction():
        store.insert("resources", resource="r", epoch=1, drawn=1)
        raise ZeroDivisionError
    assert [] == store.rows("SELECT * FROM resources")


def test_a_transaction_inside_a_transaction_is_refused_and_undoes_both(store: Store):
    def nested() -> None:
        with store.transaction():
            store.insert("resources", resource="a", epoch=1, drawn=1)
            with store.transaction():
                pass

    with pytest.raises(StoreError, match="within a transaction"):
        nested()
    assert [] == store.rows("SELECT * FROM resources")


class _Interrupted(sqlite3.Connection):
    """Ctrl-C arrives while a statement is executed: Python raises it as soon as that is done."""

    at = ""

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        done = super().execute(sql, *values)
        if self.at == sql:
            self.at = ""
            raise KeyboardInterrupt
        return done


@pytest.mark.sqlite_alone("its connections can be replaced")
@pytest.mark.parametrize("at", ["BEGIN IMMEDIATE", "COMMIT"])
def test_an_interrupt_at_any_statement_leaves_no_transaction_open(folder: Path, at: str):
    def connect(path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=_Interrupted)

    with closing(SqliteStore(folder / "kernel.db", connect=connect)) as store:
        store._db.at = at  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt), store.transaction():
            store.insert("resources", resource="r", epoch=0, drawn=0)
        with closing(opened_store(folder / "kernel.db")) as other, other.transaction():
            other.insert("resources", resource="s", epoch=0, drawn=0)
        with store.transaction():
            store.insert("resources", resource="t", epoch=0, drawn=0)
        kept = [name for (name,) in store.rows("SELECT resource FROM resources ORDER BY resource")]
        assert kept == (["r", "s", "t"] if at == "COMMIT" else ["s", "t"])


@pytest.mark.parametrize("write", ["run", "write"])
def test_nothing_is_written_but_in_a_transaction_of_ones_own_thread(store: Store, write: str):
    def other() -> None:
        with pytest.raises(StoreError, match="the store refused: there is no transaction"):
            getattr(store, write)("INSERT INTO resources VALUES ('r', 0, 0)")

    other()
    with store.transaction():
        together(1, lambda _: other())
    assert [] == store.rows("SELECT * FROM resources")


FLOW = {
    "dfid": "d",
    "agent_id": "a",
    "trigger_event": "{}",
    "gate": "g",
    "event_id": "e",
    "contract_hash": "h",
    "restarts": 0,
    "created_at_ms": 1,
    "state": "ACTIVE",
    "lease_until_ms": 2,
}


def test_a_flow_is_moved_on_only_from_what_it_was_seen_in(store: Store):
    def move(was: tuple[str, ...], tag: str) -> None:
        with store.transaction():
            store.insert("resources", resource=tag, epoch=0, drawn=0)
            move_on(store, "decision_flows", "d", "ABORTED", was=was, tag=tag)

    with store.transaction():
        store.insert("decision_flows", **FLOW)
    with pytest.raises(StoreError, match="the store refused"):
        move(("EXECUTING", "ESCALATED"), "late")
    assert [("ACTIVE", None)] == store.rows("SELECT state, tag FROM decision_flows")
    move(("CREATED", "ACTIVE"), "first")
    with pytest.raises(StoreError, match="the store refused"):
        move(("ACTIVE",), "second")
    assert [("ABORTED", "first")] == store.rows("SELECT state, tag FROM decision_flows")
    assert [("first",)] == store.rows("SELECT resource FROM resources")


def test_what_was_committed_is_there_after_reopening(folder: Path):
    with closing(opened_store(folder / "kernel.db")) as store, store.transaction():
        store.insert("resources", resource="r", epoch=0, drawn=7)
    with closing(opened_store(folder / "kernel.db")) as store:
        assert [("r", 0, 7)] == store.rows("SELECT * FROM resources")


def test_a_statement_that_fails_takes_its_whole_transaction_with_it(store: Store):
    def both() -> None:
        with store.transaction():
            store.insert("resources", resource="a", epoch=1, drawn=1)
            store.insert("resources", resource="b", epoch=1, drawn=-1)

    check = {SQLITE: "CHECK constraint failed: drawn >= 0"}.get(Chosen.kind, "violates check constraint")
    with pytest.raises(StoreError, match=f"the store refused: .*{check}"):
        both()
    assert [] == store.rows("SELECT * FROM resources")


def test_threads_and_stores_take_turns_and_lose_nothing(store: Store, folder: Path):
    with store.transaction():
        store.insert("resources", resource="r", epoch=0, drawn=0)

    def add(own: Store) -> None:
        for _ in range(25):
            with own.transaction():
                own.run("UPDATE resources SET drawn = ?", (own.value("SELECT drawn FROM resources") + 1,))

    with closing(opened_store(folder / "kernel.db")) as other:
        together(8, lambda number: add((store, other)[number % 2]))
    assert 200 == store.value("SELECT drawn FROM resources")


def test_a_frozen_reader_sees_one_moment_and_cannot_write(store: Store):
    with store.frozen() as reader:
        assert 0 == reader.value("SELECT count(*) FROM resources")
        with store.transaction():
            store.insert("resources", resource="r", epoch=0, drawn=0)
        assert 0 == reader.value("SELECT count(*) FROM resources")
        with pytest.raises(StoreError, match="the statement is not a SELECT"):
            reader.rows("DELETE FROM meta RETURNING key")
    assert 1 == store.value("SELECT count(*) FROM resources")


WRITING = (
    "DELETE FROM meta RETURNING key",
    "\n INSERT INTO resources VALUES ('r', 0, 0)",
    "WITH one AS (SELECT 1) DELETE FROM meta",
    "WITH one AS (DELETE FROM meta RETURNING key) SELECT * FROM one",
    "UPDATE meta SET value = '1'",
    "DROP TABLE resources",
    "COMMIT",
)


@pytest.mark.parametrize("statement", WRITING)
def test_what_reads_writes_nothing_in_a_transaction_outside_of_one_and_beside_one(store: Store, statement: str):
    def ask(read: Callable[[str], object]) -> None:
        with pytest.raises(StoreError, match="the store cannot be read: the statement is not a SELECT"):
            read(statement)

    before = store.rows("SELECT * FROM meta ORDER BY key")
    for read in (store.rows, store.row, store.value):
        ask(read)
    with store.transaction():
        ask(store.rows)
        together(1, lambda _: ask(store.rows))
    ask(lambda first: store.transaction(first).__enter__())
    assert (before, []) == (store.rows("SELECT * FROM meta ORDER BY key"), store.rows("SELECT * FROM resources"))


def test_one_at_a_time_does_what_has_a_name(store: Store, folder: Path):
    with closing(opened_store(folder / "kernel.db")) as other:
        with store.exclusively("recovery") as first, other.exclusively("recovery") as second:
            assert (True, False) == (first, second)
            with other.exclusively("monitors") as another:
                assert another
        with other.exclusively("recovery") as again:
            assert again
    if Chosen.kind == SQLITE:
        assert 0o600 == (folder / "kernel.db.recovery").stat().st_mode & 0o777


def test_reading_waits_for_no_transaction_of_another_thread_and_sees_what_was_committed(store: Store):
    begun, read = threading.Event(), threading.Event()

    def write() -> None:
        with store.transaction():
            store.insert("resources", resource="r", epoch=0, drawn=7)
            assert [(7,)] == store.rows("SELECT drawn FROM resources")  # its own
            begun.set()
            assert read.wait(10), "reading waited for the transaction"

    writer = threading.Thread(target=write)
    writer.start()
    assert begun.wait(10)
    assert [] == store.rows("SELECT drawn FROM resources")
    read.set()
    writer.join()
    assert [(7,)] == store.rows("SELECT drawn FROM resources")


def test_a_name_that_is_no_name_locks_nothing(store: Store):
    with pytest.raises(UsageError, match=r"`\.\./other` is not a name of a lock"), store.exclusively("../other"):
        pass


def test_a_store_is_not_used_in_a_fork_of_the_process_that_opened_it(store: Store):
    """Its connections are the parent's: two processes on one would take each other's answers."""

    def use() -> None:
        for used in (lambda: store.value("SELECT 1"), lambda: store.transaction().__enter__()):
            with pytest.raises(UsageError, match="the record was opened by another process") as refused:
                used()
            assert "FORKED" == refused.value.reason_code

    assert 0 == in_a_fork(use)
    with store.transaction():
        store.insert("resources", resource="r", epoch=1, drawn=1)
    assert [("r",)] == store.rows("SELECT resource FROM resources")
