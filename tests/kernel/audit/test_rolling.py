"""A record is verified a page at a time while it is decided with: what somebody changed is found within one walk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.audit import rolling
from sds.kernel.audit.rolling import RollingVerification
from sds.kernel.registry import registry
from sds.kernel.storage.ledger import CHECKPOINT_EVERY, LedgerKey, head
from tests.kernel.durable import PUBLIC, World, deny
from tests.kernel.tampering import chained, full_record, resigned, tampering

OTHER = LedgerKey(b"the key of somebody else, a liar", PUBLIC.since)


@pytest.fixture
def full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(rolling, "PAGE_MAX", 7)
    made = full_record(folder)
    yield made
    made.close()


def walk(rolled: RollingVerification, world: World) -> list[str]:
    """Return the first faults that one walk through the whole ledger finds, and a page more: it may begin within a page."""
    looks = (rolled.faults(lambda: PUBLIC) for _ in range(head(world.store).idx // rolling.PAGE_MAX + 2))
    return next((found for found in looks if found), [])


@pytest.mark.parametrize("page", [1, 7, 100, 1_000])
def test_a_record_with_one_of_everything_has_no_fault_however_often_it_is_walked(
    full: World, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(rolling, "PAGE_MAX", page)
    rolled = RollingVerification(full.store)
    assert [[], [], []] == [walk(rolled, full) for _ in range(3)]


def test_what_is_written_between_two_pages_is_no_fault(full: World) -> None:
    rolled = RollingVerification(full.store)
    for number in range(CHECKPOINT_EVERY // 2):
        full.decide(deny, f"later {number}", "T6")
        assert [] == rolled.faults(lambda: PUBLIC)


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("UPDATE ledger SET body = body || ' ' WHERE idx = 5", "entry 5: content does not match its hash"),
        ("UPDATE ledger SET at_ms = at_ms + 1 WHERE idx = 20", "entry 20: content does not match its hash"),
        ("DELETE FROM ledger WHERE idx = 9", "entry 9: missing"),
        ("DELETE FROM checkpoints WHERE idx = 1", "the one before it, of entry 1, is missing"),
        ("UPDATE execution_log SET params = '{}'", "table execution_log of flow"),
        ("UPDATE policy_proposals SET confidence = 0.5", "table policy_proposals of flow"),
        ("DELETE FROM dim_validations", "table dim_validations of flow"),
        ("DELETE FROM reservations", "table reservations of flow"),
        ("UPDATE decision_flows SET event_id = event_id || 'x'", "table decision_flows of flow"),
    ],
)
def test_a_row_that_was_changed_or_removed_is_found_in_one_walk_and_stays_so_until_it_is_back(
    full: World, sql: str, said: str
) -> None:
    rolled = RollingVerification(full.store)
    assert [] == walk(rolled, full)
    with tampering(full) as db:
        db.execute(sql)
        db.hide()
        found = walk(rolled, full)
        assert said in found[0]
        assert found == rolled.faults(lambda: PUBLIC)
    assert [] == walk(rolled, full)


def test_a_ledger_that_was_cut_off_or_chained_anew_is_found_at_the_next_look(full: World) -> None:
    rolled = RollingVerification(full.store)
    assert [] == rolled.faults(lambda: PUBLIC)
    last = head(full.store).idx
    with tampering(full) as db:
        db.execute("DELETE FROM ledger WHERE idx = ?", (last,))
        assert [f"entry {last}: gone, or not the entry that it was"] == rolled.faults(lambda: PUBLIC)
    with tampering(full) as db:
        db.execute("UPDATE ledger SET at_ms = at_ms - 1 WHERE idx = 2")
        chained(db)
        assert [f"entry {last}: gone, or not the entry that it was"] == rolled.faults(lambda: PUBLIC)
    assert [] == walk(rolled, full)


def test_a_ledger_that_somebody_wrote_and_signed_before_the_walk_began_is_found(full: World) -> None:
    with tampering(full) as db:
        chained(db)
        resigned(db, OTHER)
        db.hide()
        assert "signed with another key" in walk(RollingVerification(full.store), full)[0]


def test_a_ledger_that_nobody_signed_is_found(full: World) -> None:
    for _ in range(CHECKPOINT_EVERY):
        registry.write_act(full.store, "TEST", who="me", reason="x", now_ms=1)
    with tampering(full) as db:
        db.execute("DELETE FROM checkpoints WHERE idx > 1")
        db.hide()
        assert f"more than {CHECKPOINT_EVERY} without a checkpoint" in walk(RollingVerification(full.store), full)[0]


def test_an_empty_record_has_no_fault(world: World) -> None:
    rolled = RollingVerification(world.store)
    assert ([], []) == (rolled.faults(lambda: None), rolled.faults(lambda: PUBLIC))
    world.close()
