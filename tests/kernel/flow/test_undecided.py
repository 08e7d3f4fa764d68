"""No case is lost: what nobody has decided has a fresh flow, waits and says so, or is a human's, charged to nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sds.kernel.canonical import idempotency_key
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import UsageError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.flow import undecided
from sds.kernel.flow.intake import flow_named, recorded_event
from sds.kernel.flow.states import RESTARTABLE_TAGS, WAITING_TAGS, Answer
from sds.kernel.human.cases import waiting
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.registry import escalation_budget
from tests.kernel.authority import AGENT, status
from tests.kernel.durable import LEASE_MS, World, contract, deny, nonsense, refund, see_through, whole
from tests.kernel.orders import recovered
from tests.stores.opened import opened_store
from tests.stores.records import kept, put_back

RESTARTS_MAX = 3


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder, terms=contract(("escalation: {per_hour: 1000000}", "escalation: {per_hour: 3}")))) as made:
        yield made


def cases(world: World) -> list[str]:
    return [case.dfid for case in waiting(world.store, world.contract)]


def waits(world: World) -> list[str]:
    return [str(dfid) for dfid in world.column(f"SELECT f.dfid FROM decision_flows f WHERE {undecided.WAITS}")]


def charged(world: World) -> int:
    return 3 - escalation_budget.left(world.store, AGENT, 3, world.clock())


def killed(world: World) -> Answer:
    """Let the process that decides be killed, again and again."""
    for _ in range(1 + RESTARTS_MAX):
        world.packet()
        world.clock.advance(LEASE_MS + 1)
    found = world.kernel.open(world.event())
    assert isinstance(found, Answer)
    return found


def killed_and_recovered(world: World) -> Answer:
    for _ in range(1 + RESTARTS_MAX):
        world.packet()
        world.clock.advance(LEASE_MS + 1)
        recovered(world)
    found = world.kernel.open(world.event())
    assert isinstance(found, Answer)
    return found


def rubbish(world: World) -> Answer:
    packet = world.packet()
    return [world.kernel.decide(packet, nonsense(packet)) for _ in range(3)][-1]


def late(world: World) -> Answer:
    packet = world.packet()
    world.clock.advance(world.contract.budget.ttl_ms + 1)
    return world.kernel.decide(packet, refund()(packet))


def late_engine(world: World) -> Answer:
    return world.kernel.escalate(world.packet(), "DEADLINE_EXCEEDED", "the model is slow")


def greedy(world: World) -> Answer:
    packet = world.packet()
    return world.kernel.decide(packet, refund()(packet), Decoding(tokens=world.contract.budget.tokens_max + 1))


def never_still(world: World) -> Answer:
    left = iter(range(19_000, 0, -1_000))

    def move(packet: DecisionPacket) -> bytes:
        world.tickets.put("T1", refundable_minor=next(left))
        return refund("1.00")(packet)

    return see_through(world.kernel, world.event(), move)


def declined(world: World) -> Answer:
    world.rail.misfortunes = ["refuse"] * (1 + RESTARTS_MAX)
    return see_through(world.kernel, world.event(), refund())


ENDS = {
    killed: "INTERRUPTED",
    killed_and_recovered: "INTERRUPTED",
    rubbish: "REASONING_EXHAUSTION",
    late: "PROPOSAL_EXPIRED",
    late_engine: "DEADLINE_EXCEEDED",
    greedy: "TOKEN_BUDGET_EXCEEDED",
    never_still: "STATE_DRIFT_DETECTED",
    declined: "EXECUTION_FAILED",
}


@pytest.mark.parametrize(("end", "tag"), ENDS.items(), ids=[end.__name__ for end in ENDS])
def test_what_nobody_decided_is_a_humans_in_the_end_and_charged_to_nobody(
    world: World, end: Callable[[World], Answer], tag: str
):
    answer = end(world)
    assert ("ESCALATED", tag) == (answer.state, answer.tag)
    assert [answer.dfid] == cases(world)
    assert any(tag in reason for reason in answer.reasons)
    assert (0, "ACTIVE", []) == (charged(world), status(world), waits(world))
    assert answer == world.kernel.open(world.event())
    assert [] == world.rail.paid()


@pytest.mark.parametrize("end", [killed, rubbish, declined], ids=["killed", "rubbish", "declined"])
def test_a_human_decides_what_came_to_them_so(world: World, end: Callable[[World], Answer]):
    dfid = end(world).dfid
    world.rail.misfortunes = []
    desk = HumanReview(world.kernel, now_ms=world.clock)
    change = '{"action":"REFUND_TICKET","params":{"amount":40.00},"reason":"NOT_TRAVELLED"}'
    seen = desk.view(desk.case(dfid)).seen
    wanted = Resolution("MODIFY", "ada", "the bank is well again", change=change, seen=seen, acknowledged=True)
    assert "SUCCESS" == desk.resolve(dfid, wanted).execution
    assert [(dfid, "T1", "REFUND_TICKET", 4_000)] == world.rail.paid()


def test_what_was_proposed_and_declined_can_be_carried_out_by_a_human_as_it_was(world: World):
    dfid = declined(world).dfid
    wanted = Resolution("OVERRIDE", "ada", "the bank is well again", acknowledged=True)
    assert "SUCCESS" == HumanReview(world.kernel, now_ms=world.clock).resolve(dfid, wanted).execution
    assert [(dfid, "T1", "REFUND_TICKET", 4_000)] == world.rail.paid()
    assert len(set(world.rail.sent)) == len(world.rail.sent) == 2 + RESTARTS_MAX


def test_what_a_human_ordered_and_was_declined_is_a_humans_again(world: World):
    dfid = rubbish(world).dfid
    world.rail.misfortunes = ["refuse"]
    desk = HumanReview(world.kernel, now_ms=world.clock)
    change = '{"action":"REFUND_TICKET","params":{"amount":40.00},"reason":"NOT_TRAVELLED"}'
    seen = desk.view(desk.case(dfid)).seen
    made = desk.resolve(dfid, Resolution("MODIFY", "ada", "owed", change=change, seen=seen, acknowledged=True))
    assert ("FAILED", "ABORTED") == (made.execution, made.state)
    (successor,) = cases(world)
    assert successor != dfid


def test_a_declined_order_is_asked_again_and_then_goes_through(world: World):
    world.rail.misfortunes = ["refuse", "refuse"]
    answer = see_through(world.kernel, world.event(), refund())
    assert ("CLOSED", "SUCCESS") == (answer.state, answer.execution)
    assert 3 == len(set(world.rail.sent))
    assert 1 == len(world.rail.paid())


def test_the_flow_that_an_event_will_have_can_be_named_before_it_is_there(world: World):
    def named() -> str:
        return flow_named(world.store, world.contract, world.event(), now_ms=world.clock())

    seen = set[str]()
    for _ in range(1 + RESTARTS_MAX):
        before = named()
        packet = world.packet()
        assert before == packet.dfid == named()  # also while it is decided
        seen.add(packet.dfid)
        world.clock.advance(LEASE_MS + 1)
    assert 1 + RESTARTS_MAX == len(seen)
    last = named()
    escalated = world.kernel.open(world.event())
    assert isinstance(escalated, Answer)
    assert ("ESCALATED", last, last) == (escalated.state, escalated.dfid, named())


def test_the_flow_of_an_event_that_got_no_turn_or_is_handed_over_can_be_named_too(world: World):
    def named() -> str:
        return flow_named(world.store, world.contract, world.event(), now_ms=world.clock())

    packet = world.packet()
    world.kernel.not_decided(packet, "QUEUE_FULL", "no turn")
    before = named()
    assert packet.dfid != before == world.packet().dfid
    with world.store.transaction():
        world.store.run("UPDATE decision_flows SET state = 'ABORTED', tag = 'OLD' WHERE dfid = ?", (before,))
    handed = named()
    answer = world.kernel.open(world.event())
    assert isinstance(answer, Answer)
    assert ("ESCALATED", handed) == (answer.state, answer.dfid)
    with world.store.transaction():
        world.store.run("UPDATE decision_flows SET state = 'ACTIVE', tag = NULL WHERE dfid = ?", (before,))


class Liar:
    """Pays, and says that it did not."""

    idempotent = True

    def __init__(self, says: str) -> None:
        self._says = says
        self.paid: list[str] = []

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self.paid.append(key)
        return Receipt(self._says, detail="insufficient funds")  # type: ignore[arg-type]  # rejected or unsent

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return Receipt("settled", "PAY-1") if key in self.paid else Receipt("absent")


@pytest.mark.parametrize("says", ["rejected", "unsent"])
def test_who_says_that_it_did_not_pay_and_has_paid_by_its_own_look_up_is_not_asked_again(world: World, says: str):
    liar = Liar(says)
    world.kernel = world.open_kernel(executor=liar)
    answer = see_through(world.kernel, world.event(), refund())
    assert ("UNKNOWN", 1, [answer.dfid]) == (answer.execution, len(liar.paid), cases(world))


# What waits


def no_turn(world: World, name: str = "C1") -> Answer:
    return world.kernel.not_decided(world.packet(name), "QUEUE_FULL", "256 decisions wait already")


def test_what_got_no_turn_waits_is_charged_to_nobody_and_shown_to_no_human(world: World):
    for _ in range(20):  # far more often than a flow may start afresh for another reason
        answer = no_turn(world)
        assert ("ABORTED", "NOT_DECIDED", "QUEUE_FULL", True) == (
            answer.state,
            answer.tag,
            answer.reason_code,
            answer.retryable,
        )
    assert ([answer.dfid], [], 0, "ACTIVE") == (waits(world), cases(world), charged(world), status(world))
    assert [0] == world.column("SELECT rejections FROM agents")
    assert "SUCCESS" == see_through(world.kernel, world.event(), refund()).execution
    assert [] == waits(world)


def test_waiting_does_not_use_up_what_a_flow_may_start_afresh_for(world: World):
    for _ in range(5):
        no_turn(world)
    for _ in range(RESTARTS_MAX):
        world.packet()
        world.clock.advance(LEASE_MS + 1)
        no_turn(world)
    assert "SUCCESS" == see_through(world.kernel, world.event(), refund()).execution


def test_a_second_case_on_an_account_whose_order_is_unknown_waits_until_that_is_resolved(world: World):
    world.rail.misfortunes = ["drop"]
    assert "UNKNOWN" == world.decide(refund("40.00")).execution
    answer = world.decide(refund("30.00"), "C2")
    assert ("RESOURCE_CONTENTION", True, [answer.dfid]) == (answer.tag, answer.retryable, waits(world))
    recovered(world)
    assert "SUCCESS" == see_through(world.kernel, world.event("C2"), refund("30.00")).execution


def test_an_operator_may_have_anything_decided_anew_that_nobody_decided(world: World):
    answer = no_turn(world)
    undecided.refuse_unless_undecided(world.store, answer.dfid)
    packet = world.kernel.open(recorded_event(world.store, world.contract, answer.dfid), anew=True)
    assert isinstance(packet, DecisionPacket)
    assert "SUCCESS" == world.kernel.decide(packet, refund()(packet)).execution
    with pytest.raises(UsageError, match=f"was replaced by `{packet.dfid}`"):
        undecided.refuse_unless_undecided(world.store, answer.dfid)
    with pytest.raises(UsageError, match="is CLOSED and cannot be decided again"):
        undecided.refuse_unless_undecided(world.store, packet.dfid)
    with pytest.raises(UsageError, match="waits for a human"):
        undecided.refuse_unless_undecided(world.store, rubbish_of(world, "C2").dfid)
    with pytest.raises(UsageError, match="there is no flow `x`"):
        undecided.refuse_unless_undecided(world.store, "x")


def rubbish_of(world: World, name: str) -> Answer:
    packet = world.packet(name)
    return [world.kernel.decide(packet, nonsense(packet)) for _ in range(3)][-1]


def test_no_tag_is_both_waited_for_and_counted():
    assert frozenset() == RESTARTABLE_TAGS & WAITING_TAGS


def test_what_an_older_version_aborted_for_good_is_a_humans_when_its_event_comes_again(world: World):
    answer = rubbish(world)
    with world.store.transaction():  # as version 2 ended it
        world.store.run("UPDATE decision_flows SET state = 'ABORTED' WHERE dfid = ?", (answer.dfid,))
    assert [answer.dfid] == waits(world)
    handed = world.kernel.open(world.event())
    assert isinstance(handed, Answer)
    assert ("ESCALATED", answer.dfid) == (handed.state, handed.parent_dfid)
    with world.store.transaction():
        world.store.run("UPDATE decision_flows SET state = 'ESCALATED' WHERE dfid = ?", (answer.dfid,))


# A record put back


def test_a_record_put_back_sends_the_same_key_for_the_same_event(folder: Path):
    """The executor honours keys and recognises each, so nothing is paid twice, with the whole folder gone, too."""
    world = World(folder)
    paid: list[tuple[str, str, str, int]] = []
    for number in range(12):
        if number == 4:
            backup = kept(world.path)
        world.tickets.put(f"T{number}")
        world.decide(refund(), f"C{number}", f"T{number}")
    paid = world.rail.paid()
    for data in (backup, None):
        path = folder / f"again-{data is None}.db"
        if data is not None:
            put_back(path, data)
        again = Again(world, path)
        assert ["SUCCESS"] * 12 == [again.decide(f"C{n}", f"T{n}").execution for n in range(12)]
        assert paid == world.rail.paid()
        again.store.close()
    world.close()


def test_a_record_copied_in_the_middle_of_a_decision_sends_the_same_key_too(folder: Path):
    """There the flow is found interrupted, and a fresh one sends what that one had sent."""
    world = World(folder)
    packet = world.packet()
    put_back(folder / "again.db", kept(world.path))
    assert "SUCCESS" == world.kernel.decide(packet, refund()(packet)).execution
    world.clock.advance(LEASE_MS + 1)
    again = Again(world, folder / "again.db")
    answer = again.decide("C1", "T1")
    assert ("SUCCESS", packet.dfid) == (answer.execution, answer.parent_dfid)
    assert (1, 1) == (len(set(world.rail.sent)), len(world.rail.paid()))
    again.store.close()
    world.close()


def test_a_fresh_key_is_for_what_came_to_nothing_outside_not_for_what_only_waited(world: World):
    for _ in range(3):
        no_turn(world)
    world.rail.misfortunes = ["refuse"]
    assert "SUCCESS" == see_through(world.kernel, world.event(), refund()).execution
    first, again = world.rail.sent
    names = world.column("SELECT dfid FROM decision_flows ORDER BY restarts")
    order = {"action": "REFUND_TICKET", "amount": 4_000}
    assert [idempotency_key(str(names[n]), "execute", order) for n in (0, 4)] == [first, again]


class Again:
    """The same gate over another record."""

    def __init__(self, world: World, path: Path) -> None:
        from sds.kernel.registry import registry

        self._world, self.store = world, opened_store(path)
        registry.register(self.store, world.contract, by="registry", now_ms=world.clock())
        self._kernel = world.open_kernel(self.store)

    def decide(self, name: str, ticket: str) -> Answer:
        return see_through(self._kernel, self._world.event(name, ticket), refund())


def test_a_flow_that_was_denied_is_decided(world: World):
    world.decide(deny)
    assert [] == waits(world)
