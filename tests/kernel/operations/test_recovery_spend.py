"""Recovery and the spend limits: what is sent again is paid now, so it has to be counted against the limits of now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.executor.protocol import Receipt
from sds.kernel.operations import recovery
from sds.kernel.operations.recovery import Recovered
from tests.kernel.durable import COMPENSATION_MINOR, World, compensate, contract, counters, refund, see_through, whole
from tests.kernel.humans import HOUR_MS, TERMS, desk, escalated, resolve
from tests.kernel.orders import recovered
from tests.kernel.outside import PaysOnly

DAY_MS = 24 * HOUR_MS
CUSTOMER_MAX = 100_000


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder)) as made:
        yield made


@pytest.fixture
def desked(folder: Path) -> Iterator[World]:
    """A gate whose agent decides nothing alone."""
    with whole(World(folder, terms=TERMS)) as made:
        yield made


def lost(world: World) -> None:
    world.rail.misfortunes = ["drop"]
    assert "UNKNOWN" == world.decide(refund()).execution


def test_orders_of_three_days_are_not_all_paid_on_the_fourth(world: World):
    tickets = [f"{day}-{number}" for day in range(3) for number in range(CUSTOMER_MAX // COMPENSATION_MINOR)]
    for number, ticket in enumerate(tickets, start=1):
        world.tickets.put(ticket, customer="ada")
        world.rail.misfortunes = ["drop"]
        assert "UNKNOWN" == world.decide(compensate, f"C{ticket}", ticket).execution
        if number % 4 == 0:
            world.clock.advance(DAY_MS)
    assert Recovered(failed=len(tickets)) == recovered(world)
    assert ([], {0}) == (world.rail.paid(), {amount for _, amount in counters(world.store)})
    for ticket in tickets[:4]:  # as much as one day has room for
        assert "SUCCESS" == see_through(world.kernel, world.event(f"C{ticket}", ticket), compensate).execution
    assert "COMPENSATE" not in world.kernel.preview(world.event("C9", tickets[4])).envelope.names
    assert CUSTOMER_MAX == sum(amount for *_, amount in world.rail.paid())


@pytest.mark.parametrize(("later_ms", "paid"), [(HOUR_MS - 1, 1), (HOUR_MS, 0)], ids=["within its hour", "after it"])
def test_an_order_is_sent_again_only_in_the_hour_it_is_counted_in(world: World, later_ms: int, paid: int):
    lost(world)  # at the full hour
    world.clock.advance(later_ms)
    assert Recovered(success=paid, failed=1 - paid) == recovered(world)
    assert paid == len(world.rail.paid())
    assert "SUCCESS" == see_through(world.kernel, world.event(), refund()).execution
    assert 1 == len(world.rail.paid())


def test_an_order_that_cannot_be_voided_after_its_hour_stays_unknown_and_counted(world: World):
    lost(world)
    world.clock.advance(HOUR_MS)
    world.kernel = world.open_kernel(executor=PaysOnly(world.rail))
    assert Recovered(unknown=1) == recovered(world)
    assert (1, {4_000}) == (len(world.rail.sent), {used for _, used in counters(world.store)})


def test_what_takes_nothing_of_a_limit_has_no_hour(folder: Path):
    world = World(folder, terms=contract(("spends: amount\n    reasons: [NOT_TRAVELLED]", "reasons: [NOT_TRAVELLED]")))
    lost(world)
    world.clock.advance(DAY_MS)
    assert Recovered(success=1) == recovered(world)
    world.close()


@pytest.mark.parametrize(("later_ms", "paid"), [(HOUR_MS - 1, 1), (HOUR_MS, 0)], ids=["within its hour", "after it"])
def test_a_humans_order_is_held_to_the_same_and_its_case_comes_again(desked: World, later_ms: int, paid: int):
    """What ends is the order; nothing was decided against the customer, so it is a human's again."""
    dfid = escalated(desked, refund())
    desked.rail.misfortunes = ["drop"]
    assert "UNKNOWN" == resolve(desked, dfid, "OVERRIDE").execution
    desked.clock.advance(later_ms)
    assert Recovered(success=paid, failed=1 - paid) == recovered(desked)
    assert paid == len(desked.rail.paid())
    if not paid:
        assert [("ABORTED", "INTERRUPTED"), ("ESCALATED", "INTERRUPTED")] == desked.store.rows(
            "SELECT state, tag FROM decision_flows ORDER BY restarts"
        )
        assert "ESCALATED" == see_through(desked.kernel, desked.event(), refund()).state
        assert [False] == [case.dfid == dfid for case in desk(desked).waiting()]


def test_a_recovery_that_takes_until_the_next_hour_goes_by_the_clock_and_not_by_when_it_began(desked: World):
    dfid = escalated(desked, refund())
    desked.rail.misfortunes = ["drop"]
    resolve(desked, dfid, "OVERRIDE")
    lookup = desked.rail.lookup

    def slowly(key: str, deadline_s: float) -> Receipt:
        desked.clock.advance(HOUR_MS)
        return lookup(key, deadline_s)

    desked.rail.lookup = slowly  # type: ignore[method-assign]
    assert Recovered(failed=1) == recovery.recover(desked.kernel, now_ms=desked.clock())
    assert [] == desked.rail.paid()
