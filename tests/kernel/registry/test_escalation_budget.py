"""The escalation budget: exact to the millisecond, spent with the flow, and never a way to lose a case."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import Decoding
from sds.kernel.registry import escalation_budget
from tests.kernel.authority import AGENT, halt, reactivate, revoke, status, suspend
from tests.kernel.durable import World, contract, deny, escalate, refund, together
from tests.scale import scale, seeded

THIRD_MS = 1_200_000  # a third of an hour: with three an hour, one comes back


def made(folder: Path, terms: str) -> World:
    return World(folder, terms=contract(("escalation: {per_hour: 1000000}", f"escalation: {{{terms}}}")))


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    """Return a world whose agent may escalate three times an hour, as by default."""
    opened = made(folder, "per_hour: 3")
    yield opened
    opened.close()


def left(world: World) -> int:
    return escalation_budget.left(world.store, AGENT, world.contract.escalation.per_hour, world.clock())


def give_up(world: World, *names: str) -> list[str]:
    return [world.decide(escalate, name).state for name in names]


def test_three_an_hour_unless_the_contract_says_otherwise():
    assert 3 == contract(("escalation: {per_hour: 1000000}", "")).escalation.per_hour


def test_one_more_than_the_budget_holds_is_still_escalated_and_suspends(world: World):
    assert (["ESCALATED"] * 3, 0, "ACTIVE") == (give_up(world, "C1", "C2", "C3"), left(world), status(world))
    assert (["ESCALATED"], "SUSPENDED") == (give_up(world, "C4"), status(world))
    (why,) = world.column(
        "SELECT json_extract(body, '$.reason') FROM ledger WHERE kind = 'AGENT' ORDER BY idx DESC LIMIT 1"
    )
    assert "escalation budget exhausted" == why
    assert "agent.suspended" in [event for event, _ in world.logged]
    assert ("ESCALATE",) == world.packet("C5").envelope.names
    assert () == verify.verify(world.store).faults


def test_the_budget_fills_up_continuously_and_no_millisecond_early(world: World):
    give_up(world, "C1", "C2", "C3")
    world.clock.advance(THIRD_MS - 1)
    assert 0 == left(world)
    world.clock.advance(1)
    assert (1, ["ESCALATED"], "ACTIVE") == (left(world), give_up(world, "C4"), status(world))
    world.clock.advance(THIRD_MS - 1)
    assert (["ESCALATED"], "SUSPENDED") == (give_up(world, "C5"), status(world))


def test_a_full_budget_does_not_grow(world: World):
    give_up(world, "C1")
    world.clock.advance(100 * 3_600_000)
    assert 3 == left(world)


def test_a_clock_that_goes_back_gives_nothing_twice(world: World):
    give_up(world, "C1", "C2", "C3")
    for _ in range(3):
        world.clock.advance(-THIRD_MS)
        assert 0 == left(world)
        world.clock.advance(THIRD_MS)
    assert 0 == left(world)


def test_reactivation_fills_it(world: World):
    give_up(world, "C1", "C2", "C3", "C4")
    reactivate(world)
    assert (3, "ACTIVE") == (left(world), status(world))
    assert () == verify.verify(world.store).faults
    give_up(world, "C5")
    assert (2, ()) == (left(world), verify.verify(world.store).faults)


@pytest.mark.parametrize("code", ["MODEL_UNAVAILABLE", "MASK_FAILED", "A_CODE_OF_TOMORROW"])
def test_a_model_that_fails_spends_the_budget(world: World, code: str):
    world.kernel.escalate(world.packet(), code, "it failed")
    assert 2 == left(world)


def test_low_confidence_spends_the_budget(folder: Path):
    world = made(folder, "per_hour: 3, confidence_min_pct: 60")
    packet = world.packet()
    assert "CONFIDENCE_BELOW_MINIMUM" == world.kernel.decide(packet, deny(packet), Decoding(confidence=0.5)).reason_code
    assert 2 == left(world)
    world.close()


def test_what_the_contract_gives_to_a_human_spends_nothing(folder: Path):
    world = made(folder, "per_hour: 1, always: [DENY]")
    assert {"APPROVAL_REQUIRED"} == {world.decide(deny, f"C{number}").reason_code for number in range(3)}
    assert (1, "ACTIVE") == (left(world), status(world))
    world.close()


def test_where_only_the_human_was_left_nothing_is_spent(world: World):
    for number in range(4):
        packet = world.packet(f"gone {number}", "T404")
        world.kernel.decide(packet, escalate(packet))
        world.kernel.escalate(world.packet(f"failed {number}", "T404"), "MODEL_UNAVAILABLE", "it failed, too")
    halt(world)
    give_up(world, "C1", "C2", "C3", "C4")
    halt(world, halted=False)
    suspend(world)
    give_up(world, "C5", "C6", "C7", "C8")
    assert (3, []) == (left(world), world.column("SELECT 1 FROM escalation_budgets"))


def test_what_others_did_to_an_open_flow_spends_nothing(world: World):
    packets = [world.packet(f"C{number}") for number in range(3)]
    revoke(world)
    assert {"CONTRACT_REVOKED"} == {world.kernel.decide(packet, escalate(packet)).reason_code for packet in packets}
    assert 3 == left(world)


def test_rejections_and_decisions_spend_nothing(world: World):
    world.decide(refund(), "C1")
    world.decide(deny, "C2")
    packet = world.packet("C3")
    world.kernel.decide(packet, b"{}")
    assert 3 == left(world)


def test_a_budget_that_is_made_smaller_binds_at_once(world: World):
    assert 3 == left(world)
    give_up(world, "C1")
    assert 1 == escalation_budget.left(world.store, AGENT, 1, world.clock())


def test_threads_spend_no_more_than_there_is(folder: Path):
    world = made(folder, "per_hour: 3")
    packets = [world.packet(f"C{number}") for number in range(8)]
    answers = together(8, lambda number: world.kernel.decide(packets[number], escalate(packets[number])))
    assert {"ESCALATED"} == {answer.state for answer in answers}  # type: ignore[attr-defined]
    assert (3, "SUSPENDED") == (
        len(world.column("SELECT 1 FROM ledger WHERE json_extract(body, '$.escalations') IS NOT NULL")),
        status(world),
    )
    assert () == verify.verify(world.store).faults
    world.close()


def test_the_bucket_agrees_with_one_that_is_computed_from_the_whole_history(world: World):
    """Exact fractions, from the first escalation on, at random times."""
    rng, spent, at_ms = seeded(4), 0, world.clock()
    parts = 3 * escalation_budget.PARTS
    for number in range(scale(60, 1000)):
        world.clock.advance(rng.choice((0, 1, 599_999, THIRD_MS, THIRD_MS + 1, 7_200_000)))
        parts, at_ms = min(3 * escalation_budget.PARTS, parts + 3 * (world.clock() - at_ms)), world.clock()
        assert parts // escalation_budget.PARTS == left(world)
        give_up(world, f"C{number}")
        if parts >= escalation_budget.PARTS:
            parts, spent = parts - escalation_budget.PARTS, spent + 1
            assert "ACTIVE" == status(world)
        else:
            assert "SUSPENDED" == status(world)
            reactivate(world)
            parts = 3 * escalation_budget.PARTS
    assert spent
    assert () == verify.verify(world.store).faults


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE escalation_budgets SET parts = parts + 1",
        "UPDATE escalation_budgets SET at_ms = at_ms - 1",
        "DELETE FROM escalation_budgets",
        "INSERT INTO escalation_budgets VALUES ('another', 1, 1)",
    ],
)
def test_a_budget_that_was_tampered_with_is_found(world: World, sql: str):
    give_up(world, "C1")
    with world.store.transaction():
        world.store.run(sql)
    (fault,) = verify.verify(world.store).faults
    assert fault.startswith("escalation budget of ")


def test_an_agent_that_pauses_waits_for_the_human_with_everything(folder: Path):
    world = made(folder, "per_hour: 3, pauses_agent: true")
    give_up(world, "C1")
    assert ("ESCALATED", ("ESCALATE",)) == (status(world), world.packet("C2").envelope.names)
    assert ("ESCALATED", 2) == (world.decide(escalate, "C3").state, left(world))
    reactivate(world, "the case is resolved")
    assert ("ACTIVE", 2) == (status(world), left(world))  # a resolved case fills nothing: that takes a suspension
    assert "SUCCESS" == world.decide(refund(), "C4").execution
    assert () == verify.verify(world.store).faults
    world.close()


def test_an_exhausted_agent_is_suspended_rather_than_paused(folder: Path):
    world = made(folder, "per_hour: 1, pauses_agent: true")
    give_up(world, "C1")
    reactivate(world, "the case is resolved")
    give_up(world, "C2")
    assert "SUSPENDED" == status(world)
    world.close()


def test_a_paused_agent_stops_what_it_had_begun(folder: Path):
    world = made(folder, "per_hour: 3, pauses_agent: true")
    packet = world.packet("C1")
    give_up(world, "C2")
    assert "AGENT_SUSPENDED" == world.kernel.decide(packet, refund()(packet)).tag
    assert [] == world.rail.sent
    world.close()


def test_what_is_not_charged_is_what_the_operators_page_says():
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    listed = page.split("Not counted:")[1].split("and every case")[0]
    assert escalation_budget.NOT_CHARGED == set(re.findall(r"`([A-Z_]+)`", listed))
