"""Events that come again while the record does not know that they were paid: once that is taken over, nothing is paid again.

A caller sends what was refused for now as often as it likes, and each time a flow is begun and ends undecided. Which of them
the order was given by the outside says, and whatever followed it in this record is not decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import UsageError
from sds.kernel.flow import intake
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from sds.kernel.human.cases import waiting
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.operations import erasure
from sds.kernel.registry import registry
from sds.kernel.saga import driver
from sds.kernel.saga import state as saga
from sds.kernel.saga.claim import claim as claim_saga
from sds.kernel.saga.kernels import StepKernel
from tests.kernel.durable import LEASE_MS, Propose, World, counters, deny, escalate, refund, whole
from tests.kernel.orders import recovered
from tests.kernel.sagas import REVERT, Script, executions, most, parent, reversed_at, run, terms
from tests.kernel.statements import adopted, backup, decided, listing, restore
from tests.stores.records import Kept

BEHIND = "RECORD_BEHIND"


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder, terms=terms())) as made:
        for number in range(4):
            made.tickets.put(f"T{number}", mood="angry")
        yield made


def paid_and_lost(world: World) -> tuple[str, list[tuple[str, int]]]:
    """Pay an event, put the record back as it was before; return the flow that ordered it, and what was paid."""
    rail = listing(world)
    decided(world, 2, refund("10.00"))  # so that the record is not an empty one
    data = backup(world)
    dfid = decided(world, 1, refund("40.00")).dfid
    world.clock.advance(60_000)
    restore(world, data)
    return dfid, rail.paid()


def sent(world: World, number: int, propose: Propose) -> Answer:
    """Send an event once, as whoever sends it again later does."""
    packet = world.packet(f"C{number}", f"T{number}")
    return world.kernel.decide(packet, propose(packet))


@pytest.mark.parametrize("amount", ["40.00", "70.00"])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_however_often_it_was_sent_meanwhile_it_is_paid_once(world: World, times: int, amount: str) -> None:
    dfid, paid = paid_and_lost(world)
    assert [BEHIND] * times == [sent(world, 1, refund(amount)).tag for _ in range(times)]
    assert (dfid,) == adopted(world)
    again = decided(world, 1, refund(amount))
    assert (dfid, "CLOSED", "SUCCESS", "C1") == (again.dfid, again.state, again.execution, again.event_id)
    assert paid == world.rail.paid()


@pytest.mark.parametrize("times", [0, 2])
def test_whoever_is_deciding_it_while_it_is_taken_over_orders_nothing(world: World, times: int) -> None:
    dfid, paid = paid_and_lost(world)
    for _ in range(times):
        sent(world, 1, refund())
    packet = world.packet("C1", "T1")
    adopted(world)
    with pytest.raises(UsageError, match="no longer open"):
        world.kernel.decide(packet, refund("70.00")(packet))
    assert (dfid, "SUCCESS") == ((again := decided(world, 1, refund("70.00"))).dfid, again.execution)
    assert paid == world.rail.paid()


def test_another_event_that_is_being_decided_meanwhile_begins_anew(world: World) -> None:
    paid_and_lost(world)
    packet = world.packet("C3", "T3")
    adopted(world)
    with pytest.raises(UsageError, match="no longer open"):
        world.kernel.decide(packet, refund()(packet))
    again = decided(world, 3, refund())
    assert ("CLOSED", "SUCCESS", packet.dfid) == (again.state, again.execution, again.parent_dfid)


@pytest.mark.parametrize("times", [0, 1])
def test_a_case_about_an_event_that_was_paid_is_closed_and_cannot_be_carried_out(world: World, times: int) -> None:
    dfid, paid = paid_and_lost(world)
    for _ in range(times):
        assert BEHIND == sent(world, 1, refund()).tag
    case = decided(world, 1, escalate)
    assert "ESCALATED" == case.state
    assert (dfid,) == adopted(world)
    assert [] == waiting(world.store, world.contract)
    assert (dfid, "SUCCESS") == ((again := decided(world, 1, refund())).dfid, again.execution)
    assert paid == world.rail.paid()


def test_a_human_cannot_pay_what_was_paid_by_a_flow_of_which_the_record_knows_nothing(world: World) -> None:
    """The order was given by the event's second flow; here its first one waits for a human."""
    rail = listing(world)
    packet = world.packet("C1", "T1")
    world.kernel.not_decided(packet, "NO_TURN", "there is no turn")
    decided(world, 1, refund("40.00"))
    restore(world, None)
    case = decided(world, 1, escalate)
    assert case.dfid == packet.dfid
    adopted(world)
    desk = HumanReview(world.kernel, now_ms=world.clock)
    (waits,) = waiting(world.store, world.contract)
    seen = desk.view(desk.case(waits.dfid)).seen
    change = '{"action":"REFUND_TICKET","params":{"amount":1.00},"reason":"NOT_TRAVELLED"}'
    with pytest.raises(UsageError, match="the record already has this order") as refused:
        desk.resolve(waits.dfid, Resolution("MODIFY", "ada", "why", change, seen, acknowledged=True))
    assert "ALREADY_ORDERED" == refused.value.reason_code
    assert "ABORTED" == desk.resolve(waits.dfid, Resolution("ABORT", "ada", "it was paid")).state
    assert 1 == len(rail.paid())


@pytest.mark.parametrize("amount", ["40.00", "70.00"])
@pytest.mark.parametrize("returned_first", [True, False])
def test_a_case_about_an_event_that_was_paid_is_not_paid_again_when_it_is_returned(
    world: World, amount: str, *, returned_first: bool
) -> None:
    """The order was given by the event's second flow; here its first one waits for a human, who returns it."""
    rail = listing(world)
    packet = world.packet("C1", "T1")
    world.kernel.not_decided(packet, "NO_TURN", "there is no turn")
    dfid = decided(world, 1, refund("40.00")).dfid
    restore(world, None)
    case = decided(world, 1, escalate)
    desk = HumanReview(world.kernel, now_ms=world.clock)
    if returned_first:
        desk.resolve(case.dfid, Resolution("RETURN", "ada", "the agent may decide"))
        assert BEHIND == sent(world, 1, refund(amount)).tag
        adopted(world)
    else:
        adopted(world)
        desk.resolve(case.dfid, Resolution("RETURN", "ada", "the agent may decide"))
    assert (dfid, "SUCCESS") == ((again := decided(world, 1, refund(amount))).dfid, again.execution)
    assert 1 == len(rail.paid())


def test_a_case_of_another_event_is_carried_out_by_a_human_all_the_same(world: World) -> None:
    """Although its contract has been replaced since by one whose events have another form."""
    paid_and_lost(world)
    adopted(world)
    case = decided(world, 3, escalate)
    newer = terms(("version: 1.0.0", "version: 2.0.0"), ("evidence: text", "evidence: letter"))
    registry.register(world.store, newer, by="registry", now_ms=world.clock())
    world.kernel = world.open_kernel(terms=newer, executor=world.rail)
    desk = HumanReview(world.kernel, now_ms=world.clock)
    change = '{"action":"REFUND_TICKET","params":{"amount":1.00},"reason":"NOT_TRAVELLED"}'
    seen = desk.view(desk.case(case.dfid)).seen
    answer = desk.resolve(case.dfid, Resolution("MODIFY", "ada", "why", change, seen, acknowledged=True))
    assert ("CLOSED", "SUCCESS") == (answer.state, answer.execution)


def test_a_flow_that_nobody_recognises_at_first_decides_its_event_once_that_comes(world: World) -> None:
    """The order was given by the event's second flow; this record knows the first, undecided."""
    rail = listing(world)
    packet = world.packet("C1", "T1")
    world.kernel.not_decided(packet, "NO_TURN", "there is no turn")
    data = backup(world)
    second = decided(world, 1, refund("40.00"))
    restore(world, data)
    assert (second.dfid,) == adopted(world)
    named = intake.flow_named(world.store, world.contract, world.event("C1", "T1"), now_ms=world.clock())
    again = decided(world, 1, refund("70.00"))
    assert (second.dfid, second.dfid, "SUCCESS") == (named, again.dfid, again.execution)
    assert 1 == len(rail.paid())


@pytest.mark.parametrize("came_again", [True, False])
def test_the_texts_of_an_event_for_which_an_adopted_flow_stands_are_erased(world: World, *, came_again: bool) -> None:
    """The order was given by the event's second flow; the texts are those of its first one, which this record knows."""
    listing(world)
    first = world.packet("C1", "T1")
    world.kernel.not_decided(first, "NO_TURN", "there is no turn")
    data = backup(world)
    second = decided(world, 1, refund("40.00"))
    restore(world, data)
    adopted(world)
    if came_again:
        assert second.dfid == decided(world, 1, refund("40.00")).dfid
    done = erasure.erase(world.store, "claims", "C1", who="ada", reason="asked", now_ms=world.clock())
    assert (first.dfid, ("C1",), ()) == (done.dfid, done.events, done.in_clear)
    assert [] == world.column("SELECT 1 FROM case_keys WHERE event_id = 'C1'")
    again = world.kernel.open(world.event("C1", "T1"))
    assert isinstance(again, Answer)
    assert again.state == ("CLOSED" if came_again else "ABORTED")


@pytest.mark.parametrize("times", [0, 2])
def test_a_declined_order_leaves_its_event_free_to_be_decided_however_often_it_came(world: World, times: int) -> None:
    rail = listing(world)
    data = backup(world)
    rail.misfortunes = ["refuse"]
    first = world.decide(refund(), "C1", "T1").dfid
    restore(world, data)
    assert [BEHIND] * times == [sent(world, 1, refund()).tag for _ in range(times)]
    assert (first,) == adopted(world)
    assert [] == list(counters(world.store))
    again = decided(world, 1, refund())
    assert ("SUCCESS", "C1", True) == (again.execution, again.event_id, again.dfid != first)
    assert times or again.parent_dfid == first
    assert 1 == len(rail.paid())


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_a_saga_that_came_again_meanwhile_pays_each_of_its_steps_once(world: World, times: int) -> None:
    rail = listing(world)
    decided(world, 2, refund("10.00"))
    data = backup(world)
    run(world.kernel, world, Script())
    paid = rail.paid()
    world.clock.advance(60_000)
    restore(world, data)
    for _ in range(times):
        assert "ACTIVE" == parent(sent_as_saga(world))[0]
    adopted(world)
    again = run(world.kernel, world, Script())
    assert (("CLOSED", None, None), ["SUCCESS", "SUCCESS"]) == (parent(again), executions(again))
    assert paid == rail.paid()


def test_a_saga_that_ended_meanwhile_goes_to_a_human_once_one_of_its_steps_is_found_to_be_paid(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions ended a saga at its deadline although orders were missing from the record."""
    rail = listing(world)
    decided(world, 2, refund("10.00"))
    data = backup(world)
    run(world.kernel, world, Script())
    paid = rail.paid()
    restore(world, data)
    dfid = sent_as_saga(world).answer.dfid
    with monkeypatch.context() as older:
        older.setattr(type(world.kernel.whole), "holds", True)
        saga.close_steps(world.kernel, dfid, BEHIND, stopped=False, now_ms=world.clock())
    assert ("ABORTED", BEHIND) == parent(saga.saga_answer(world.store, world.contract, dfid))[:2]
    adopted(world)
    for _ in range(2):
        with pytest.raises(UsageError, match="a step of this saga was already carried out") as refused:
            run(world.kernel, world, Script())
        assert "ALREADY_ORDERED" == refused.value.reason_code
    (case,) = waiting(world.store, world.contract)
    assert (case.dfid, True) == (refused.value.dfid, case.of_saga)
    assert paid == rail.paid()


@pytest.mark.parametrize("known", [0, 1, 2])  # steps that the backup knows of, of three
@pytest.mark.parametrize("left", ["a deadline", "by its driver", "for a halt"])
def test_no_saga_ends_or_is_undone_while_its_next_steps_may_be_missing_from_the_record(
    world: World, known: int, left: str
) -> None:
    rail = listing(world)
    decided(world, 2, refund("10.00"))
    kept: list[Kept] = []
    script = Script(compensation=REVERT)

    def copied(packet: DecisionPacket) -> bytes:
        if packet.event_id == f"C1/{known + 1}":
            kept.append(backup(world))
        return script(packet)

    until_ms = world.clock() + 1000 if left == "a deadline" else None
    run(world.kernel, world, copied, "ALL", deadline_ms=until_ms)
    paid = rail.paid()
    restore(world, kept[0])
    world.clock.advance(10 * LEASE_MS)
    if left == "for a halt":
        registry.set_halted(world.store, True, by="op", reason="x", now_ms=world.clock())
    for _ in range(3):
        assert (0, 0) == (recovered(world).sagas_ended, len(reversed_at(world.folder)))
    if left == "a deadline":
        assert "ACTIVE" == parent(run(world.kernel, world, script, "ALL"))[0]
    adopted(world)
    recovered(world)
    again = run(world.kernel, world, script, "ALL")
    assert (("CLOSED", None, None), ["SUCCESS"] * 3) == (parent(again), executions(again))
    assert (paid, []) == (rail.paid(), reversed_at(world.folder))
    assert [] == waiting(world.store, world.contract)


@pytest.mark.parametrize("known", [0, 1, 2])  # steps that the backup knows of, of three
def test_no_step_is_denied_while_it_may_have_been_carried_out(world: World, known: int) -> None:
    rail = listing(world)
    decided(world, 2, refund("10.00"))
    kept = saga_backed_up_at(world, known + 1)
    paid = rail.paid()
    restore(world, kept)
    world.clock.advance(10 * LEASE_MS)
    recovered(world)
    assert "ACTIVE" == parent(sent_as_saga(world, "ALL", propose=deny))[0]
    adopted(world)
    recovered(world)
    again = run(world.kernel, world, Script(compensation=REVERT), "ALL")
    assert (("CLOSED", None, None), ["SUCCESS"] * 3) == (parent(again), executions(again))
    assert (paid, []) == (rail.paid(), reversed_at(world.folder))


def test_an_event_with_the_id_of_a_step_ends_no_saga_while_that_step_may_be_missing_from_the_record(
    world: World,
) -> None:
    listing(world)
    decided(world, 2, refund("10.00"))
    restore(world, saga_backed_up_at(world, 0))
    world.kernel.open(world.event("C1/1"))
    for _ in range(2):
        assert "ACTIVE" == parent(sent_as_saga(world, "ALL"))[0]
    adopted(world)
    again = run(world.kernel, world, Script(), "ALL")
    assert (("CLOSED", None, None), ["SUCCESS"] * 3) == (parent(again), executions(again))


@pytest.mark.parametrize("sent_before", [True, False])
def test_a_saga_that_was_carried_out_when_it_began_afresh_is_not_carried_out_where_it_began(
    world: World, sent_before: bool
) -> None:
    rail = listing(world)
    decided(world, 2, refund("10.00"))
    claim_saga(world.store, world.contract, "BOTH", world.event("C1"), now_ms=world.clock())
    kept = backup(world)
    world.clock.advance(10 * LEASE_MS)
    assert 1 == recovered(world).sagas_ended
    run(world.kernel, world, Script())
    paid = rail.paid()
    restore(world, kept)
    if sent_before:
        assert "ACTIVE" == parent(sent_as_saga(world))[0]
    adopted(world)
    assert "ABORTED" == parent(run(world.kernel, world, Script()))[0]
    again = run(world.kernel, world, Script())
    assert (("CLOSED", None, None), ["SUCCESS"] * 2) == (parent(again), executions(again))
    assert paid == rail.paid()


def test_a_step_that_was_due_before_the_adoption_is_not_opened_after_it(world: World) -> None:
    rail = listing(world)
    decided(world, 2, refund("10.00"))
    dfid = claim_saga(world.store, world.contract, "BOTH", world.event("C1"), now_ms=world.clock())
    kept = backup(world)
    world.clock.advance(10 * LEASE_MS)
    assert 1 == recovered(world).sagas_ended
    run(world.kernel, world, Script())
    paid = rail.paid()
    restore(world, kept)
    step = StepKernel(world.kernel, saga.load(world.store, world.contract, dfid), 1)
    adopted(world)
    with pytest.raises(UsageError) as refused:
        step.open(step.event)
    assert (saga.MOVED_ON, paid) == (refused.value.reason_code, rail.paid())


def saga_backed_up_at(world: World, step: int) -> Kept:
    """Carry out a saga; return a backup made while the step was being decided, for 0 one from before the saga began."""
    kept = [] if step else [backup(world)]

    def copied(packet: DecisionPacket) -> bytes:
        if packet.event_id == f"C1/{step}":
            kept.append(backup(world))
        return most(packet)

    run(world.kernel, world, copied, "ALL")
    return kept[0]


def sent_as_saga(world: World, name: str = "BOTH", *, propose: Propose = most) -> saga.SagaAnswer:
    """Send the event of a saga once: what is not decided is not tried again."""

    def ask(child: Kernel, trigger: intake.Event) -> Answer:
        opened = child.open(trigger)
        return child.decide(opened, propose(opened)) if isinstance(opened, DecisionPacket) else opened

    dfid = claim_saga(world.store, world.contract, name, world.event("C1"), now_ms=world.clock())
    return driver.drive(world.kernel, dfid, ask, now_ms=world.clock)
