"""What reads a file while others write it, and what only one at a time does."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest

from sds.kernel.errors import StoreError, UsageError
from sds.kernel.storage.sqlite import SqliteStore


@pytest.fixture
def store(folder: Path):
    with closing(SqliteStore(folder / "kernel.db")) as made:
        yield made


def test_reading_waits_for_no_transaction_of_another_thread_and_sees_what_was_committed(store: SqliteStore):
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


def test_what_reads_beside_a_transaction_cannot_write(store: SqliteStore):
    refused: list[str] = []

    def other() -> None:
        with pytest.raises(StoreError) as caught:
            store.rows("DELETE FROM meta")
        refused.append(str(caught.value))

    with store.transaction():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert ["the store cannot be read: attempt to write a readonly database"] == refused


def test_one_at_a_time_does_what_has_a_name(store: SqliteStore, folder: Path):
    with closing(SqliteStore(folder / "kernel.db")) as other:
        with store.exclusively("recovery") as first, other.exclusively("recovery") as second:
            assert (True, False) == (first, second)
            with other.exclusively("monitors") as another:
                assert another
        with other.exclusively("recovery") as again:
            assert again
    assert 0o600 == (folder / "kernel.db.recovery").stat().st_mode & 0o777


def test_a_name_that_is_no_name_locks_nothing(store: SqliteStore):
    with pytest.raises(UsageError, match=r"`\.\./other` is no name of a lock"), store.exclusively("../other"):
        pass


def test_work_that_raises_leaves_nothing_and_what_it_returns_is_returned(store: SqliteStore):
    def write() -> int:
        return store.run("INSERT INTO resources VALUES ('r', 0, 0)")

    def fail() -> None:
        store.run("UPDATE resources SET drawn = 9")
        raise ZeroDivisionError

    assert 1 == store.atomically(write)
    with pytest.raises(ZeroDivisionError):
        store.atomically(fail)
    assert [(0,)] == store.rows("SELECT drawn FROM resources")
