"""Many claims at once: on one account they are made one by one, in order; without a turn they wait, uncharged."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.engines.queueing import KeyLocks, QueueTimeoutError
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.flow import undecided
from sds.kernel.flow.states import WAITING_TAGS, Answer
from sds.kernel.human.cases import waiting
from sds.kernel.registry import escalation_budget
from sds.pipeline import Stream
from tests.kernel.authority import AGENT, status
from tests.kernel.durable import World, compensate, contract, if_permitted, refund, together, whole
from tests.proposers import Says


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with whole(World(tmp_path)) as made:
        yield made


class SlowRail:
    """The rail, some time later."""

    idempotent = True

    def __init__(self, world: World, takes_s: float) -> None:
        self._rail, self._takes_s = world.rail, takes_s
        self.lookup = world.rail.lookup

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        time.sleep(self._takes_s)
        return self._rail.dispatch(intent, key, deadline_s)


def real_ms() -> int:
    return time.time_ns() // 1_000_000


def stream(world: World, engine: Says) -> Stream:
    return Stream(world.kernel, engine, now_ms=real_ms, sleep=time.sleep)


@pytest.mark.parametrize("takes_ms", [50, 200])
def test_claims_at_once_on_one_account_are_all_paid_where_the_money_is_enough(world: World, takes_ms: int):
    world.kernel = world.open_kernel(executor=SlowRail(world, takes_ms / 1000))
    asked = stream(world, Says(refund("40.00")))
    answers = together(5, lambda n: asked.decide(world.event(f"C{n}")))
    assert ["SUCCESS"] * 5 == [answer.execution for answer in answers if isinstance(answer, Answer)]
    assert 5 == len(world.rail.paid())
    assert [0] == world.column("SELECT count(*) FROM decision_flows WHERE tag = 'RESOURCE_CONTENTION'")


def test_of_more_than_there_is_money_for_all_that_fit_are_paid(world: World):
    asked = stream(world, Says(if_permitted(refund("60.00"), "REFUND_TICKET")))

    def one(number: int) -> Answer:
        return asked.decide(world.event(f"C{number}"))

    answers = [answer for answer in together(8, one) if isinstance(answer, Answer)]
    assert 3 == len(world.rail.paid())  # of 200.00
    assert {"CLOSED", "ESCALATED"} >= {answer.state for answer in answers}


def test_two_streams_as_two_processes_wait_for_each_other(world: World):
    world.kernel = world.open_kernel(executor=SlowRail(world, 0.1))
    streams = [stream(world, Says(refund("40.00"))) for _ in range(4)]  # each with locks of its own
    answers = together(4, lambda n: streams[n].decide(world.event(f"C{n}")))
    assert ["SUCCESS"] * 4 == [answer.execution for answer in answers if isinstance(answer, Answer)]


def test_who_gets_no_turn_with_the_key_until_the_deadline_waits_and_says_so(tmp_path: Path):
    world = World(
        tmp_path, terms=contract(("ttl_ms: 30000, dispatch_ms_max: 5000", "ttl_ms: 100, dispatch_ms_max: 100"))
    )
    locks, held, done = KeyLocks(), threading.Event(), threading.Event()
    asked = Stream(world.kernel, Says(refund()), now_ms=world.clock, sleep=time.sleep, locks=locks)

    def hold() -> None:
        with locks.hold("T1", 1):
            held.set()
            done.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(20)
    answer = asked.decide(world.event())
    done.set()
    holder.join()
    assert ("ABORTED", "NOT_DECIDED", "RESOURCE_CONTENTION", True) == (
        answer.state,
        answer.tag,
        answer.reason_code,
        answer.retryable,
    )
    assert "SUCCESS" == asked.decide(world.event()).execution
    world.close()


def test_an_order_that_nobody_knows_the_end_of_is_not_waited_for(world: World):
    world.rail.misfortunes = ["drop"]
    assert "UNKNOWN" == world.decide(refund("40.00")).execution
    began = time.monotonic()
    answer = stream(world, Says(refund("30.00"))).decide(world.event("C2"))
    assert ("RESOURCE_CONTENTION", True) == (answer.tag, answer.retryable)
    assert time.monotonic() - began < 20


def test_a_line_is_first_come_first_served_and_leaves_nothing_behind():
    locks, order = KeyLocks(), list[int]()
    with locks.hold("a", 1):
        threads = []
        for number in range(5):
            thread = threading.Thread(target=lambda number=number: _stand(locks, order, number))
            thread.start()
            threads.append(thread)
            while _asking(locks) < 2 + number:
                time.sleep(0.001)
        with pytest.raises(QueueTimeoutError), locks.hold("a", 0.01):
            pass
        with locks.hold("b", 0.01):  # another key is another line
            pass
    for thread in threads:
        thread.join()
    assert [0, 1, 2, 3, 4] == order
    assert {} == locks._locks


def _stand(locks: KeyLocks, order: list[int], number: int) -> None:
    with locks.hold("a", 20):
        order.append(number)


def _asking(locks: KeyLocks) -> int:
    return len(locks._locks["a"][1])


# Overload


class Overloaded(Says):
    """An engine with one slot and a short queue: who does not get in has no turn."""

    def __init__(self, world: World) -> None:
        super().__init__(if_permitted(compensate, "COMPENSATE"))
        self._room = threading.BoundedSemaphore(2)
        self._world = world

    def propose(self, packet: DecisionPacket, *, tokens_max: int):
        if not self._room.acquire(blocking=False):
            raise QueueTimeoutError("256 decisions wait already", reason_code="QUEUE_FULL")
        try:
            time.sleep(0.001)
            return super().propose(packet, tokens_max=tokens_max)
        finally:
            self._room.release()


def test_an_overload_is_no_escalation_suspends_nobody_and_everything_is_decided_in_the_end(tmp_path: Path):
    world = World(
        tmp_path,
        terms=contract(
            ("escalation: {per_hour: 1000000}", "escalation: {per_hour: 3}"),
            ("max_minor: 5000000", "max_minor: 500000000"),
            ("max_minor: 10000000", "max_minor: 500000000"),
        ),
    )
    for number in range(200):
        world.tickets.put(f"T{number}", customer=f"c{number}")
    asked = stream(world, Overloaded(world))
    left = {f"C{n}": f"T{n}" for n in range(200)}
    refused = 0

    def worker(number: int) -> None:
        nonlocal refused
        for name in [name for n, name in enumerate(sorted(left)) if n % 10 == number]:
            while (answer := asked.decide(world.event(name, left[name]))).retryable:
                refused += 1
                assert answer.tag in WAITING_TAGS
                time.sleep(0.002)
            assert "SUCCESS" == answer.execution

    together(10, worker)
    assert refused
    assert ("ACTIVE", []) == (status(world), waiting(world.store, world.contract))
    assert 3 == escalation_budget.left(world.store, AGENT, 3, world.clock())
    assert [0] == world.column(f"SELECT count(*) FROM decision_flows f WHERE {undecided.WAITS}")
    assert 200 == len(world.rail.paid())
    world.close()
