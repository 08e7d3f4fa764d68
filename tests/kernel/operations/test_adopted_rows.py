"""What is written of an order that was taken over: by name and reason, whole or not at all, and sealed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import SdsError, UsageError
from sds.kernel.executor.protocol import Receipt
from sds.reconciliation import adopt
from tests.kernel.durable import World, refund, whole
from tests.kernel.faults import Crash, Faults, failing
from tests.kernel.statements import (
    adopted,
    backup,
    codes,
    decided,
    listing,
    paid_elsewhere,
    restore,
)
from tests.kernel.tampering import found_after
from tests.scale import scale
from tests.stores.opened import opened_store


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder)) as made:
        for number in range(4):
            made.tickets.put(f"T{number}", mood="angry")
        yield made


class TestTheEntry:
    @pytest.fixture
    def dfid(self, world: World) -> str:
        listing(world)
        world.decide(refund(), "C1", "T1")
        restore(world, None)
        (dfid,) = adopted(world)
        return dfid

    def test_it_says_who_and_why(self, world: World, dfid: str) -> None:
        (by,) = world.column("SELECT body -> '$.by' FROM ledger WHERE kind = 'ADOPTED' AND dfid = ?", dfid)
        assert '{"reason":"the disk was lost","who":"ada"}' == by

    @pytest.mark.parametrize(
        "sql",
        [
            "UPDATE execution_log SET status = 'FAILED'",
            "UPDATE execution_log SET params = '{\"amount\":1}'",
            "UPDATE execution_log SET external_receipt = 'another'",
            "UPDATE decision_flows SET trigger_event = '{}'",
            "UPDATE decision_flows SET tag = NULL",
            "UPDATE reservations SET amount = 1",
            "UPDATE resources SET drawn = 0",
            "UPDATE spend_totals SET used = 0",
            "DELETE FROM execution_log",
            "INSERT INTO events SELECT gate, 'C7', 'body', dfid FROM decision_flows",
        ],
    )
    def test_any_alteration_is_found(self, world: World, dfid: str, sql: str) -> None:
        assert found_after(world, (sql, ()))

    def test_an_event_that_is_bound_to_it_by_another_name_is_found(self, world: World, dfid: str) -> None:
        decided(world, 1)
        assert found_after(world, ("UPDATE events SET event_id = 'C7'", ()))

    @pytest.mark.parametrize(("who", "reason"), [("", "why"), ("ada", " "), ("", "")])
    def test_nobody_takes_over_without_a_name_and_a_reason(
        self, world: World, dfid: str, who: str, reason: str
    ) -> None:
        with pytest.raises(UsageError, match="is needed, for the record"):
            adopt(world.kernel, who=who, reason=reason, now_ms=world.clock)


def test_stopped_at_any_step_each_order_is_taken_over_whole_or_not_at_all(world: World) -> None:
    listing(world)
    for number in range(3):
        decided(world, number)
    restore(world, None)
    fresh = backup(world)
    whole = False
    for at in range(scale(2, 1), 2000, scale(2, 1)):
        faults = Faults()
        store = opened_store(world.path, connect=failing(faults))
        faults.at = len(faults.steps) + at
        with suppress(Crash, SdsError):
            adopt(world.open_kernel(store), who="ada", reason="why", now_ms=world.clock)
            whole = True
        faults.bury()
        assert () == verify.verify(world.store).faults
        if whole:
            break
        adopted(world)
        assert [] == codes(world)
        restore(world, fresh)
    assert whole


def test_the_outside_decides_what_an_order_came_to(world: World) -> None:
    """A stranger's order with facts of no kind of ours is known by its key, and draws nothing."""
    listing(world)
    paid_elsewhere(world.folder, "e" * 64, 500)
    (dfid,) = adopted(world)
    assert "somebody-else" == dfid
    assert ["SUCCESS"] == world.column("SELECT status FROM execution_log")
    assert [""] == world.column("SELECT signature FROM execution_log")
    assert Receipt("settled", "PAY-00000001") == world.rail.lookup("e" * 64, 1.0)
