"""An order that nobody knows the end of: asked about at once, then ever more rarely, by one process at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sds.kernel.human import cases
from sds.kernel.operations.lookup_pauses import PAUSE_MS_MAX, PAUSE_MS_MIN, is_due
from sds.kernel.operations.recovery import Recovered, recover
from sds.kernel.storage.store import Store
from tests.kernel.durable import World, deny, refund
from tests.kernel.operations.test_forgotten_keys import run_until_reversal
from tests.kernel.orders import recovered
from tests.kernel.sagas import REVERT, Script, terms

EVERY_MS = 5_000
HOUR_MS = 3_600_000


@pytest.fixture
def asked(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """When the rail was asked about an order that it lost and cannot tell of, in seconds since it is unknown."""
    world.rail.misfortunes, world.rail.blind = ["drop"], True
    world.decide(refund())
    began_ms, lookup, times = world.clock(), world.rail.lookup, list[int]()

    def noted(key: str, deadline_s: float) -> object:
        times.append((world.clock() - began_ms) // 1_000)
        return lookup(key, deadline_s)

    monkeypatch.setattr(world.rail, "lookup", noted)
    return times


def by_the_service(world: World, store: Store | None = None) -> Recovered:
    kernel = world.open_kernel(store) if store else world.kernel
    return recover(kernel, now_ms=world.clock(), at_once=False)


def test_it_is_asked_about_at_once_then_after_pauses_that_double_and_after_hours_once_an_hour(
    world: World, asked: list[int]
):
    for _ in range(10 * HOUR_MS // EVERY_MS):
        found = by_the_service(world)
        assert (1, 0) == (found.unknown, found.failed)
        world.clock.advance(EVERY_MS)
    assert [0, 5, 15, 35, 75, 155, 315, 635, 1_275, 2_555, 5_115] == asked[:11]
    assert {PAUSE_MS_MAX // 1_000} == {later - sooner for sooner, later in pairwise(asked[10:])}


def test_between_two_questions_it_is_counted_as_unknown_and_as_not_asked_about(world: World, asked: list[int]):
    assert [Recovered(unknown=1), Recovered(unknown=1, paused=1)] == [by_the_service(world) for _ in range(2)]


def test_it_waits_for_a_human_from_the_first_moment_on(world: World, asked: list[int]):
    assert [True] == [case.unknown for case in cases.waiting(world.store, world.contract)]


def test_whoever_recovers_by_hand_asks_at_once_and_changes_no_pause(world: World, asked: list[int]):
    by_the_service(world)
    assert [Recovered(unknown=1)] * 3 == [recovered(world) for _ in range(3)]
    assert (4, Recovered(unknown=1, paused=1)) == (len(asked), by_the_service(world))


def test_processes_and_restarts_keep_to_the_same_pauses(world: World, asked: list[int]):
    """The pause is in the record: another process, or the next one, does not begin from the first question."""
    for _ in range(3):
        by_the_service(world, world.open_store())
    world.clock.advance(PAUSE_MS_MIN)
    for _ in range(3):
        by_the_service(world, world.open_store())
    assert [0, 5] == asked


def test_a_clock_that_was_set_back_delays_no_question_longer_than_a_pause(world: World):
    assert is_due(world.store, "d", world.clock())
    world.clock.advance(-10 * HOUR_MS)
    assert [True, False] == [is_due(world.store, "d", world.clock()) for _ in range(2)]


def test_once_its_end_is_known_nothing_is_noted_of_it(world: World, asked: list[int]):
    by_the_service(world)
    assert [1] == world.column("SELECT asked FROM order_lookups")
    world.rail.blind = False
    world.clock.advance(PAUSE_MS_MIN)
    assert Recovered(success=1) == by_the_service(world)
    assert [] == world.column("SELECT * FROM order_lookups")


def test_a_reversal_that_nobody_knows_the_end_of_keeps_to_pauses_as_well(folder: object):
    world = World(folder, terms=terms())  # type: ignore[arg-type]  # a path
    run_until_reversal(world, Script(step_2=deny, compensation=REVERT))
    world.rail.blind, asked = True, list[str]()
    reverted = world.rail.reverted
    world.rail.reverted = lambda key, s: asked.append(key) or reverted(key, s)  # type: ignore[method-assign,func-returns-value]
    for _ in range(4):
        by_the_service(world)
        world.clock.advance(EVERY_MS)
    assert 3 == len(asked)
    world.rail.blind = False
    recover(world.kernel, now_ms=world.clock())
    assert (["REVERTED"], []) == (
        world.column("SELECT status FROM saga_reversals"),
        world.column("SELECT * FROM order_lookups"),
    )
    world.close()
