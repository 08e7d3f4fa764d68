"""Crashes: the process stops before or after its N-th I/O step, for every N, and once more while it recovers.

An I/O step is every statement of the store (BEGIN and COMMIT, too), every read of the source, every dispatch, with
its effect, and every look-up. A stopped process does nothing more, not even a rollback.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from sds.kernel.operations import recovery
from tests.kernel.crashes import check, copied, crashing, every_step, made_once
from tests.kernel.durable import (
    LEASE_MS,
    Propose,
    World,
    compensate,
    deny,
    escalate,
    nonsense,
    refund,
    see_through,
)
from tests.kernel.faults import Faults
from tests.scale import scale, seeded
from tests.stores.opened import opened_store


class Case:
    """One story that may be cut off anywhere: what the rail does, and what is proposed, first to last."""

    def __init__(self, *proposals: Propose, misfortunes: tuple[str, ...] = (), drift: bool = False) -> None:
        self.proposals, self.misfortunes, self.drift = proposals, misfortunes, drift

    def tell(self, kernel: Kernel, world: World) -> Answer:
        """Bring the event to its end, as a caller would."""
        said = iter(self.proposals)

        def propose(packet: DecisionPacket) -> bytes:
            data = next(said, self.proposals[-1])(packet)
            if self.drift and not world.column("SELECT 1 FROM ledger WHERE kind = 'DECIDED'"):
                world.tickets.put("T1", refundable_minor=19_000)
            return data

        while True:
            opened = kernel.open(world.event())
            if isinstance(opened, Answer):
                return opened
            while (answer := kernel.decide(opened, propose(opened))).state == "ACTIVE":
                pass
            if answer.tag != "STATE_DRIFT_DETECTED":
                return answer


WHOLE = ("paid", "drift")  # what they begin with, the other cases share
CASES = {
    "paid": Case(refund()),
    "compensated": Case(compensate),
    "the reply was lost": Case(refund(), misfortunes=("lose",)),
    "the order was lost": Case(refund(), misfortunes=("drop",)),
    "the wire broke": Case(refund(), misfortunes=("raise",)),
    "declined": Case(refund(), misfortunes=("refuse",)),
    "a second attempt": Case(nonsense, refund()),
    "out of attempts": Case(nonsense, nonsense, nonsense),
    "drift": Case(refund(), refund(), drift=True),
    "the same again": Case(refund("200.01"), refund("200.01")),
    "denied": Case(deny),
    "escalated": Case(escalate),
}


@pytest.fixture
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both files made and the contract registered, to be copied: making it is not what is tested."""
    return made_once(World, tmp_path_factory, __name__)


@pytest.fixture
def fresh(template: Path, folder: Path) -> Callable[..., World]:
    def make(*, idempotent: bool = True) -> World:
        return World(copied(template, folder), idempotent=idempotent)

    return make


def afterwards(world: World, case: Case, acknowledged: object) -> Answer:
    """Start again with everything fresh, recover, bring the same event again, and check all that must hold."""
    world.clock.advance(LEASE_MS + 1)
    with closing(opened_store(world.path)) as store:
        kernel = world.open_kernel(store)
        recovery.recover(kernel, now_ms=world.clock())
        assert () == verify.verify(store).faults
        answer = case.tell(kernel, world)
        check(world, store, answer)
        if isinstance(acknowledged, Answer) and acknowledged.execution == "SUCCESS":
            assert ("SUCCESS", acknowledged.dfid, acknowledged.reference) == (
                answer.execution,
                answer.dfid,
                answer.reference,
            )
        final = isinstance(acknowledged, Answer) and not (acknowledged.pending or acknowledged.retryable)
        if final and isinstance(acknowledged, Answer) and acknowledged.execution != "UNKNOWN":
            assert acknowledged == answer
    return answer


@pytest.mark.parametrize("name", CASES)
def test_stopped_at_any_step_an_event_is_paid_at_most_once_and_nothing_is_lost(fresh: Callable[..., World], name: str):
    case = CASES[name]

    def stop_once(world: World, faults: Faults) -> bool:
        world.rail.misfortunes = list(case.misfortunes)
        acknowledged = crashing(world, lambda kernel: case.tell(kernel, world), faults)
        world.rail.misfortunes = []
        afterwards(world, case, acknowledged)
        return acknowledged is not None

    assert every_step(fresh, stop_once, stride=1 if name in WHOLE else 4) > 40


@pytest.mark.parametrize("name", ["paid", "the reply was lost", "the order was lost", "a second attempt"])
def test_stopped_again_at_any_step_of_its_recovery_the_same_holds(fresh: Callable[..., World], name: str):
    case = CASES[name]
    whole = Faults()
    world = fresh()
    world.rail.misfortunes = list(case.misfortunes)
    crashing(world, lambda kernel: case.tell(kernel, world), whole)
    world.close()
    first = whole.steps.index("before dispatch")
    rng = seeded(7)
    interesting = {rng.randrange(1, first), first + 1, rng.randrange(first + 2, len(whole.steps))}
    for at in sorted(interesting) if scale(1, 0) else range(1, len(whole.steps)):

        def stop_twice(world: World, again: Faults, at: int = at) -> bool:
            world.rail.misfortunes = list(case.misfortunes)
            crashing(world, lambda kernel: case.tell(kernel, world), Faults(at=at))
            world.rail.misfortunes = []
            world.clock.advance(LEASE_MS + 1)
            recovered = crashing(world, lambda kernel: recovery.recover(kernel, now_ms=world.clock()), again)
            afterwards(world, case, None)
            return recovered is not None

        assert every_step(fresh, stop_twice, stride=4) > 10


@pytest.mark.parametrize("name", ["paid", "the reply was lost", "the order was lost", "the wire broke", "declined"])
def test_an_executor_that_is_not_idempotent_is_called_at_most_once_for_a_key(fresh: Callable[..., World], name: str):
    case = CASES[name]

    def stop_once(world: World, faults: Faults) -> bool:
        world.rail.misfortunes = list(case.misfortunes)
        acknowledged = crashing(world, lambda kernel: case.tell(kernel, world), faults)
        afterwards(world, case, acknowledged)
        assert len(world.rail.sent) == len(set(world.rail.sent)), "a key was sent twice"
        return acknowledged is not None

    every_step(lambda: fresh(idempotent=False), stop_once, stride=4)


def test_a_claim_whose_order_is_voided_starts_afresh_wherever_its_recovery_stops(fresh: Callable[..., World]):
    def stop_once(world: World, faults: Faults) -> bool:
        world.rail.misfortunes = ["drop"]
        world.decide(refund())
        world.tickets.put("T1", refundable_minor=19_000)  # it would not be reserved again
        recovered = crashing(world, lambda kernel: recovery.recover(kernel, now_ms=world.clock()), faults)
        recovery.recover(world.kernel, now_ms=world.clock())
        assert [("ABORTED", "INTERRUPTED")] == world.store.rows("SELECT state, tag FROM decision_flows")
        assert "SUCCESS" == see_through(world.kernel, world.event(), refund()).execution
        assert 1 == len(world.rail.paid())
        assert () == verify.verify(world.store).faults
        return recovered is not None

    assert every_step(fresh, stop_once) > 20


def test_what_a_stopped_order_holds_stays_held_before_and_after_its_recovery(fresh: Callable[..., World]):
    """40.00 and 170.00 are more than the fare: whichever was reserved first, the other is never paid."""
    case = CASES["paid"]
    winners: set[tuple[int, ...]] = set()

    def stop_once(world: World, faults: Faults) -> bool:
        acknowledged = crashing(world, lambda kernel: case.tell(kernel, world), faults)
        with closing(opened_store(world.path)) as store:
            kernel = world.open_kernel(store)
            see_through(kernel, world.event("another"), refund("170.00"))
            world.clock.advance(LEASE_MS + 1)
            recovery.recover(kernel, now_ms=world.clock())
            see_through(kernel, world.event(), refund("40.00"))
            assert () == verify.verify(store).faults
        winners.add(tuple(amount for *_, amount in world.rail.paid()))
        return acknowledged is not None

    every_step(fresh, stop_once)
    assert {(4_000,), (17_000,)} == winners
