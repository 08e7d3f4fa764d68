"""Checkpoints: whoever rewrites the ledger, and cannot sign, is found by whoever holds the public key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import StoreError
from sds.kernel.registry import registry
from sds.kernel.storage import ledger
from sds.kernel.storage.ledger import CHECKPOINT_EVERY, GENESIS, CheckpointWitness, Head, LedgerKey, PublicKeys, head
from sds.kernel.storage.store import Store
from tests.kernel.crashes import every_step
from tests.kernel.durable import PUBLIC, SEED, Clock, World, deny, together, witness
from tests.kernel.faults import Crash, Faults, failing
from tests.kernel.tampering import (
    bent,
    chained,
    faults,
    found_after,
    full_record,
    resigned,
    rewritten,
    sign,
    tampering,
)
from tests.scale import scale, seeded
from tests.stores.opened import opened_store
from tests.stores.records import emptied, stranger_at

KEY = LedgerKey(SEED, PUBLIC.since)
OTHER = LedgerKey(b"the key of somebody else, a liar", PUBLIC.since)


@pytest.fixture
def full(folder: Path) -> Iterator[World]:
    made = full_record(folder)
    yield made
    made.close()


def act(store: Store, times: int = 1) -> None:
    for _ in range(times):
        registry.write_act(store, "TEST", who="me", reason="x", now_ms=1)


def signed(store: Store) -> list[int]:
    return [each.idx for each in ledger.read_checkpoints(store)]


def test_the_first_entry_every_hundredth_and_the_head_on_closing_are_signed(folder: Path):
    with closing(opened_store(folder / "k.db", witness=witness())) as store:
        act(store, 2 * CHECKPOINT_EVERY + 3)
        assert [1, CHECKPOINT_EVERY, 2 * CHECKPOINT_EVERY] == signed(store)
    with closing(opened_store(folder / "k.db", witness=witness())) as store:
        assert [1, CHECKPOINT_EVERY, 2 * CHECKPOINT_EVERY, 2 * CHECKPOINT_EVERY + 3] == signed(store)
        assert () == verify.verify(store, public=PUBLIC).faults
        assert 2 * CHECKPOINT_EVERY + 3 == verify.verify(store, public=PUBLIC).signed


def test_whoever_only_reads_signs_nothing(folder: Path):
    with closing(opened_store(folder / "k.db")) as store:
        act(store)
    with closing(opened_store(folder / "k.db", witness=witness())) as store:
        verify.verify(store)
    with closing(opened_store(folder / "k.db")) as store:
        assert [] == signed(store)


def test_a_transaction_that_is_undone_leaves_no_checkpoint_and_the_next_entry_is_signed(folder: Path):
    with closing(opened_store(folder / "k.db", witness=witness())) as store:

        def undone() -> None:
            with store.transaction():
                registry.append_act(store, "TEST", who="me", reason="x", now_ms=1)
                assert [1] == signed(store)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            undone()
        assert [] == signed(store)
        act(store)
        assert [1] == signed(store)


def test_several_processes_that_write_at_once_leave_no_stretch_unsigned(folder: Path):
    stores = [opened_store(folder / "k.db", witness=witness()) for _ in range(4)]
    together(4, lambda number: act(stores[number], scale(60, 600)))
    for store in stores:
        store.close()
    with closing(opened_store(folder / "k.db")) as store:
        assert () == verify.verify(store, public=PUBLIC).faults
        assert head(store).idx == signed(store)[-1]


def test_a_ledger_rewritten_as_a_whole_is_found_with_the_public_key_alone(full: World):
    with tampering(full) as db:
        rewritten(db)
        db.hide()
        found = faults(full)
    assert [f"checkpoint {idx}: the entry is not the one that was signed" for idx in signed(full.store)] == list(found)


def test_its_checkpoints_rewritten_too_without_the_key_are_found(full: World):
    with tampering(full) as db:
        rewritten(db)
        for idx, own in db.execute("SELECT idx, entry_hash FROM ledger").fetchall():
            db.execute("UPDATE checkpoints SET entry_hash = ? WHERE idx = ?", (own, idx))
        db.hide()
        assert "checkpoint 1: its signature does not match its key" == faults(full)[0]


def test_all_of_it_signed_again_with_another_key_is_found_and_without_a_key_it_is_said_to_be_unseen(full: World):
    with tampering(full) as db:
        rewritten(db)
        resigned(db, OTHER)
        db.hide()
        assert f"checkpoint 1: signed with another key, `{OTHER.public.keys[0][:16]}`" == faults(full)[0]
        assert (len(signed(full.store)), ()) == (len(faults(full)), verify.verify(full.store).faults)
        assert "a ledger rewritten as a whole" in str(verify.verify(full.store).blind)


def test_all_of_it_with_no_checkpoint_left_is_found(full: World):
    with tampering(full) as db:
        rewritten(db)
        db.execute("DELETE FROM checkpoints")
        db.hide()
        last = head(full.store).idx
        assert (f"entries 1 to {last}: none has a checkpoint, although signing had begun",) == faults(full)
        assert () == verify.verify(full.store).faults


def test_a_dropped_checkpoint_is_found_unless_it_is_the_newest_and_then_it_is_said_what_is_unseen(full: World):
    known = signed(full.store)
    for gone, follower in pairwise(known):
        found = found_after(full, ("DELETE FROM checkpoints WHERE idx = ?", (gone,)))
        assert (f"checkpoint {follower}: the one before it, of entry {gone}, is missing",) == found
    with tampering(full) as db:
        db.execute("DELETE FROM checkpoints WHERE idx = ?", (known[-1],))
        db.hide()
        report = verify.verify(full.store, public=PUBLIC)
        left = known[-1] - known[-2]
        assert () == report.faults
        assert f"others in the place of the {left} after entry {known[-2]}" in str(report.blind)


def test_swapped_checkpoints_are_found(full: World):
    first, second = signed(full.store)[:2]
    found = found_after(
        full,
        ("UPDATE checkpoints SET idx = -1 WHERE idx = ?", (first,)),
        ("UPDATE checkpoints SET idx = ? WHERE idx = ?", (first, second)),
        ("UPDATE checkpoints SET idx = ? WHERE idx = -1", (second,)),
    )
    for idx in (first, second):
        assert f"checkpoint {idx}: the entry is not the one that was signed" in found


def test_any_change_in_a_checkpoint_is_found(full: World):
    rng = seeded(3)
    for row in full.store.rows(f"SELECT {ledger.CHECKPOINT_COLUMNS} FROM checkpoints"):
        for column, value in zip(ledger.CHECKPOINT_COLUMNS.split(", "), row, strict=True):
            sql = f"UPDATE checkpoints SET {column} = ? WHERE idx = ?"
            assert any("checkpoint " in line for line in found_after(full, (sql, (bent(rng, value), row[0])))), column


@pytest.mark.parametrize("value", ["", "xyz", "ab", "\udcff", "00" * 64])
def test_a_checkpoint_of_whatever_form_is_found(full: World, value: str):
    last = ledger.newest_checkpoint(full.store)
    assert last is not None
    for column in ("signature", "public_key", "entry_hash"):
        altered = replace(last, **{column: value})
        entries = {last.idx: last.entry_hash}
        assert ledger.checkpoint_faults([altered], entries, head(full.store), None), column


def test_a_checkpoint_added_by_somebody_else_is_found(full: World):
    idx = 3
    (own,) = full.column("SELECT entry_hash FROM ledger WHERE idx = ?", idx)
    made = OTHER.signed(Head(idx, str(own)), ledger.read_checkpoints(full.store)[0], 1)
    values = (made.idx, made.entry_hash, made.prev_idx, made.at_ms, made.public_key, made.signature)
    found = found_after(full, ("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)", values))
    assert f"checkpoint {idx}: signed with another key, `{made.public_key[:16]}`" in found


def test_entries_cut_off_below_the_last_checkpoint_are_found_while_it_stays(full: World):
    last = head(full.store).idx
    found = found_after(full, ("DELETE FROM ledger WHERE idx = ?", (last,)))
    assert f"checkpoint {last}: the entry is not the one that was signed" in found


def test_a_stretch_that_is_longer_than_it_may_be_is_found(full: World):
    last = head(full.store).idx
    with closing(opened_store(full.path)) as unsigned:
        act(unsigned, CHECKPOINT_EVERY)
        assert () == faults(full)
        act(unsigned)
    end = last + CHECKPOINT_EVERY + 1
    assert (f"entries {last + 1} to {end}: more than {CHECKPOINT_EVERY} without a checkpoint",) == faults(full)
    assert (f"entries {last + 1} to {sign(full).idx}: more than {CHECKPOINT_EVERY} without a checkpoint",) == faults(
        full
    )


def test_an_older_record_verifies_and_what_it_had_when_signing_began_cannot_be_rewritten_either(folder: Path):
    path = folder / "k.db"
    with closing(opened_store(path)) as older:
        act(older, 5)
        since = head(older)
    key = LedgerKey(SEED, since)
    with closing(opened_store(path, witness=CheckpointWitness(lambda _: key, Clock()))) as store:
        assert () == verify.verify(store, public=key.public).faults
        act(store, 2)
        assert ([6], ()) == (signed(store), verify.verify(store, public=key.public).faults)
    with stranger_at(path) as stranger:
        stranger.execute("UPDATE ledger SET at_ms = 7 WHERE idx = 2")
        chained(stranger)
        stranger.execute("DELETE FROM checkpoints")
        stranger.execute("DELETE FROM ledger WHERE idx > 5")
        stranger.hide()
    with closing(opened_store(path)) as store:
        assert ("entry 5: not the one after which signing began",) == verify.verify(store, public=key.public).faults


@pytest.mark.parametrize("strip", [True, False])
def test_what_follows_an_altered_ledger_is_not_signed_and_nobody_goes_on_with_it(folder: Path, strip: bool):
    """Whoever rewrites it must not have it signed by the next process that opens it."""
    path = folder / "k.db"
    with closing(opened_store(path, witness=witness())) as store:
        act(store, 5)
    with stranger_at(path) as stranger:
        stranger.execute("UPDATE ledger SET at_ms = 7")
        chained(stranger)
        if strip:
            stranger.execute("DELETE FROM checkpoints")
        stranger.hide()
    with closing(opened_store(path, witness=witness())) as store:
        with pytest.raises(StoreError, match="the ledger differs from what was signed: ") as caught:
            ledger.refuse_altered_ledger(store, PUBLIC)
        assert caught.value.hint.startswith("run `sds ledger verify`, and restore a backup")
        assert strip == ("sds keys rotate" in caught.value.hint)
        with pytest.raises(StoreError, match="the ledger differs from what was signed: "):
            ledger.sign_head(store, KEY, 1)
        act(store, CHECKPOINT_EVERY)
    with closing(opened_store(path)) as store:
        assert ([] if strip else [1, 5]) == signed(store)
        assert () != verify.verify(store, public=PUBLIC).faults


def test_a_ledger_that_is_whole_may_be_gone_on_with(full: World):
    ledger.refuse_altered_ledger(full.store, PUBLIC)
    act(full.store)
    ledger.refuse_altered_ledger(full.store, PUBLIC)


def test_where_there_is_no_key_what_is_written_is_written_unsigned(folder: Path):
    with closing(opened_store(folder / "k.db", witness=CheckpointWitness(lambda _: None, Clock()))) as store:
        act(store, 3)
        assert (3, []) == (head(store).idx, signed(store))


def test_a_signed_head_kept_elsewhere_shows_what_was_cut_off_and_who_signed(full: World):
    kept = sign(full)
    assert (kept, ()) == (sign(full), faults(full, kept))
    assert None is verify.verify(full.store, kept, PUBLIC).blind
    packet = full.packet("later", "T5")
    full.kernel.decide(packet, deny(packet))
    assert () == faults(full, kept)
    forged = replace(kept, entry_hash="f" * 64)
    assert ("the given head: its signature does not match its key",) == faults(full, forged)
    stranger = OTHER.signed(head(full.store), kept, 1)
    assert (f"the given head: signed with another key, `{OTHER.public.keys[0][:16]}`",) == faults(full, stranger)
    assert () == verify.verify(full.store, stranger).faults
    ahead = KEY.signed(Head(kept.idx + 9, "a" * 64), kept, 1)
    assert any(f"the given head is at {kept.idx + 9}" in line for line in faults(full, ahead))


def test_older_keys_go_on_verifying(folder: Path):
    path, newer = folder / "k.db", LedgerKey(b"the key that came after, its own", PUBLIC.since, PUBLIC.keys)
    for key in (KEY, newer):
        with closing(opened_store(path, witness=CheckpointWitness(lambda _, key=key: key, Clock()))) as store:  # type: ignore[misc]
            act(store, 3)
    with closing(opened_store(path)) as store:
        assert [1, 3, 6] == signed(store)
        assert () == verify.verify(store, public=newer.public).faults
        shown = newer.public.keys[0][:16]
        assert (f"checkpoint 6: signed with another key, `{shown}`",) == verify.verify(store, public=PUBLIC).faults


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("UPDATE checkpoints SET at_ms = 1", "a checkpoint is final: no update"),
        ("DELETE FROM checkpoints", "a checkpoint is final: no delete"),
        ("INSERT INTO checkpoints VALUES (1, 'x', 0, 1, 'x', 'x')", "a checkpoint is final: not after the last one"),
        pytest.param(
            "INSERT OR REPLACE INTO checkpoints VALUES (1, 'x', 0, 1, 'x', 'x')",
            "a checkpoint is final: not after the last one",
            marks=pytest.mark.sqlite_alone("REPLACE"),
        ),
    ],
)
def test_the_table_refuses_anything_but_the_next_checkpoint(full: World, sql: str, message: str):
    with pytest.raises(StoreError, match=message), full.store.transaction():
        full.store.run(sql)


def test_no_form_of_a_key_shows_its_private_half():
    assert SEED.hex() not in repr(KEY)
    assert PublicKeys(KEY.public.keys, Head(0, GENESIS)) == PUBLIC


def _written(path: Path, count: int) -> Callable[[], World]:
    """Return what makes a world whose ledger has `count` entries, all but a few of them signed."""

    def make() -> World:
        emptied(path)
        made = World(path)
        act(made.store, count - head(made.store).idx)
        made.close()
        return made

    return make


@pytest.mark.parametrize("count", [CHECKPOINT_EVERY - 2, 3])
def test_stopped_at_any_step_of_writing_and_closing_the_ledger_is_whole_and_the_next_process_signs_on(
    folder: Path, count: int
):
    def stop_once(world: World, crash: Faults) -> bool:
        finished = False
        try:
            with closing(opened_store(world.path, connect=failing(crash), witness=witness())) as store:
                act(store, 3)
            finished = True
        except Crash:
            pass
        finally:
            crash.bury()
        with closing(opened_store(world.path, witness=witness())) as store:
            assert () == verify.verify(store, public=PUBLIC).faults
            act(store)
            assert () == verify.verify(store, public=PUBLIC).faults
        with closing(opened_store(world.path)) as store:
            report = verify.verify(store, public=PUBLIC)
            assert (report.head.idx, ()) == (report.signed, report.faults)
        return finished

    assert every_step(_written(folder, count), stop_once) > 30


def test_stopped_at_any_step_of_its_first_entry_a_record_begins_all_the_same(folder: Path):
    def fresh() -> World:
        emptied(folder)
        made = World.__new__(World)
        made.folder, made._open = folder, []
        return made

    def stop_once(world: World, crash: Faults) -> bool:
        finished = False
        try:
            with closing(opened_store(world.path, connect=failing(crash), witness=witness())) as store:
                act(store)
            finished = True
        except Crash:
            pass
        finally:
            crash.bury()
        with closing(opened_store(world.path, witness=witness())) as store:
            act(store)
            assert [1] == signed(store)[:1]
            assert () == verify.verify(store, public=PUBLIC).faults
        return finished

    assert every_step(fresh, stop_once) > 20


def test_a_key_that_is_no_text_is_said_to_be_another(folder: Path):
    with closing(opened_store(folder / "k.db", witness=witness())) as store:
        act(store)
        (checkpoint,) = ledger.read_checkpoints(store)
    damaged = replace(checkpoint, public_key=-1)  # type: ignore[arg-type]  # that is what is damaged
    assert "it: signed with another key, `-1`" == ledger.forged(damaged, "it", PUBLIC)
