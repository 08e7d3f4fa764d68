"""An order that is recorded as failed, and was carried out all the same: once the record has learnt of that, from the executor
or from its statement, nothing more is ordered for its event, by an agent, an operator's retry, a human or a saga.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import UsageError
from sds.kernel.executor.protocol import Receipt
from sds.kernel.executor.statement import StatementLine
from sds.kernel.flow import decision_record
from sds.kernel.flow.states import Answer
from sds.kernel.human.cases import waiting
from sds.kernel.human.review import HumanReview, Resolution
from tests.kernel.durable import World, deny, goodwill, see_through
from tests.kernel.sagas import Script, parent, run
from tests.kernel.statements import Liar, ListingRail, codes, listing

DECLINED, PAID = Receipt("rejected", detail="no"), Receipt("settled", "PAY-1")
SORRY = goodwill("3.00")  # it draws on nothing: no resource keeps a second one from being paid
Learn = Callable[[World, str], None]


def by_its_statement(world: World, dfid: str) -> None:
    assert "CARRIED_OUT_OUTSIDE" in codes(world)


def by_a_late_answer(world: World, dfid: str) -> None:
    order = decision_record.read_order(world.store, dfid)
    assert order is not None
    assert "DIRTY" == world.kernel.dispatcher.settle(order, PAID)


learnt = pytest.mark.parametrize("learn", [by_its_statement, by_a_late_answer])


def declined_and_paid(world: World) -> str:
    """Let the executor say that it declined what it carried out; from now on it tells the truth. Return the flow."""
    liar = Liar(world.folder / "rail.db", DECLINED)
    listing(world, liar)
    answer = world.decide(SORRY, "C2", "T2")
    assert ("ABORTED", "FAILED", True) == (answer.state, answer.execution, answer.retryable)
    liar.says = PAID
    return answer.dfid


def again(world: World) -> Answer:
    return see_through(world.kernel, world.event("C2", "T2"), SORRY)


def desk(world: World) -> HumanReview:
    return HumanReview(world.kernel, now_ms=world.clock)


@learnt
def test_an_agent_orders_it_no_more(world: World, learn: Learn) -> None:
    learn(world, declined_and_paid(world))
    assert "ESCALATED" == again(world).state
    assert 1 == len(world.rail.paid())


@learnt
def test_an_operators_retry_orders_it_no_more(world: World, learn: Learn) -> None:
    learn(world, declined_and_paid(world))
    packet = world.kernel.open(world.event("C2", "T2"), anew=True)
    assert isinstance(packet, DecisionPacket)
    answer = world.kernel.decide(packet, SORRY(packet))
    assert ("ESCALATED", "ALREADY_ORDERED") == (answer.state, answer.reason_code)
    assert 1 == len(world.rail.paid())


@learnt
def test_a_flow_that_was_begun_before_that_was_known_orders_nothing(world: World, learn: Learn) -> None:
    dfid = declined_and_paid(world)
    packet = world.packet("C2", "T2")
    learn(world, dfid)
    assert ("ESCALATED", "ALREADY_ORDERED") == (
        (answer := world.kernel.decide(packet, SORRY(packet))).state,
        answer.reason_code,
    )
    assert 1 == len(world.rail.paid())


@learnt
@pytest.mark.parametrize("closed", [False, True], ids=["the difference is open", "the difference is closed"])
def test_a_human_cannot_order_it_either(world: World, learn: Learn, *, closed: bool) -> None:
    learn(world, declined_and_paid(world))
    case = again(world)
    for other in waiting(world.store, world.contract):
        if closed and other.dfid != case.dfid:
            desk(world).resolve(other.dfid, Resolution("ABORT", "ada", "the customer keeps it"))
    seen = desk(world).view(desk(world).case(case.dfid)).seen
    with pytest.raises(UsageError, match="carried out") as refused:
        desk(world).resolve(case.dfid, Resolution("OVERRIDE", "ada", "why", seen=seen, acknowledged=True))
    assert ("ALREADY_ORDERED", "end the case with --abort") == (refused.value.reason_code, refused.value.hint)
    assert "ABORTED" == desk(world).resolve(case.dfid, Resolution("ABORT", "ada", "it was paid")).state
    assert 1 == len(world.rail.paid())


@learnt
def test_a_refusal_is_decided_all_the_same(world: World, learn: Learn) -> None:
    dfid = declined_and_paid(world)
    packet = world.packet("C2", "T2")
    learn(world, dfid)
    assert "CLOSED" == world.kernel.decide(packet, deny(packet)).state


def test_the_case_says_that_its_order_was_carried_out(world: World) -> None:
    by_a_late_answer(world, declined_and_paid(world))
    (case,) = [desk(world).case(again(world).dfid)]
    assert ("DIRTY: its order was recorded as failed, and was carried out all the same",) == case.reasons


@pytest.mark.parametrize("outcome", ["rejected", "reverted"])
def test_what_nothing_moved_for_is_decided_anew(world: World, outcome: str) -> None:
    rail = listing(world)
    rail.misfortunes = ["refuse"]
    world.decide(SORRY, "C2", "T2")
    rail.tells = lambda line: replace(line, outcome=outcome)  # type: ignore[arg-type]  # one of two
    assert [] == codes(world)
    assert "SUCCESS" == again(world).execution


def test_what_the_outside_may_still_carry_out_is_ordered_no_more(world: World) -> None:
    declined_and_paid(world)
    assert isinstance(world.rail, ListingRail)
    world.rail.tells = _pending
    assert ["PENDING_OUTSIDE"] == codes(world)
    assert ("ESCALATED", "ALREADY_ORDERED") == ((answer := again(world)).state, answer.reason_code)
    assert 1 == len(world.rail.paid())


def _pending(line: StatementLine) -> StatementLine:
    return replace(line, outcome="pending")


@learnt
def test_a_saga_whose_first_step_was_carried_out_does_not_begin_afresh(world: World, learn: Learn) -> None:
    liar = Liar(world.folder / "rail.db", DECLINED)
    listing(world, liar)
    first = run(world.kernel, world, Script())
    assert ("ABORTED", "EXECUTION_FAILED", None) == parent(first)
    liar.says = PAID
    assert first.steps[0] is not None
    learn(world, first.steps[0].dfid)
    found = run(world.kernel, world, Script())
    assert "ESCALATED" == found.answer.state
    assert 1 == len(world.rail.paid())
