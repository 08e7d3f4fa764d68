"""A decision's deadline: kept with the flow; past it nothing is sent, and what has no answer by then is not decided."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.engines.queueing import QueueTimeoutError
from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import ModelError, WorldError
from sds.kernel.executor.breaker import read
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.flow.states import Answer
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.operations.recovery import Recovered
from sds.kernel.registry import escalation_budget
from sds.pipeline import Stream
from tests.attack.testbed import Testbed
from tests.kernel.authority import AGENT, status
from tests.kernel.durable import LEASE_MS, Propose, World, deny, escalate, nonsense, refund, whole
from tests.kernel.orders import execution, recovered
from tests.proposers import Says
from tests.submission.parts import PATIENCE_S, Thinking, flows

SOON_MS = 1_000


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with whole(World(tmp_path)) as made:
        yield made


def packet_of(world: World, name: str = "C1", *, in_ms: int = SOON_MS) -> DecisionPacket:
    opened = world.kernel.open(world.event(name), deadline_ms=world.clock() + in_ms)
    assert isinstance(opened, DecisionPacket)
    return opened


def decide(world: World, proposer: Says, *, in_ms: int = SOON_MS) -> Answer:
    stream = Stream(world.kernel, proposer, now_ms=world.clock, sleep=lambda s: world.clock.advance(round(s * 1000)))
    return stream.decide(world.event(), deadline_ms=world.clock() + in_ms)


def late(world: World, propose: Propose) -> Says:
    def say(packet: DecisionPacket) -> bytes:
        world.clock.now_ms = packet.expires_at_ms + 1
        return propose(packet)

    return Says(say)


def test_a_packet_expires_with_the_deadline_and_never_later_than_the_contract_has_it(world: World):
    assert world.clock() + SOON_MS == packet_of(world).expires_at_ms
    assert world.clock() + 30_000 == packet_of(world, "C2", in_ms=60_000).expires_at_ms
    assert world.clock() + 30_000 == world.packet("C3").expires_at_ms


def test_the_deadline_is_kept_with_the_flow_and_its_lease_is_as_short(world: World):
    packet = packet_of(world)
    kept = "SELECT dfid, deadline_ms FROM flow_deadlines"
    assert [(packet.dfid, world.clock() + SOON_MS)] == world.store.rows(kept)
    assert [world.clock() + SOON_MS + 5_000] == world.column("SELECT lease_until_ms FROM decision_flows")
    world.clock.advance(SOON_MS + 5_001)
    assert Recovered(interrupted=1) == recovered(world)
    world.packet("C2")
    assert [packet.dfid] == world.column(kept)


@pytest.mark.parametrize(
    "propose", [refund(), deny, escalate, nonsense], ids=["paid", "denied", "escalated", "nonsense"]
)
def test_whatever_is_committed_after_the_deadline_ends_undecided_and_uncharged(world: World, propose: Propose):
    answer = decide(world, late(world, propose))
    assert ("ABORTED", "NOT_DECIDED", "DEADLINE_EXCEEDED", True, None) == (
        answer.state,
        answer.tag,
        answer.reason_code,
        answer.retryable,
        answer.execution,
    )
    assert ("gate 6: DEADLINE_EXCEEDED: the decision is 1 ms past its deadline",) == answer.reasons
    assert ([], "ACTIVE", [0]) == (world.rail.sent, status(world), world.column("SELECT rejections FROM agents"))
    assert 1_000_000 == escalation_budget.left(world.store, AGENT, 1_000_000, world.clock())
    assert "SUCCESS" == decide(world, Says(refund())).execution


@pytest.mark.parametrize(
    "failure",
    [
        ModelError("too late", reason_code="DEADLINE_EXCEEDED"),
        QueueTimeoutError("no engine was free in time"),
    ],
)
def test_an_engine_that_is_late_under_a_deadline_leaves_the_case_undecided(world: World, failure: ModelError):
    def fail(packet: DecisionPacket) -> bytes:
        raise failure

    answer = decide(world, Says(fail))
    assert ("NOT_DECIDED", "DEADLINE_EXCEEDED", True) == (answer.tag, answer.reason_code, answer.retryable)


def test_a_flow_that_drifts_past_the_deadline_is_not_begun_anew(world: World):
    def move(packet: DecisionPacket) -> bytes:
        world.tickets.put("T1", refundable_minor=1)
        world.clock.now_ms = packet.expires_at_ms
        return refund()(packet)

    stream = Stream(
        world.kernel, Says(move), now_ms=world.clock, sleep=lambda s: world.clock.advance(1 + round(s * 1000))
    )
    answer = stream.decide(world.event(), deadline_ms=world.clock() + SOON_MS)
    assert ([], "STATE_DRIFT_DETECTED", True) == (world.rail.sent, answer.tag, answer.retryable)
    assert 1 == len(world.column("SELECT dfid FROM decision_flows"))


def test_an_order_is_not_sent_after_the_deadline_and_its_event_waits(world: World):
    packet = packet_of(world)
    commit = world.kernel.commit

    def slow(*given: object) -> ExecutionIntent | None:
        order = commit(*given)  # type: ignore[arg-type]
        world.clock.advance(SOON_MS + 1)
        return order

    world.kernel.commit = slow  # type: ignore[method-assign]
    answer = world.kernel.decide(packet, refund()(packet), Decoding())
    assert ("ABORTED", "NOT_SENT", "FAILED", True) == (answer.state, answer.tag, answer.execution, answer.retryable)
    assert [] == world.rail.sent
    world.kernel.commit = commit  # type: ignore[method-assign]
    assert "SUCCESS" == world.decide(refund()).execution
    assert 1 == len(world.rail.paid())


class Patient:
    """The rail, which writes down how much time it is given; and may use it up."""

    idempotent = True

    def __init__(self, world: World) -> None:
        self._rail, self.given = world.rail, list[float]()
        self.lookup, self.answers = world.rail.lookup, True

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self.given.append(deadline_s)
        return self._rail.dispatch(intent, key, deadline_s) if self.answers else Receipt("unknown")


def test_an_executor_is_given_what_is_left_of_the_time(world: World):
    patient = Patient(world)
    world.kernel = world.open_kernel(executor=patient)
    for name, in_ms in (("C1", SOON_MS), ("C2", 30_000)):
        packet = packet_of(world, name, in_ms=in_ms)
        world.kernel.decide(packet, refund("1.00")(packet), Decoding())
    assert [1.0, 5.0] == patient.given


def test_who_was_given_too_little_time_is_not_taken_for_down(world: World):
    patient = Patient(world)
    world.kernel = world.open_kernel(executor=patient)
    patient.answers, world.rail.blind = False, True
    for number in range(4):
        world.tickets.put(f"T{number}", customer=f"c{number}")
        opened = world.kernel.open(world.event(f"C{number}", f"T{number}"), deadline_ms=world.clock() + SOON_MS)
        assert isinstance(opened, DecisionPacket)
        assert "UNKNOWN" == world.kernel.decide(opened, refund("1.00")(opened), Decoding()).execution
    assert 0 == read(world.store, world.contract.gate).failures


@pytest.mark.parametrize("voids", [True, False])
def test_an_order_that_is_absent_after_its_deadline_is_never_sent_again(tmp_path: Path, voids: bool):
    world = World(tmp_path)
    if not voids:
        world.kernel = world.open_kernel(executor=Patient(world))
    packet = packet_of(world)
    world.kernel.dispatcher.carry_out = lambda intent, **_: ""  # type: ignore[method-assign]
    world.kernel.decide(packet, refund()(packet), Decoding())
    world.clock.advance(LEASE_MS)
    found = recovered(world)
    assert (Recovered(failed=1) if voids else Recovered(unknown=1)) == found
    assert (["FAILED"] if voids else ["UNKNOWN"]) == execution(world)
    assert [] == world.rail.sent
    assert () == verify.verify(world.store).faults
    world.close()


def test_a_human_decides_without_the_agents_deadline(world: World):
    packet = packet_of(world)
    dfid = world.kernel.decide(packet, escalate(packet), Decoding()).dfid
    world.clock.advance(10 * SOON_MS)
    text = '{"action":"REFUND_TICKET","params":{"amount":1.00},"reason":"NOT_TRAVELLED"}'
    review = HumanReview(world.kernel, now_ms=world.clock)
    world.kernel.dispatcher.carry_out = lambda intent, **_: ""  # type: ignore[method-assign]
    review.resolve(dfid, Resolution("MODIFY", "ada", "a look", text, acknowledged=True))
    world.clock.advance(LEASE_MS)
    assert Recovered(success=1) == recovered(world)
    assert 1 == len(world.rail.paid())


# Through a gate


def test_a_gate_takes_a_deadline_in_milliseconds_from_now(tmp_path: Path):
    bed = Testbed(tmp_path)
    bed.open_accounts(range(5))
    thinking = Thinking("E0")
    with bed.gate(engine=thinking, threads=1) as gate:
        running = gate.submit(bed.event(0), deadline_ms=20_000)
        thinking.wait_until_begun()
        waiting = gate.submit(bed.event(1), deadline_ms=19_000)
        bed.clock.ahead_ms = 20_001
        thinking.done.set()
        assert "DEADLINE_EXCEEDED" == running.result(PATIENCE_S).reason_code
        with pytest.raises(WorldError, match="the deadline passed while the event waited") as passed:
            waiting.result(PATIENCE_S)
        assert ("DEADLINE_EXCEEDED", True) == (passed.value.reason_code, passed.value.retryable)
        assert [("ABORTED", "NOT_DECIDED")] == flows(gate)
        assert "SUCCESS" == gate.decide(bed.event(0), deadline_ms=20_000).execution


def test_of_two_who_wait_for_a_turn_the_later_deadline_counts(tmp_path: Path):
    bed = Testbed(tmp_path)
    bed.open_accounts(range(5))
    thinking = Thinking("E0")
    with bed.gate(engine=thinking, threads=1) as gate:
        gate.submit(bed.event(0))
        thinking.wait_until_begun()
        hurried, patient = gate.submit(bed.event(1), deadline_ms=50), gate.submit(bed.event(1))
        bed.clock.ahead_ms = 51
        thinking.done.set()
        assert "SUCCESS" == patient.result(PATIENCE_S).execution == hurried.result(PATIENCE_S).execution


def test_who_waits_for_another_waits_no_longer_than_their_own_deadline(tmp_path: Path):
    bed = Testbed(tmp_path)
    bed.open_accounts(range(5))
    thinking = Thinking("E0")
    with bed.gate(engine=thinking) as gate, bed.gate() as other:
        gate.submit(bed.event(0))
        thinking.wait_until_begun()
        for each in (gate, other):
            with pytest.raises(WorldError, match=r"event `E0` is (still|already) being decided") as busy:
                each.decide(bed.event(0), deadline_ms=50)
            assert ("FLOW_IN_PROGRESS", True) == (busy.value.reason_code, busy.value.retryable)
        thinking.done.set()
