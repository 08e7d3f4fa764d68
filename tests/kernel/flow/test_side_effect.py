"""A kind that has a side effect and nothing to draw on is an order like any other: once per flow, wherever it stops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.executor.statement import StatementLine, compare
from sds.kernel.flow.states import Answer
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.operations import recovery
from tests.kernel.crashes import check, copied, crashing, every_step, made_once
from tests.kernel.durable import LEASE_MS, Propose, World, counters, see_through
from tests.kernel.faults import Faults
from tests.kernel.fraud import ALWAYS_HUMAN, FRAUD, allow, block, challenge
from tests.stores.opened import opened_store


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    made = World(folder, terms=FRAUD)
    yield made
    made.close()


@pytest.fixture
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(lambda folder: World(folder, terms=FRAUD), tmp_path_factory, __name__)


@pytest.mark.parametrize(("said", "sent"), [(allow, 0), (block, 0), (challenge, 1)])
def test_only_what_has_a_side_effect_is_carried_out(world: World, said: Propose, sent: int) -> None:
    answer = world.decide(said)
    assert (sent, "CLOSED") == (len(world.rail.sent), answer.state)
    assert ["SUCCESS"] * sent == world.column("SELECT status FROM execution_log")
    assert ["SETTLED"] * sent == world.column("SELECT kind FROM ledger WHERE kind = 'SETTLED'")
    assert [] == list(counters(world.store))
    assert () == verify.verify(world.store).faults


def test_one_event_is_challenged_once_and_two_events_of_one_key_once_each(world: World) -> None:
    first = see_through(world.kernel, world.event("C1"), challenge)
    again = see_through(world.kernel, world.event("C1"), block)
    assert first == again
    assert "SUCCESS" == see_through(world.kernel, world.event("C2"), challenge).execution
    assert 2 == len(set(world.rail.sent)) == len(world.rail.sent)


@pytest.mark.parametrize("misfortune", ["none", "lose", "drop", "raise", "refuse"])
def test_stopped_at_any_step_a_challenge_is_made_at_most_once(template: Path, folder: Path, misfortune: str) -> None:
    def stop_once(world: World, faults: Faults) -> bool:
        world.rail.misfortunes = [] if misfortune == "none" else [misfortune]
        acknowledged = crashing(world, lambda kernel: see_once(kernel, world), faults)
        world.rail.misfortunes = []
        world.clock.advance(LEASE_MS + 1)
        with closing(opened_store(world.path)) as store:
            kernel = world.open_kernel(store)
            recovery.recover(kernel, now_ms=world.clock())
            check(world, store, see_through(kernel, world.event(), challenge))
        return acknowledged is not None

    def see_once(kernel: object, world: World) -> Answer:
        return see_through(kernel, world.event(), challenge)  # type: ignore[arg-type]  # the kernel `crashing` opens

    assert every_step(lambda: World(copied(template, folder), terms=FRAUD), stop_once, stride=3) > 30


def test_a_human_challenges_once(folder: Path) -> None:
    with closing(World(folder, terms=ALWAYS_HUMAN)) as world:
        answer = world.decide(challenge)
        assert ("ESCALATED", 0) == (answer.state, len(world.rail.sent))
        world.clock.advance(3 * LEASE_MS)
        review = HumanReview(world.kernel, now_ms=world.clock)
        made = review.resolve(answer.dfid, Resolution("OVERRIDE", "ada", "why", acknowledged=True))
        assert ("SUCCESS", 1) == (made.execution, len(world.rail.sent))
        assert made.execution == see_through(world.kernel, world.event(), challenge).execution
        recovery.recover(world.kernel, now_ms=world.clock())
        assert 1 == len(world.rail.sent)
        assert () == verify.verify(world.store).faults


def test_a_challenge_is_compared_with_the_outside_like_any_order(world: World) -> None:
    world.decide(challenge)
    now_ms, (key,) = world.clock(), world.rail.sent
    line = StatementLine(key, "settled", now_ms, reference="1", kind="CHALLENGE", resource_key="T1")
    assert () == compare(world.store, "claims", lambda *_: (line,), since_ms=0, until_ms=now_ms).differences
    (code,) = (
        each.code for each in compare(world.store, "claims", lambda *_: (), since_ms=0, until_ms=now_ms).differences
    )
    assert "NOT_CARRIED_OUT" == code


@pytest.mark.parametrize(("amount_minor", "differs"), [(None, []), (0, []), (1, ["AMOUNT_DIFFERS"])])
def test_money_that_moved_for_what_moves_none_is_a_difference(
    world: World, amount_minor: int | None, differs: list[str]
) -> None:
    world.decide(challenge)
    now_ms, (key,) = world.clock(), world.rail.sent
    line = StatementLine(key, "settled", now_ms, amount_minor, kind="CHALLENGE", resource_key="T1")
    found = compare(world.store, "claims", lambda *_: (line,), since_ms=0, until_ms=now_ms).differences
    assert differs == [each.code for each in found]
