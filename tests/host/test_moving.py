"""A record moved into PostgreSQL and back: the same rows, the same head, and nothing goes on in two places."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from sds.host import keys, moving, paths
from sds.kernel.audit import verify
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.operations import erasure
from sds.kernel.registry import registry
from sds.kernel.storage import copying, ledger
from sds.kernel.storage.ledger import GENESIS, Head, head
from sds.kernel.storage.private_files import replace_private_file
from sds.kernel.storage.sqlite import SqliteStore
from sds.kernel.storage.store import Store
from tests.kernel.durable import World, compensate, escalate, refund, see_through
from tests.kernel.outside import START_MS
from tests.stores.server import fresh_schema, server_url


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A gate's folder whose name no other test's record has."""
    made = tmp_path / f"g{fresh_schema()}"
    made.mkdir()
    return made


@pytest.fixture
def halted(folder: Path) -> Path:
    """A record with decisions of several kinds in it, one of them erased, of a gate that is halted."""
    (folder / "outside").mkdir()
    with closing(World(folder / "outside")) as world, closing(paths.open_record(folder)) as store:
        registry.register(store, world.contract, by="registry", now_ms=START_MS)
        kernel = world.open_kernel(store)
        for number, propose in enumerate((refund("1.00"), compensate, escalate)):
            see_through(kernel, world.event(f"C{number}"), propose)
        erasure.erase(store, "claims", "C0", who="ada", reason="asked", now_ms=START_MS)
        with store.transaction():
            ledger.append(
                store, START_MS - 100_000, "OPERATOR", "", {"act": "X", "who": "ada", "reason": "\U0001f600 \0"}
            )
        registry.set_halted(store, True, by="ada", reason="moving", now_ms=START_MS)
    return folder


def moved(folder: Path, url: str | None, reason: str = "more machines") -> moving.Moved:
    with closing(paths.open_record(folder)) as store:
        return moving.move(folder, store, url, who="ada", reason=reason, now_ms=START_MS)


def test_a_record_moves_to_postgresql_and_back_with_the_same_head(halted: Path, monkeypatch: pytest.MonkeyPatch):
    there = moved(halted, server_url())
    assert there.rows > 20
    with closing(paths.open_record(halted)) as before:
        assert there.head == head(before)
    (halted / "decisions.db").rename(halted / "as-it-was.db")
    monkeypatch.setenv("SDS_STORE", server_url())
    with closing(paths.open_record(halted)) as record:
        assert (True, there.head) == (record.halted, head(record))
        assert 1 == record.value("SELECT count(*) FROM clock_steps")
        assert () == verify.verify(record, there.head, paths.public_keys_of(halted)).faults
        assert ["artifacts", "checkpoints", "ledger"] == _changed(record, halted / "as-it-was.db")
    back = moved(halted, None)
    monkeypatch.delenv("SDS_STORE")
    with closing(paths.open_record(halted)) as record:
        assert (True, back.head) == (record.halted, head(record))
        assert () == verify.verify(record, back.head, paths.public_keys_of(halted)).faults
    assert there.head.idx + 1 == back.head.idx  # that it moved again


def _changed(record: Store, path: Path) -> list[str]:
    """Return which tables differ from those of a file, once something was written to two of them."""
    with closing(SqliteStore(path)) as before:
        assert ["checkpoints"] == copying.differing(record, before)  # its head was signed when it was closed
        with before.transaction():
            before.insert("artifacts", name="n", version=1, sha256="", text="a", ended_at_ms=None)
            ledger.append(before, START_MS, "HALT", "", {})
        return copying.differing(record, before)


def test_a_record_that_was_moved_away_is_not_resumed_whichever_way_it_went(
    halted: Path, monkeypatch: pytest.MonkeyPatch
):
    moved(halted, server_url())
    with pytest.raises(StoreError, match="this record was moved to `postgresql://") as caught:
        resumed(halted)  # whoever does it has no SDS_STORE in their shell
    assert caught.value.hint.startswith("set SDS_STORE to the database here and for all processes of the gate")
    (halted / "decisions.db").rename(halted / "as-it-was.db")
    monkeypatch.setenv("SDS_STORE", server_url())
    assert resumed(halted)
    with closing(paths.open_record(halted)) as store:
        registry.set_halted(store, True, by="ada", reason="back", now_ms=START_MS)
    moved(halted, None)
    with pytest.raises(StoreError, match=r"this record was moved to `.*decisions.db`") as caught:
        resumed(halted)
    assert caught.value.hint.startswith("unset SDS_STORE here and for all processes of the gate")
    monkeypatch.delenv("SDS_STORE")
    assert resumed(halted)
    with closing(paths.open_record(halted)) as store:
        registry.set_halted(store, True, by="ada", reason="fares", now_ms=START_MS)
    assert resumed(halted)


def resumed(folder: Path) -> bool:
    with closing(paths.open_record(folder)) as store:
        return registry.set_halted(store, False, by="ada", reason="on", now_ms=START_MS)


def test_a_record_whose_copy_is_damaged_goes_on_where_it_is(halted: Path, monkeypatch: pytest.MonkeyPatch):
    verified, found = verify.verify, list[str]()

    def damaged_copy(store: Store, *known: object) -> verify.Report:
        found.append(store.name)
        whole = verified(store, *known)  # type: ignore[arg-type]  # passed on
        return replace(whole, faults=("flow x: altered",)) if len(found) == 2 else whole

    monkeypatch.setattr(verify, "verify", damaged_copy)
    with pytest.raises(StoreError, match="the copy is damaged: flow x: altered"):
        moved(halted, server_url())
    assert resumed(halted)


def test_a_gate_that_decides_does_not_move(halted: Path):
    with closing(paths.open_record(halted)) as store:
        registry.set_halted(store, False, by="ada", reason="on", now_ms=START_MS)
    with pytest.raises(UsageError, match="the gate is not halted") as caught:
        moved(halted, server_url())
    assert 'sds halt --gate GATE --reason "..."' == caught.value.hint


def test_a_gate_that_is_resumed_while_its_record_is_verified_does_not_move(
    halted: Path, monkeypatch: pytest.MonkeyPatch
):
    def resumed(*_: object) -> None:
        with closing(SqliteStore(halted / "decisions.db")) as other:
            registry.set_halted(other, False, by="ada", reason="on", now_ms=START_MS)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(moving, "refuse_damaged", resumed)
        with pytest.raises(UsageError, match="the gate is not halted"):
            moved(halted, server_url())
    with closing(paths.open_record(halted)) as store:
        registry.set_halted(store, True, by="ada", reason="again", now_ms=START_MS)
    assert moved(halted, server_url()).rows > 20


def test_a_record_that_is_not_empty_is_left_as_it_is(halted: Path):
    moved(halted, server_url())
    with pytest.raises(UsageError, match="already holds a record"):
        moved(halted, server_url())
    with pytest.raises(UsageError, match=r"decisions.db` already exists"):
        moved(halted, None)


def test_a_record_that_is_not_whole_does_not_move(halted: Path):
    with closing(paths.open_record(halted)) as store, store.transaction():
        store.run("UPDATE decision_flows SET tag = 'X'")
    with pytest.raises(StoreError, match="the record is damaged: flow"):
        moved(halted, server_url())


def test_a_copy_that_differs_is_found(halted: Path, monkeypatch: pytest.MonkeyPatch):
    put = copying._put
    monkeypatch.setattr(
        copying,
        "_put",
        lambda target, table, columns, rows: put(target, table, columns, rows[:-1] if table == "spend" else rows),
    )
    with pytest.raises(StoreError, match="the copy differs in spend"):
        moved(halted, server_url())


@pytest.mark.parametrize("key", ["gone", "another"])
def test_a_record_whose_keys_are_on_another_machine_is_refused(halted: Path, monkeypatch: pytest.MonkeyPatch, key: str):
    moved(halted, server_url())
    monkeypatch.setenv("SDS_STORE", server_url())
    kept = (halted / "kernel.key").read_bytes()
    (halted / "kernel.key").unlink()
    if key == "another":
        keys.ledger_key(halted, head_of_nothing(), now_ms=1)
        with pytest.raises(
            StoreError, match="is another record's, or older than its own: the ledger was signed with"
        ) as caught:
            paths.open_record(halted)
    else:
        with closing(paths.open_record(halted)) as store:
            assert store.locked
            assert store.halted
        with pytest.raises(StoreError, match="the record was signed with keys that are not in") as caught:
            paths.signer(halted)
    lost = 'sds keys rotate --gate GATE --lost --reason "..."'
    other = "copy the key that the record's other processes use, or restore the key from a backup; if there is none, move this"
    gone = "copy kernel.key from a machine whose processes use the record; if it is lost there, too"
    assert (f"{other} file away, then {lost}" if key == "another" else f"{gone}: {lost}") == caught.value.hint
    replace_private_file(halted / "kernel.key", kept)
    paths.open_record(halted).close()


def head_of_nothing() -> Head:
    return Head(0, GENESIS)


def test_a_record_that_is_gone_is_not_begun_anew(folder: Path, monkeypatch: pytest.MonkeyPatch):
    paths.signer(folder)
    monkeypatch.setenv("SDS_STORE", server_url())
    with pytest.raises(
        StoreError, match=f"the record `schema sds_{folder.name} of .SDS_STORE` is gone, but its key is there"
    ):
        paths.open_record(folder)


def test_records_are_listed_wherever_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SDS_STORE", server_url())
    assert not paths.has_record(folder)
    assert paths.look_at_record(folder) is None
    paths.open_record(folder).close()
    assert paths.has_record(folder)
    assert folder.name in paths.recorded()
    found = paths.look_at_record(folder)
    assert found is not None
    with closing(found):
        for statement, why in (
            ("DELETE FROM meta RETURNING key", "not a SELECT"),
            ("SELECT 1 INTO t", "read-only transaction"),
        ):
            with pytest.raises(StoreError, match=why):
                found.rows(statement)


@pytest.mark.parametrize(
    ("url", "name", "why"),
    [
        ("mysql://x", "claims", "SDS_STORE is not the address of a PostgreSQL"),
        ("postgresql://localhost/x", "My-Gate", "the folder name `My-Gate` cannot name a schema"),
    ],
)
def test_what_names_no_record_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, name: str, why: str
):
    monkeypatch.setenv("SDS_STORE", url)
    with pytest.raises(UsageError, match=why):
        paths.open_record(tmp_path / name)
