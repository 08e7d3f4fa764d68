"""A saga stopped at any I/O step, and stopped again while it recovers: no step and no reversal twice, nothing forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.flow.kernel import Kernel
from sds.kernel.operations import recovery
from sds.kernel.saga.state import SagaAnswer
from sds.kernel.storage.store import Store
from tests.kernel.crashes import copied, crashing, every_step, made_once
from tests.kernel.durable import LEASE_MS, Propose, World, counters, deny
from tests.kernel.faults import Faults
from tests.kernel.sagas import ALERT_HUMAN, CLOSE_ALL, REVERT, Script, most, reversed_at, run, terms, with_misfortune
from tests.scale import seeded
from tests.stores.opened import opened_store

STRIDE = 8


def script_of(world: World, name: str) -> Script:
    """Return what is proposed in one story; a misfortune of the rail comes with the proposal that it meets."""

    def meets(misfortune: str, propose: Propose) -> Propose:
        return lambda packet: with_misfortune(world, misfortune, propose(packet))

    return {
        "complete": Script(),
        "reverted": Script(step_2=deny, compensation=REVERT),
        "the second step is declined, the reversal's reply lost": Script(
            step_2=meets("refuse", most), compensation=meets("lose", REVERT)
        ),
        "closed": Script(step_2=meets("drop", most), compensation=CLOSE_ALL),
        "alerted": Script(step_2=deny, compensation=ALERT_HUMAN),
    }[name]


STORIES = ("complete", "reverted", "the second step is declined, the reversal's reply lost", "closed", "alerted")


@pytest.fixture
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(lambda folder: World(folder, terms=terms()), tmp_path_factory, __name__)


@pytest.fixture
def fresh(template: Path, folder: Path) -> Callable[[], World]:
    def make() -> World:
        return World(copied(template, folder), terms=terms())

    return make


def tell(kernel: Kernel, world: World, story: str) -> SagaAnswer:
    return run(kernel, world, script_of(world, story))


def check(world: World, store: Store, found: SagaAnswer) -> None:
    paid = Counter(kind for _, _, kind, _ in world.rail.paid())
    back = Counter(kind for kind, _ in reversed_at(world.folder))
    assert all(count == 1 for count in (*paid.values(), *back.values())), "a step or a reversal twice"
    assert back <= paid
    state, tag = found.answer.state, found.answer.tag
    if state == "CLOSED":
        assert (2, 0) == (paid.total(), back.total())
    elif tag == "COMPENSATED":
        assert paid == back
        assert {0} == {used for _, used in counters(store)}
    else:
        assert ("ESCALATED", "PARTIAL_SUCCESS_DIRTY") == (state, tag)
        assert paid.total() > back.total()
    assert [] == store.rows("SELECT * FROM reservations WHERE status = 'live'")
    assert [] == store.rows("SELECT * FROM saga_reversals WHERE status = 'PENDING'")
    assert () == verify.verify(store).faults


def afterwards(world: World, story: str, acknowledged: object) -> None:
    """Start again with everything fresh, recover, bring the same event again, and check all that must hold."""
    world.clock.advance(2 * LEASE_MS + 1)
    world.rail.misfortunes = []
    with closing(opened_store(world.path)) as store:
        kernel = world.open_kernel(store)
        recovery.recover(kernel, now_ms=world.clock())
        assert () == verify.verify(store).faults
        found = tell(kernel, world, story)
        world.clock.advance(2 * LEASE_MS + 1)
        recovery.recover(kernel, now_ms=world.clock())
        check(world, store, found)
        if isinstance(acknowledged, SagaAnswer):
            assert acknowledged == found


@pytest.mark.parametrize("story", STORIES)
def test_stopped_at_any_step_a_saga_is_complete_compensated_or_with_a_human(fresh: Callable[[], World], story: str):
    def stop_once(world: World, faults: Faults) -> bool:
        acknowledged = crashing(world, lambda kernel: tell(kernel, world, story), faults)
        afterwards(world, story, acknowledged)
        return acknowledged is not None

    assert every_step(fresh, stop_once, stride=STRIDE) > 150


@pytest.mark.parametrize("story", ["reverted", "closed"])
def test_stopped_again_while_it_recovers_the_same_holds(fresh: Callable[[], World], story: str):
    whole = Faults()
    world = fresh()
    crashing(world, lambda kernel: tell(kernel, world, story), whole)
    world.close()
    rng = seeded(49)
    late = [
        at
        for at, name in enumerate(whole.steps, start=1)
        if name in ("after dispatch", "before revert", "after revert")
    ]
    for at in [rng.choice(late), late[-1], rng.randrange(1, len(whole.steps))]:

        def stop_twice(world: World, again: Faults, at: int = at) -> bool:
            crashing(world, lambda kernel: tell(kernel, world, story), Faults(at=at))
            world.rail.misfortunes = []
            world.clock.advance(2 * LEASE_MS + 1)
            recovered = crashing(world, lambda kernel: recovery.recover(kernel, now_ms=world.clock()), again)
            afterwards(world, story, None)
            return recovered is not None

        assert every_step(fresh, stop_twice, stride=STRIDE) > 10
