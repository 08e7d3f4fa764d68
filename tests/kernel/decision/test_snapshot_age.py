"""How old a snapshot may be is asked where it is acted on: reading the state again and waiting for the store take time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.storage.store import Row
from tests.kernel.durable import World, contract, deny, refund, whole
from tests.kernel.humans import ALWAYS, escalated, refused, resolve
from tests.kernel.sagas import SAGAS, Script, parent, run

AGE_MS_MAX = 1_000
YOUNG = f"drift: {{age_ms_max: {AGE_MS_MAX}}}\n"


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder, terms=contract(more=YOUNG + SAGAS))) as made:
        yield made


@pytest.fixture
def handed_over(folder: Path) -> Iterator[World]:
    """A gate whose agent decides nothing alone."""
    with whole(World(folder, terms=contract(ALWAYS, more=YOUNG))) as made:
        yield made


def slow_source(world: World, ms: int) -> None:
    """Let the source answer late, each time, with what it read at once."""
    world.tickets.on_read = lambda _key: world.clock.advance(ms)


def busy_store(world: World, ms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store's write lock be got late, each time."""
    transaction = world.store.transaction

    @contextmanager
    def late(*first: Any) -> Iterator[list[Row]]:
        with transaction(*first) as found:
            world.clock.advance(ms)
            yield found

    monkeypatch.setattr(world.store, "transaction", late)


def decided(world: World, packet: DecisionPacket) -> tuple[str, str | None, int]:
    answer = world.kernel.decide(packet, refund("40.00")(packet))
    return answer.state, answer.tag, len(world.rail.sent)


DRIFTED, PAID = ("ABORTED", "STATE_DRIFT_DETECTED", 0), ("CLOSED", None, 1)


@pytest.mark.parametrize(("late_ms", "expected"), [(AGE_MS_MAX, PAID), (AGE_MS_MAX + 1, DRIFTED)])
def test_the_time_it_takes_to_read_the_state_again_counts(
    world: World, late_ms: int, expected: tuple[str, str | None, int]
):
    packet = world.packet()
    slow_source(world, late_ms)
    assert expected == decided(world, packet)


@pytest.mark.parametrize(("late_ms", "expected"), [(AGE_MS_MAX, PAID), (AGE_MS_MAX + 1, DRIFTED)])
def test_the_time_it_takes_to_get_the_write_lock_counts(
    world: World, late_ms: int, expected: tuple[str, str | None, int], monkeypatch: pytest.MonkeyPatch
):
    packet = world.packet()
    busy_store(world, late_ms, monkeypatch)
    assert expected == decided(world, packet)


def test_a_denial_on_a_snapshot_that_is_too_old_is_refused_and_the_record_says_how_old(world: World):
    packet = world.packet()
    slow_source(world, AGE_MS_MAX + 1)
    answer = world.kernel.decide(packet, deny(packet))
    assert ("ABORTED", "STATE_DRIFT_DETECTED") == (answer.state, answer.tag)
    (drift,) = world.column("SELECT drift FROM dim_validations")
    found = json.loads(str(drift))
    assert (False, AGE_MS_MAX + 1, ["snapshot age"]) == (found["ok"], found["age_ms"], found["drift"])


@pytest.mark.parametrize(("late_ms", "state"), [(AGE_MS_MAX // 2, "CLOSED"), (AGE_MS_MAX // 2 + 1, "ESCALATED")])
def test_a_step_of_a_saga_is_held_to_the_same(world: World, late_ms: int, state: str):
    slow_source(world, late_ms)  # read twice: for the packet, and again just before it is acted on
    found = run(world.kernel, world, Script())
    tag = None if state == "CLOSED" else "STATE_DRIFT_DETECTED"
    assert ((state, tag, None), 2 if state == "CLOSED" else 0) == (parent(found), len(world.rail.sent))


@pytest.mark.parametrize("late", ["source", "store"])
def test_what_a_human_decides_is_held_to_the_age_of_the_state_it_is_judged_on(
    handed_over: World, late: str, monkeypatch: pytest.MonkeyPatch
):
    world, waited_ms = handed_over, AGE_MS_MAX + 1
    dfid = escalated(world, refund("40.00"))
    with monkeypatch.context() as patch:
        slow_source(world, waited_ms) if late == "source" else busy_store(world, waited_ms, patch)
        error = refused(world, dfid, "OVERRIDE")
    assert ("STATE_DRIFT_DETECTED", "the state was read too long ago") == (error.reason_code, str(error))
    slow_source(world, AGE_MS_MAX)
    assert "SUCCESS" == resolve(world, dfid, "OVERRIDE").execution


def test_a_decision_about_another_snapshot_is_rejected_and_one_millisecond_has_one_snapshot_of_a_key(world: World):
    """What a proposal refers to names neither event nor flow: docs/limits.md says so."""
    first, second = world.packet("C1"), world.packet("C2")
    world.clock.advance(1)
    third = world.packet("C3")
    assert first.snapshot.id == second.snapshot.id != third.snapshot.id
    assert "ACTIVE" == world.kernel.decide(third, refund()(first)).state
    assert ["STALE_CONTEXT"] == world.column("SELECT reasons ->> '$[0][1]' FROM attempts")
    assert "SUCCESS" == world.kernel.decide(second, refund()(first)).execution
    assert [(second.dfid, "T1", "REFUND_TICKET", 4_000)] == world.rail.paid()
