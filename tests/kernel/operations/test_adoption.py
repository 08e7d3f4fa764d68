"""A record that knows less than the outside pays nothing again: not restored from a backup, not begun anew.

The events come again after it, as they would: from a queue that does not know what this record has lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sds.kernel.canonical import digest, flow_id
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import UsageError, WorldError
from sds.kernel.executor.statement import CLOCKS_APART_MS, Outcome, StatementLine
from sds.kernel.executor.wholeness import PAUSE_MS_MIN
from sds.kernel.flow.states import Answer
from sds.kernel.flow.undecided import settled_events
from sds.kernel.human.cases import waiting
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.registry import spend
from tests.kernel.authority import halt
from tests.kernel.durable import World, counters, deny, escalate, refund, whole
from tests.kernel.orders import left_hanging, recovered
from tests.kernel.outside import PaysOnly
from tests.kernel.sagas import REVERT, Script, executions, parent, reversed_at, run, terms
from tests.kernel.statements import (
    ListingRail,
    adopted,
    backup,
    codes,
    compared,
    decided,
    forgetful,
    listing,
    paid_elsewhere,
    restore,
)

DECISIONS = 12
LOST = 8


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder, terms=terms())) as made:
        for number in range(DECISIONS + 1):
            made.tickets.put(f"T{number}", mood="angry")
        yield made


def lose(world: World, kept: int) -> tuple[list[Answer], list[tuple[str, int]]]:
    """Decide all, put back what was kept after the first few; return what was decided and what was counted by then."""
    data: bytes | None = None
    answers = []
    for number in range(DECISIONS):
        if number == kept:
            data = backup(world) if kept else None
        answers.append(decided(world, number))
        world.clock.advance(1000)
    counted = sorted(counters(world.store))
    world.clock.advance(3_600_000)
    restore(world, data)
    return answers, counted


LOSSES = pytest.mark.parametrize("kept", [DECISIONS - LOST, 0], ids=["restored", "begun anew"])


@LOSSES
def test_an_idempotent_executor_that_lists_nothing_recognises_every_order(world: World, kept: int) -> None:
    world.kernel = world.open_kernel(executor=PaysOnly(world.rail))
    lose(world, kept)
    world.kernel = world.open_kernel(executor=PaysOnly(world.rail))
    paid = world.rail.paid()

    again = [decided(world, number) for number in range(DECISIONS)]

    assert paid == world.rail.paid()
    assert ["SUCCESS"] * DECISIONS == [answer.execution for answer in again]


@LOSSES
def test_where_the_executor_lists_nothing_is_ordered_until_the_rest_is_taken_over(world: World, kept: int) -> None:
    rail = listing(world)
    answers, counted = lose(world, kept)
    paid, lost = rail.paid(), DECISIONS - kept
    sent = len(rail.sent)

    world.tickets.put("T12", mood="angry")
    refused = world.kernel.open(world.event("C12", "T12"))
    assert isinstance(refused, DecisionPacket)
    answer = world.kernel.decide(refused, refund()(refused))
    assert ("ABORTED", "RECORD_BEHIND", True) == (answer.state, answer.tag, answer.retryable)
    unknown = f"the outside has {lost} orders that this record does not know"
    why = "the record was restored from a backup, or another program orders there (sds reconcile --adopt)"
    assert (f"gate 6: RECORD_BEHIND: {unknown}: {why}",) == answer.reasons
    assert sent == len(rail.sent)

    assert lost == len(adopted(world))
    assert counted == sorted(counters(world.store))
    assert [] == codes(world)
    again = [decided(world, number) for number in range(DECISIONS)]
    assert [(a.dfid, a.event_id, a.state, a.action, a.params, a.execution, a.reference) for a in answers] == [
        (a.dfid, a.event_id, a.state, a.action, a.params, a.execution, a.reference) for a in again
    ]
    assert (paid, sent) == (rail.paid(), len(rail.sent))
    assert "SUCCESS" == decided(world, 12, refund()).execution
    assert DECISIONS + 1 == len(settled_events(world.store, world.contract))


def test_what_is_taken_over_is_taken_over_once(world: World) -> None:
    listing(world)
    lose(world, 4)
    assert LOST == len(adopted(world))
    assert () == adopted(world)


def test_that_a_record_is_whole_is_asked_once_and_that_it_is_not_each_time(world: World) -> None:
    rail = listing(world)
    lose(world, 4)
    before = rail.listed
    for _ in range(2):
        packet = world.packet("C12", "T12")
        assert "RECORD_BEHIND" == world.kernel.decide(packet, refund()(packet)).tag
    assert 2 == rail.listed - before
    adopted(world)
    before = rail.listed
    decided(world, 12, refund())
    decided(world, 0, refund())
    assert 1 == rail.listed - before


def test_what_is_not_ordered_is_decided_all_the_same(world: World) -> None:
    listing(world)
    lose(world, 4)
    assert "ESCALATED" == decided(world, 12, escalate).state


@pytest.mark.parametrize("raised", [OSError("down"), WorldError("down")])
def test_a_record_of_which_nobody_can_tell_whether_it_is_whole_orders_nothing(world: World, raised: Exception) -> None:
    rail = listing(world)

    def statement(since_ms: int, until_ms: int) -> Iterator[StatementLine]:
        raise raised

    rail.statement, listed = statement, rail.statement  # type: ignore[method-assign]  # it is down for a moment
    packet = world.packet("C1", "T1")
    answer = world.kernel.decide(packet, refund()(packet))
    assert ("ABORTED", "EXECUTOR_DOWN", True, []) == (answer.state, answer.tag, answer.retryable, rail.sent)
    rail.statement = listed  # type: ignore[method-assign]
    world.clock.advance(PAUSE_MS_MIN)
    assert "SUCCESS" == decided(world, 1, refund()).execution


def test_an_operators_entry_does_not_make_a_record_newer_than_its_last_order(world: World) -> None:
    """What was written since it was put back says nothing of what it lost."""
    rail = listing(world)
    decided(world, 0)
    data = backup(world)
    decided(world, 1)
    world.clock.advance(40 * 86_400_000)
    restore(world, data)

    halt(world)
    halt(world, halted=False)
    assert world.kernel.whole.doubt() is not None
    assert 2 == len(rail.paid())


def test_a_humans_order_waits_as_well(world: World) -> None:
    rail = listing(world)
    dfid = decided(world, 12, escalate).dfid
    paid_elsewhere(world.folder, "e" * 64, 500)
    desk = HumanReview(world.kernel, now_ms=world.clock)
    change = '{"action":"REFUND_TICKET","params":{"amount":1.00},"reason":"NOT_TRAVELLED"}'
    wanted = Resolution("MODIFY", "ada", "why", change, acknowledged=True)
    with pytest.raises(WorldError, match="the outside has 1 order that this record does not know") as refused:
        desk.resolve(dfid, wanted)
    assert ("RECORD_BEHIND", []) == (refused.value.reason_code, rail.sent)
    assert "--adopt --reason" in refused.value.hint
    adopted(world)
    assert "SUCCESS" == desk.resolve(dfid, wanted).execution


def test_recovery_sends_nothing_again_for_a_record_that_is_behind(world: World) -> None:
    rail = listing(world)
    left_hanging(world, paid=False)
    paid_elsewhere(world.folder, "e" * 64, 500)
    world.kernel = world.open_kernel()
    world.clock.advance(60_000)
    assert 1 == recovered(world).failed
    assert [] == rail.sent


def test_what_was_restarted_before_it_was_paid_is_recognised(world: World) -> None:
    """The order belongs to the event's third flow; the record that is begun anew knows none of them."""
    rail = listing(world)
    for _ in range(2):
        packet = world.packet("C1", "T1")
        world.tickets.put("T1", refundable_minor=5000 + len(rail.sent))
        world.tickets.put("T1", mood="calm" if world.tickets.rows["T1"]["ticket.mood"] == "angry" else "angry")
        assert "STATE_DRIFT_DETECTED" == world.kernel.decide(packet, refund()(packet)).tag
    third = decided(world, 1, refund())
    assert flow_id("claims", "C1", digest(world.event("C1", "T1").body), 2) == third.dfid
    restore(world, None)
    adopted(world)
    assert ("SUCCESS", third.dfid) == (decided(world, 1, refund()).execution, decided(world, 1).dfid)
    assert 1 == len(rail.paid())


def test_what_a_human_ordered_about_a_case_they_were_handed_is_recognised(world: World) -> None:
    """Declined four times, the event was handed to a human, and that flow's id follows from the last one's."""
    rail = listing(world)
    rail.misfortunes = ["refuse"] * 4
    handed = decided(world, 1, refund())
    assert "ESCALATED" == handed.state
    change = '{"action":"REFUND_TICKET","params":{"amount":1.00},"reason":"NOT_TRAVELLED"}'
    wanted = Resolution("MODIFY", "ada", "why", change, acknowledged=True)
    HumanReview(world.kernel, now_ms=world.clock).resolve(handed.dfid, wanted)
    restore(world, None)
    assert handed.dfid in adopted(world)
    assert ("SUCCESS", handed.dfid) == (decided(world, 1, refund()).execution, decided(world, 1).dfid)
    assert 1 == len(rail.paid())


@pytest.mark.parametrize("open_as", ["escalated", "active", "interrupted"])
def test_an_order_of_a_flow_that_is_known_is_written_to_it(world: World, open_as: str) -> None:
    """The backup was taken between the flow's beginning and its order."""
    rail = listing(world)
    packet = world.packet("C1", "T1")
    if open_as == "escalated":
        world.kernel.decide(packet, escalate(packet))
    data = backup(world)
    if open_as == "escalated":
        change = '{"action":"REFUND_TICKET","params":{"amount":40.00},"reason":"NOT_TRAVELLED"}'
        wanted = Resolution("MODIFY", "ada", "why", change, acknowledged=True)
        HumanReview(world.kernel, now_ms=world.clock).resolve(packet.dfid, wanted)
    else:
        world.kernel.decide(packet, refund()(packet))
    restore(world, data)
    if open_as == "interrupted":
        world.clock.advance(60_000)
        recovered(world)

    assert (packet.dfid,) == adopted(world)

    assert ["CLOSED"] == world.column("SELECT state FROM decision_flows")
    assert [] == waiting(world.store, world.contract)
    assert "SUCCESS" == decided(world, 1).execution
    assert 1 == len(rail.paid())


def test_the_ticket_cannot_be_refunded_beyond_its_fare_by_another_event(world: World) -> None:
    listing(world)
    world.decide(refund("150.00"), "C1", "T1")
    restore(world, None)
    adopted(world)
    packet = world.packet("C2", "T1")
    kind = packet.envelope.kind("REFUND_TICKET")
    assert kind is not None
    assert 5000 == dict(kind.params)["amount"].hi


def test_a_case_about_an_unknown_order_is_closed_by_whoever_takes_it_over(world: World) -> None:
    listing(world)
    lose(world, 4)
    assert LOST == len(compared(world).differences)
    assert LOST == len(waiting(world.store, world.contract))
    adopted(world)
    assert [] == waiting(world.store, world.contract)
    assert {"adopted: the disk was lost"} == set(world.column("SELECT reason FROM human_decisions"))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("also", ["rejected", "reverted"])
def test_an_order_that_is_listed_as_settled_and_once_more_is_not_paid_again(
    world: World, also: Outcome, before: bool
) -> None:
    """A gateway lists each attempt, or the payment and what became of it."""
    rail = listing(world)
    decided(world, 0)
    data = backup(world)
    decided(world, 1)
    world.clock.advance(3_600_000)
    restore(world, data)
    paid, listed = rail.paid(), rail.statement

    def twice(since_ms: int, until_ms: int) -> Iterator[StatementLine]:
        for line in listed(since_ms, until_ms):
            other = replace(line, outcome=also)
            yield from (other, line) if before else (line, other)

    rail.statement = twice  # type: ignore[method-assign]  # what it lists is what is tested
    adopted(world)
    assert "SUCCESS" == decided(world, 1).execution
    assert paid == rail.paid()
    assert {"CARRIED_OUT_TWICE"} == set(codes(world))


def test_of_an_order_that_was_carried_out_in_another_currency_what_was_ordered_counts(world: World) -> None:
    """What moved is a number of other units: 5 dollars here, where 40.00 of our own money was ordered."""
    rail = listing(world)
    world.decide(refund("40.00"), "C1", "T1")
    before = list(counters(world.store))
    restore(world, None)
    rail.tells = lambda line: replace(line, params={"amount": 4000}, amount_minor=5, other_currency="USD")
    assert 1 == len(adopted(world))
    assert before == list(counters(world.store))


@pytest.mark.parametrize("ahead_ms", [0, 61_000, 7_200_000, CLOCKS_APART_MS - 1])
def test_what_moved_counts_in_the_present_windows_where_the_outsides_clock_is_ahead(
    world: World, ahead_ms: int
) -> None:
    rail = listing(world)
    world.decide(refund("40.00"), "C1", "T1")
    before = list(counters(world.store))
    restore(world, None)
    rail.tells = lambda line: replace(line, at_ms=line.at_ms + ahead_ms)
    assert 1 == len(adopted(world))
    assert before == list(counters(world.store))
    assert [] == codes(world)


class TestAnOutsideThatKeepsNothingButKeys:
    @pytest.fixture
    def rail(self, world: World) -> ListingRail:
        rail = listing(world)
        rail.tells = forgetful
        world.decide(refund(), "C1", "T1")
        restore(world, None)
        return rail

    def test_the_same_decision_is_never_ordered_again_and_goes_to_a_human(
        self, world: World, rail: ListingRail
    ) -> None:
        adopted(world)
        answer = decided(world, 1, refund())
        assert ("ESCALATED", "ALREADY_ORDERED") == (answer.state, answer.reason_code)
        assert ["ACTIVE"] == world.column("SELECT status FROM agents")
        assert 1 == len(rail.sent)
        (case,) = waiting(world.store, world.contract)
        desk = HumanReview(world.kernel, now_ms=world.clock)
        with pytest.raises(UsageError, match="the record already has this order"):
            desk.resolve(case.dfid, Resolution("OVERRIDE", "ada", "pay it", acknowledged=True))
        assert "ABORTED" == desk.resolve(case.dfid, Resolution("ABORT", "ada", "it was paid")).state
        assert (1, 1) == (len(rail.sent), len(rail.paid()))

    def test_the_money_that_moved_counts_against_the_limits_although_nobody_knows_what_for(
        self, world: World, rail: ListingRail
    ) -> None:
        moved = world.rail.paid()[0][3]
        assert moved > 0
        adopted(world)
        day = f"claims/day/{spend.window(world.contract.spend[1], world.clock())}/*"
        assert moved == world.store.value("SELECT used FROM spend_totals WHERE scope = ?", (day,))
        assert [] == world.store.rows("SELECT 1 FROM resources")

    def test_where_it_does_not_tell_the_amount_either_nothing_is_counted(self, world: World, rail: ListingRail) -> None:
        rail.tells = lambda line: replace(forgetful(line), amount_minor=None)
        adopted(world)
        assert [] == list(counters(world.store))


def test_a_saga_goes_on_where_the_outside_says_it_was(world: World) -> None:
    rail = listing(world)
    run(world.kernel, world, Script())
    paid = rail.paid()
    restore(world, None)
    assert 2 == len(adopted(world))
    script = Script()
    again = run(world.kernel, world, script)
    assert (("CLOSED", None, None), ["SUCCESS", "SUCCESS"], []) == (parent(again), executions(again), script.asked)
    assert paid == rail.paid()


def test_a_step_that_was_taken_over_can_be_taken_back(world: World) -> None:

    listing(world)
    run(world.kernel, world, Script())
    with_first = world.rail.paid()[0][0]
    restore(world, None)
    assert isinstance(world.rail, ListingRail)
    world.rail.tells = lambda line: line if line.dfid == with_first else replace(line, outcome="reverted")
    adopted(world)
    found = run(world.kernel, world, Script(step_2=deny, compensation=REVERT))
    assert ("ABORTED", "COMPENSATED", "REVERT") == parent(found)
    assert 1 == len(reversed_at(world.folder))
