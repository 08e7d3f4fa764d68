"""Leases, and under a clock that was wrong: nothing is held longer than a lease can be, nothing is paid twice for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import UsageError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.flow.states import Answer, is_held
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.operations.recovery import Recovered
from sds.kernel.saga.claim import claim as claim_saga
from tests.kernel.durable import LEASE_MS, World, refund, see_through, whole
from tests.kernel.humans import TERMS, escalated
from tests.kernel.orders import left_hanging, recovered
from tests.kernel.sagas import terms

YEAR_MS = 365 * 24 * 3600 * 1000
WANTED = Resolution("OVERRIDE", "ada", "looked into it", acknowledged=True)


def dies(*_: object, **__: object) -> str:
    """End the process on its way to the rail."""
    raise KeyboardInterrupt


@pytest.fixture
def ahead(folder: Path) -> Iterator[World]:
    """A world whose clock is a year ahead."""
    with whole(World(folder, terms=terms())) as made:
        made.clock.advance(YEAR_MS)
        yield made


@pytest.mark.parametrize(
    ("now_ms", "expected"),
    [(69, False), (70, True), (99, True), (100, True), (130, True), (131, False)],
)
def test_a_lease_runs_from_its_own_length_before_its_beginning_to_its_end(now_ms: int, expected: bool):
    assert expected is is_held(100, 130, now_ms)


def test_a_flow_of_a_clock_that_was_ahead_is_taken_over(ahead: World):
    first = ahead.packet()
    ahead.clock.advance(-YEAR_MS)
    second = ahead.packet()
    assert [first.dfid] == ahead.column("SELECT parent_dfid FROM decision_flows WHERE dfid = ?", second.dfid)
    with pytest.raises(UsageError, match=f"flow `{first.dfid}` is no longer open"):
        ahead.kernel.decide(first, refund()(first))
    ahead.kernel.decide(second, refund()(second))
    assert 1 == len(ahead.rail.paid())


def test_a_clock_set_back_by_less_than_a_lease_takes_nothing_from_its_holder(ahead: World):
    packet = ahead.packet()
    ahead.clock.advance(-LEASE_MS // 2)
    assert Recovered(leased=1) == recovered(ahead)
    assert isinstance(ahead.kernel.open(ahead.event()), Answer)
    ahead.clock.advance(LEASE_MS // 2)
    assert "SUCCESS" == ahead.kernel.decide(packet, refund()(packet)).execution


def test_a_flow_of_a_clock_that_was_ahead_is_interrupted_by_recovery(ahead: World):
    ahead.packet()
    ahead.clock.advance(-YEAR_MS)
    assert Recovered(interrupted=1) == recovered(ahead)


def test_an_order_of_a_clock_that_was_ahead_is_settled(ahead: World):
    left_hanging(ahead, paid=True)
    ahead.clock.advance(-YEAR_MS)
    assert Recovered(success=1) == recovered(ahead)
    assert (1, ["settled"]) == (len(ahead.rail.paid()), ahead.column("SELECT status FROM reservations"))


def test_an_order_of_a_clock_that_was_ahead_which_was_never_sent_is_voided(ahead: World):
    """Its spend limits were counted on a day that is not today's."""
    left_hanging(ahead, paid=False)
    ahead.clock.advance(-YEAR_MS)
    assert Recovered(failed=1) == recovered(ahead)
    assert (0, ["released"]) == (len(ahead.rail.paid()), ahead.column("SELECT status FROM reservations"))
    assert "SUCCESS" == see_through(ahead.kernel, ahead.event(), refund()).execution


def test_an_order_nobody_can_tell_the_end_of_waits_for_a_human(ahead: World):
    left_hanging(ahead, paid=False)
    ahead.rail.blind = True
    ahead.clock.advance(-YEAR_MS)
    assert Recovered(unknown=1) == recovered(ahead)


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_sender_that_is_alive_after_all_pays_at_most_once(folder: Path, idempotent: bool):
    world = World(folder, idempotent=idempotent)
    world.clock.advance(YEAR_MS)
    until_ms = world.clock() + world.contract.budget.dispatch_ms_max
    intent = left_hanging(world, paid=False)
    world.clock.advance(-YEAR_MS)
    recovered(world)
    world.kernel.dispatcher.carry_out(intent, until_ms=until_ms)
    assert "SUCCESS" == see_through(world.kernel, world.event(), refund()).execution
    assert 1 == len(world.rail.paid())
    assert [4_000] == world.column("SELECT drawn FROM resources")
    assert () == verify.verify(world.store).faults
    world.close()


def test_a_humans_order_of_a_clock_that_was_ahead_is_voided(folder: Path):
    world = World(folder, terms=TERMS)
    world.clock.advance(YEAR_MS)
    dfid = escalated(world, refund("40.00"))
    kernel = world.open_kernel()
    kernel.dispatcher.carry_out = dies  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        HumanReview(kernel, now_ms=world.clock).resolve(dfid, WANTED)
    assert Recovered(leased=1) == recovered(world)
    world.clock.advance(-YEAR_MS)
    assert Recovered(failed=1) == recovered(world)
    assert [] == world.rail.sent
    assert () == verify.verify(world.store).faults
    world.close()


def test_a_saga_of_a_clock_that_was_ahead_is_ended(ahead: World):
    claim_saga(ahead.store, ahead.contract, "BOTH", ahead.event(), now_ms=ahead.clock())
    ahead.clock.advance(-YEAR_MS)
    assert Recovered(sagas_ended=1) == recovered(ahead)


@pytest.mark.parametrize(("late_ms", "sent"), [(0, 1), (1, 0)])
def test_a_slow_state_source_takes_nothing_from_the_time_to_send(world: World, late_ms: int, sent: int):
    """That begins when the order is reserved, and to its last millisecond the flow's lease keeps recovery away."""
    packet, budget = world.packet(), world.contract.budget
    commit, send = world.kernel.commit, world.rail.dispatch

    def pause(*args: Any) -> ExecutionIntent | None:
        intent = commit(*args)
        world.clock.advance(budget.dispatch_ms_max + late_ms)
        return intent

    def look(intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        assert Recovered(leased=1) == recovered(world)
        return send(intent, key, deadline_s)

    world.tickets.on_read = lambda _key: world.clock.advance(budget.ttl_ms)
    world.kernel.commit, world.rail.dispatch = pause, look  # type: ignore[method-assign]
    answer = world.kernel.decide(packet, refund()(packet))
    world.tickets.on_read = lambda _key: None
    assert ("SUCCESS" if sent else "UNKNOWN", sent) == (answer.execution, len(world.rail.paid()))
    assert sent or ["not sent: the time to send the order was over"] == world.column(
        "SELECT json_extract(body, '$.detail') FROM ledger WHERE kind = 'UNKNOWN'"
    )
