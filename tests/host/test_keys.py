"""The keys of a record: several verify, one signs; a lost one is not replaced in silence, a damaged one is no other key."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from sds.gate import Gate
from sds.host import keys, paths
from sds.host.rotation import Rotated, rotate
from sds.kernel.audit import verify
from sds.kernel.errors import SdsError, StoreError, UsageError
from sds.kernel.executor.protocol import ExecutionIntent
from sds.kernel.registry import registry
from sds.kernel.storage import ledger
from sds.kernel.storage.ledger import GENESIS, Head
from sds.kernel.storage.sqlite import SqliteStore
from tests.kernel.durable import Rail, Tickets, World, contract, refund, together
from tests.proposers import Says
from tests.stores.records import alone

ORDER = ExecutionIntent("d", "k", "REFUND", (("amount", 1),), "T1", "1")
START = Head(0, GENESIS)
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def halt(folder: Path, *, halted: bool = True) -> None:
    with closing(paths.open_record(folder)) as store:
        registry.set_halted(store, halted, by="me", reason="x", now_ms=1)


def renewed(folder: Path, *, lost: bool = False) -> Rotated:
    with closing(paths.open_record(folder)) as store:
        return rotate(folder, store, who="me", reason="because", now_ms=5, lost=lost)


def faults(folder: Path) -> tuple[str, ...]:
    with closing(paths.open_record(folder)) as store:
        return verify.verify(store, public=paths.public_keys_of(folder)).faults


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A gate's folder with a record of two entries, both under its key."""
    made = tmp_path / "gate"
    halt(made)
    halt(made, halted=False)
    paths.signer(made)
    return made


def test_a_record_makes_its_keys_with_its_first_entry_and_hands_out_the_public_half(tmp_path: Path) -> None:
    folder = tmp_path / "gate"
    paths.open_record(folder).close()
    assert ["decisions.db"] == [path.name for path in folder.iterdir()]
    halt(folder)
    public = keys.read_public(folder / "ledger.pub")
    assert (paths.public_keys_of(folder), START) == (public, public.since)
    assert keys.read_ring(folder / "kernel.key").seed not in (folder / "ledger.pub").read_text()
    assert () == faults(folder)


def test_processes_that_come_first_at_once_sign_with_one_key(tmp_path: Path) -> None:
    for turn in range(10):
        folder = tmp_path / str(turn)
        paths.open_record(folder).close()  # whoever finds a key without a record takes it for lost
        together(4, lambda n, folder=folder: halt(folder, halted=n % 2 == 0) if n else paths.signer(folder))  # type: ignore[misc]
        assert () == faults(folder)
        assert (1, 1) == (len(paths.kernel_keys(folder)), len(keys.read_public(folder / "ledger.pub").keys))


def test_a_key_of_an_older_version_goes_on_signing_orders_and_gets_one_of_the_ledger_beside_it(tmp_path: Path) -> None:
    key = b"\x00raw bytes, as they were before.."
    (tmp_path / "kernel.key").write_bytes(key)
    (tmp_path / "kernel.key").chmod(0o600)
    with closing(SqliteStore(tmp_path / "decisions.db")) as store:
        registry.set_halted(store, True, by="me", reason="x", now_ms=1)
        before = ledger.head(store)
    assert (key,) == paths.kernel_keys(tmp_path)
    halt(tmp_path, halted=False)
    public = paths.public_keys_of(tmp_path)
    assert public is not None
    assert ((key,), before, ()) == (paths.kernel_keys(tmp_path), public.since, faults(tmp_path))


def test_a_key_file_cut_at_any_byte_is_damaged_and_never_another_key(folder: Path) -> None:
    path = folder / "kernel.key"
    whole = path.read_bytes()
    for length in range(len(whole) - 1):  # the last byte ends the line
        path.write_bytes(whole[:length])
        with pytest.raises(StoreError, match="is damaged: ") as caught:
            paths.signer(folder)
        assert (
            "restore the key from a backup; if there is none, move this file away, then sds keys rotate --gate GATE --lost"
            in str(caught.value.hint)
        )
    path.write_bytes(whole)
    paths.signer(folder)


def test_a_private_key_beside_another_public_one_is_damaged(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    halt(other)
    ring = keys.read_ring(folder / "kernel.key")
    mixed = ring.model_copy(update={"seed": keys.read_ring(other / "kernel.key").seed})
    (folder / "kernel.key").write_bytes(b"sds keys 1\n" + mixed.model_dump_json().encode())
    with pytest.raises(StoreError, match="is damaged: its keys cannot be read"):
        paths.signer(folder)


def test_no_form_of_a_ring_shows_its_secrets(folder: Path) -> None:
    ring = keys.read_ring(folder / "kernel.key")
    assert ring.orders[0].key not in repr(ring)
    assert str(ring.seed) not in repr(ring)


def test_a_lost_key_is_not_replaced_in_silence(folder: Path) -> None:
    key = folder / "kernel.key"
    key.unlink()
    with pytest.raises(StoreError) as caught:
        paths.signer(folder)
    assert f"the key `{key}` is gone, but its record is there" == str(caught.value)
    assert (
        'restore the key from a backup; if there is none: sds keys rotate --gate GATE --lost --reason "..."'
        == caught.value.hint
    )
    with pytest.raises(StoreError, match="is gone, but its record is there"):
        renewed(folder)
    with (
        pytest.raises(StoreError, match="is gone, but its record is there"),
        closing(paths.open_record(folder)) as store,
    ):
        paths.ledger_key(folder, store)
    assert not key.exists()


def test_a_gate_whose_key_is_lost_opens_neither_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "kernel.key").unlink()
    with closing(SqliteStore(folder / "decisions.db")) as store:
        before = ledger.head(store)
        with pytest.raises(StoreError, match="is gone, but its record is there"):
            Gate(contract(), Tickets(), Rail(tmp_path / "rail.db"), folder=folder, engine=Says(refund()))
        assert before == ledger.head(store)


def test_an_order_alone_is_enough_to_miss_the_key_of_a_record_of_an_older_version(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.decide(refund())
    world.close()
    with closing(SqliteStore(tmp_path / "kernel.db")) as store:
        for name in ("no_update", "no_delete", "next"):
            alone(store, f"DROP TRIGGER checkpoint_{name}")
        alone(store, "DROP TABLE checkpoints")
    (tmp_path / "kernel.db").rename(tmp_path / "decisions.db")
    with pytest.raises(StoreError, match="is gone, but its record is there"):
        paths.signer(tmp_path)


def test_a_key_from_before_the_ledger_was_signed_is_not_taken_for_the_one_that_is_lost(folder: Path) -> None:
    ring = keys.read_ring(folder / "kernel.key")
    (folder / "kernel.key").write_bytes(bytes.fromhex(ring.orders[0].key))
    with pytest.raises(StoreError, match="is older than its record: it has no key for the ledger"):
        paths.signer(folder)
    renewed(folder, lost=True)
    assert () == faults(folder)
    assert ring.orders[0].key in [key.hex() for key in paths.kernel_keys(folder)]


def test_a_halt_does_not_wait_for_a_lost_key(folder: Path) -> None:
    (folder / "kernel.key").unlink()
    halt(folder)
    assert not (folder / "kernel.key").exists()
    with closing(paths.open_record(folder)) as store:
        report = verify.verify(store, public=paths.public_keys_of(folder))
        assert (True, (), 3, 2) == (store.halted, report.faults, report.entries, report.signed)


def test_a_record_that_has_signed_nothing_misses_no_key(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "decisions.db")) as store:
        registry.set_halted(store, True, by="me", reason="x", now_ms=1)
    paths.signer(tmp_path)
    halt(tmp_path, halted=False)
    assert () == faults(tmp_path)


def test_new_keys_sign_and_the_older_ones_verify_on(folder: Path) -> None:
    signed = [ORDER.signed_by(paths.signer(folder))]
    for number in (2, 3, 4):
        made = renewed(folder)
        signed.append(ORDER.signed_by(paths.signer(folder)))
        assert (number, number) == (made.orders, made.ledger)
        halt(folder, halted=number % 2 == 0)
    signer = paths.signer(folder)
    assert all(before.signature != after.signature for before, after in pairwise(signed))
    assert [True] * 4 == [order.is_signed_by(signer) for order in signed]
    assert () == faults(folder)
    public = paths.public_keys_of(folder)
    assert public is not None
    with closing(paths.open_record(folder)) as store:
        assert set(public.keys) == {each.public_key for each in ledger.read_checkpoints(store)}
        acts = store.rows("SELECT body ->> '$.act', body ->> '$.ledger_key' FROM ledger WHERE kind = 'OPERATOR'")
    assert [("KEYS_ROTATED", key) for key in reversed(public.keys[:-1])] == acts


def test_a_process_that_goes_on_with_the_keys_it_has_is_verified_after_a_rotation(folder: Path) -> None:
    with closing(paths.open_record(folder)) as running:
        registry.set_halted(running, True, by="me", reason="x", now_ms=1)
        renewed(folder)
        registry.set_halted(running, False, by="me", reason="x", now_ms=1)
    assert () == faults(folder)


@pytest.mark.parametrize("public", [True, False])
def test_a_lost_key_is_replaced_on_the_record_and_what_it_signed_of_the_ledger_verifies_on(
    folder: Path, public: bool
) -> None:
    before, order = paths.public_keys_of(folder), ORDER.signed_by(paths.signer(folder))
    assert before is not None
    with pytest.raises(UsageError, match="are not lost") as caught:
        renewed(folder, lost=True)
    assert 'sds keys rotate --gate GATE --reason "..."' == caught.value.hint
    (folder / "kernel.key").unlink()
    if not public:
        (folder / "ledger.pub").unlink()
    made = renewed(folder, lost=True)
    assert (1, 2, folder / "ledger.pub" if public else None) == (made.orders, made.ledger, made.taken_from)
    after = paths.public_keys_of(folder)
    assert after is not None
    assert (before.keys, before.since) == (after.keys[1:], after.since)
    assert not order.is_signed_by(paths.signer(folder))
    assert () == faults(folder)
    with closing(paths.open_record(folder)) as store:
        assert ["KEYS_LOST"] == [
            row[0] for row in store.rows("SELECT body ->> '$.act' FROM ledger WHERE kind = 'OPERATOR'")
        ]


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("key", ["older", "another record's"])
def test_no_rotation_begins_from_keys_that_did_not_sign_the_ledger_before_their_file_is_moved_away(
    folder: Path, tmp_path: Path, key: str, lost: bool
) -> None:
    """Its public halves would take the place of those that verify the ledger."""
    halt(tmp_path / "other")
    source = folder if key == "older" else tmp_path / "other"
    swapped = (source / "kernel.key").read_bytes()
    renewed(folder)
    public = (folder / "ledger.pub").read_bytes()
    (folder / "kernel.key").write_bytes(swapped)
    with pytest.raises(StoreError, match="is another record's, or older than its own") as refused:
        renewed(folder, lost=lost)
    assert refused.value.hint.endswith(
        'if there is none, move this file away, then sds keys rotate --gate GATE --lost --reason "..."'
    )
    assert (swapped, public) == ((folder / "kernel.key").read_bytes(), (folder / "ledger.pub").read_bytes())
    (folder / "kernel.key").rename(folder / "kernel.key.moved")
    renewed(folder, lost=True)
    assert () == faults(folder)


def test_there_are_only_so_many_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "KEYS_MAX", 2)
    renewed(folder)
    with pytest.raises(UsageError, match="there are 2 keys already"):
        renewed(folder)
    assert () == faults(folder)


def test_a_backup_from_before_the_ledger_was_signed_goes_on_after_a_rotation(folder: Path) -> None:
    """What it lacks nobody can tell from it; but it is not taken for the record that its keys have signed."""
    with closing(SqliteStore(folder / "decisions.db")) as store:
        alone(store, "DROP TRIGGER checkpoint_no_delete")
        alone(store, "DELETE FROM checkpoints")
    with closing(paths.open_record(folder)) as store, pytest.raises(StoreError, match="it has no checkpoint"):
        paths.refuse_altered(folder, store)
    renewed(folder)
    with closing(paths.open_record(folder)) as store:
        paths.refuse_altered(folder, store)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"since_entry":0}', "[]", "\xff", '{"since_entry":0,"since_hash":"0","keys":[]}']
)
def test_a_file_that_holds_no_public_keys_is_told_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.pub").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=r"x.pub` is not a file of public keys"):
        keys.read_public(tmp_path / "x.pub")
    with pytest.raises(UsageError, match="cannot be read: no such file"):
        keys.read_public(tmp_path / "none.pub")


class StopError(BaseException):
    """The process is gone."""


STEPS = ("fsync", "replace")


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Stop the process at the N-th durable step of writing keys: set [N]; 0 stops nothing."""
    at = [0]

    def stopping(name: str) -> None:
        real = getattr(os, name)

        def step(*args: object) -> object:
            at[0] -= 1
            if at[0] == 0:
                raise StopError
            return real(*args)

        monkeypatch.setattr(os, name, step)

    for name in STEPS:
        stopping(name)
    yield at
    at[0] = 0


def test_stopped_at_any_step_of_a_rotation_every_key_verifies_on(tmp_path: Path, stopped: list[int]) -> None:
    for number in range(1, 100):
        folder = tmp_path / str(number)
        halt(folder)
        order, public = ORDER.signed_by(paths.signer(folder)), paths.public_keys_of(folder)
        assert public is not None
        stopped[0] = number
        try:
            renewed(folder)
            finished = stopped[0] > 0
        except StopError:
            finished = False
        stopped[0] = 0
        assert order.is_signed_by(paths.signer(folder))
        halt(folder, halted=False)
        assert () == faults(folder)
        again = paths.public_keys_of(folder)
        assert again is not None
        assert public.keys == again.keys[-1:]
        assert again == keys.read_public(folder / "ledger.pub")
        assert [] == [path.name for path in folder.iterdir() if path.stat().st_mode & OTHERS]
        if finished:
            assert number > 4
            return
    raise AssertionError("this never ends")


def test_whatever_fails_in_the_keys_is_one_of_our_errors(folder: Path) -> None:
    (folder / "kernel.key").unlink()
    (folder / "kernel.key").mkdir(mode=0o700)
    with pytest.raises(SdsError, match=r"kernel.key` cannot be used"):
        paths.signer(folder)
