"""Files of a record are their user's alone, whatever the folder, the umask and an older version have made of them."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sds.gate import Gate
from sds.gates.refund import gate as desk
from sds.gates.refund.rail.client import RailProcess
from sds.host.log import JsonLog
from sds.kernel.errors import StoreError
from sds.kernel.storage.private_files import make_private_file, replace_private_file
from sds.kernel.storage.sqlite import SqliteStore
from tests.kernel.durable import Rail, Tickets, contract, deny, together
from tests.proposers import Says


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that was there, for everybody."""
    made = tmp_path / "gate"
    made.mkdir(mode=0o777)
    return made


def open_to_others(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077)


def decide(folder: Path) -> set[str]:
    """Decide one case; return the files there were while the gate was open."""
    tickets = Tickets()
    tickets.put("T1")
    with Gate(contract(), tickets, Rail(folder.parent / "rail.db"), folder=folder, engine=Says(deny)) as gate:
        gate.decide({"claim_id": "C1", "ticket_id": "T1", "text": "please"})
        assert [] == open_to_others(folder)
        return {path.name for path in folder.iterdir()}


def test_every_file_of_a_gate_is_its_users_alone_in_a_folder_that_was_there(folder: Path) -> None:
    made = decide(folder)
    assert {f"decisions.db{end}" for end in ("", "-wal", "-shm")} | {"kernel.key", "ledger.pub", "log.jsonl"} == made


def test_what_an_older_version_left_open_is_tightened_when_it_is_opened(folder: Path) -> None:
    decide(folder)
    kept = sqlite3.connect(folder / "decisions.db")  # so that the log and its index stay
    kept.execute("SELECT * FROM ledger").fetchall()
    for path in folder.iterdir():
        if path.name not in ("kernel.key", "ledger.pub"):  # one is refused, one is for everybody
            path.chmod(0o666)
    with closing(kept):
        decide(folder)


def test_the_demos_own_files_beside_a_record_are_their_users_alone_too(folder: Path) -> None:
    desk.ensure_world(folder, claims=5)
    with RailProcess(folder / "rail.db"), closing(desk.TicketSource(folder / "airline.db")) as source:
        source.read("T1")
        assert [] == open_to_others(folder)
    for path in folder.iterdir():
        path.chmod(0o666)
    desk.ensure_world(folder, claims=5)
    assert [] == open_to_others(folder)


def test_a_folder_that_a_store_makes_is_private(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "new" / "k.db").close()
    assert 0o700 == stat.S_IMODE((tmp_path / "new").stat().st_mode)


def test_many_that_make_one_file_at_once_make_one_and_leave_nothing_else(folder: Path) -> None:
    together(8, lambda _: make_private_file(folder / "k.db"))
    assert ["k.db"] == [path.name for path in folder.iterdir()]
    assert [] == open_to_others(folder)


def test_what_is_there_keeps_what_it_holds_and_what_is_no_file_its_rights(folder: Path) -> None:
    (folder / "k").write_bytes(b"kept")
    make_private_file(folder / "k")
    make_private_file(folder)
    assert (b"kept", 0o777) == ((folder / "k").read_bytes(), stat.S_IMODE(folder.stat().st_mode))


def test_a_file_that_cannot_be_made_is_told_in_one_line(folder: Path) -> None:
    for make in (lambda: SqliteStore(folder / "k" / "db"), lambda: JsonLog(folder / "k" / "log")):
        (folder / "k").write_bytes(b"a file")
        with pytest.raises(StoreError, match="cannot be"):
            make()


@pytest.mark.parametrize("write", [lambda path: replace_private_file(path, b"secret"), make_private_file])
def test_a_file_that_could_not_be_written_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(folder / "kernel.key")
    assert [] == list(folder.iterdir())
