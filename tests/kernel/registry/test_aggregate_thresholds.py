"""The older form of `aggregate_thresholds`: beyond it the agent is suspended, and only an operator reactivates it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sds.kernel.errors import TransitionError
from sds.kernel.registry import registry
from tests.kernel.authority import status
from tests.kernel.durable import World, contract, deny, escalate, goodwill, whole

LIMITS = "\naggregate_thresholds: {window: 10, paid_pct_max: 50, paid_mean_minor_max: 300}\n"
TOO_OFTEN = "monitor paid_pct_max: paid_share {} is over 0.5 in the last 10 decisions, at decision {}"
TOO_MUCH = "monitor paid_mean_minor_max: paid_mean_minor {} is over 300 in the last 10 decisions, at decision {}"


@pytest.fixture
def world(folder: Path):
    with whole(World(folder, terms=contract(more=LIMITS))) as made:
        made.tickets.put("T1", mood="angry", refundable_minor=1_000_000)
        yield made


def run(world: World, paid: int, denied: int, amount: str = "1.00", start: int = 0) -> None:
    for number in range(paid):
        world.decide(goodwill(amount), f"paid {start + number}")
    for number in range(denied):
        world.decide(deny, f"denied {start + number}")


def stopped(world: World) -> str | None:
    """Return why the agent is suspended, if it is."""
    if "SUSPENDED" != status(world):
        return None
    (why,) = world.column("SELECT body ->> '$.reason' FROM ledger WHERE kind = 'AGENT' ORDER BY idx DESC LIMIT 1")
    return str(why)


def test_within_the_thresholds_nothing_happens(world: World):
    run(world, paid=5, denied=5, amount="3.00")
    assert None is stopped(world)


def test_before_the_window_is_full_nothing_happens(world: World):
    run(world, paid=9, denied=0, amount="9.00")
    assert None is stopped(world)


def test_paying_too_often_suspends(world: World):
    run(world, paid=6, denied=4)
    assert TOO_OFTEN.format(0.6, 10) == stopped(world)


def test_paying_too_much_on_average_suspends(world: World):
    run(world, paid=2, denied=8, amount="3.01")
    assert TOO_MUCH.format(301, 10) == stopped(world)


def test_what_only_waited_does_not_push_what_was_paid_out_of_the_window(world: World):
    run(world, paid=6, denied=3)
    for number in range(10):
        world.kernel.not_decided(world.packet(f"waits {number}"), "QUEUE_FULL", "256 decisions wait already")
    assert None is stopped(world)
    run(world, paid=0, denied=1, start=20)
    assert TOO_OFTEN.format(0.6, 10) == stopped(world)


def test_only_the_last_decisions_count(world: World):
    run(world, paid=5, denied=5)
    run(world, paid=5, denied=5, start=10)
    assert None is stopped(world)
    run(world, paid=6, denied=0, start=20)
    assert TOO_OFTEN.format(0.6, 26) == stopped(world)


def test_the_decision_that_goes_beyond_is_carried_out_and_the_next_one_is_not(world: World):
    run(world, paid=5, denied=4)
    last = world.decide(goodwill("1.00"), "the last")
    assert ("CLOSED", "SUCCESS") == (last.state, last.execution)
    assert TOO_OFTEN.format(0.6, 10) == stopped(world)
    assert ("ESCALATE",) == world.packet("next").envelope.names


def test_it_is_suspended_in_the_transaction_of_the_decision_and_that_is_logged_once(world: World):
    run(world, paid=9, denied=0)
    world.decide(goodwill("1.00"), "the last")
    kinds = world.column("SELECT kind FROM ledger ORDER BY idx DESC LIMIT 4")
    assert ["SETTLED", "AGENT", "DECIDED", "RESERVED"] == kinds
    world.decide(escalate, "another")
    (logged,) = [facts for event, facts in world.logged if event == "agent.suspended"]
    assert isinstance(logged, dict)
    assert TOO_OFTEN.format(1, 10) == logged["reason"]


def test_only_an_operator_reactivates_and_the_window_starts_anew(world: World):
    """Else the agent would be suspended again before its first new decision."""
    run(world, paid=10, denied=0)
    for actor in ("agent", "runtime", "registry"):
        with pytest.raises(TransitionError):
            registry.transition(world.store, "claims-agent", "ACTIVE", by=actor, reason="please", now_ms=1)  # type: ignore[arg-type]
    registry.transition(world.store, "claims-agent", "ACTIVE", by="operator", reason="all explained", now_ms=1)
    run(world, paid=9, denied=0, start=10)
    assert None is stopped(world)
    run(world, paid=1, denied=0, start=20)
    assert TOO_OFTEN.format(1, 10) == stopped(world)


def test_a_case_that_a_human_resolved_starts_no_new_window(world: World):
    """Only who lifts a suspension has looked at everything the agent did; else asking would keep the monitor blind."""
    run(world, paid=9, denied=0)
    for next_status, by in (("ESCALATED", "runtime"), ("ACTIVE", "operator")):
        registry.transition(world.store, "claims-agent", next_status, by=by, reason="one case", now_ms=1)  # type: ignore[arg-type]
    run(world, paid=1, denied=0, start=10)
    assert TOO_OFTEN.format(1, 10) == stopped(world)


def test_a_flow_that_nobody_finished_counts_for_nothing(world: World):
    run(world, paid=6, denied=3)
    world.packet("abandoned")
    world.clock.advance(10**6)
    world.kernel.open(world.event("abandoned"))
    assert None is stopped(world)


WHOLE = (
    ("fills: {amount: {value: 25000, scale: 2}}", "fills: {amount: {value: 250}}"),
    ("params: {amount: {lo: 1, hi: ticket.refundable_minor, scale: 2}}\n", "params: {amount: {lo: 1, hi: 10}}\n"),
    ("    draws: {ticket.refundable_minor: amount}\n", ""),
    ("params: {amount: {lo: 0, hi: 1000, scale: 2}}", "params: {amount: {lo: 0, hi: 10}}"),
)
DEARER = ("version: 1.0.0", "version: 2.0.0"), ("hi: 1000,", "hi: 2000,")
ALL_MAY_PAY = LIMITS.replace("paid_pct_max: 50, ", "")


@pytest.mark.parametrize(
    ("before", "first", "then", "why"),
    [
        (WHOLE, "4", "3.01", TOO_MUCH.format(301, 10)),  # 4 is no 0.04, and lowers no mean
        (WHOLE, "4", "3.00", None),
        ((), "2.00", "10.00", None),  # of another version, in the same units
        ((), "3.00", "3.01", TOO_MUCH.format(300, 10)),
    ],
)
def test_the_mean_is_of_what_was_paid_in_the_contracts_own_units(
    folder: Path, before: tuple[tuple[str, str], ...], first: str, then: str, why: str | None
):
    world = World(folder, terms=contract(*before, more=ALL_MAY_PAY))
    world.tickets.put("T1", mood="angry")
    run(world, paid=9, denied=0, amount=first)
    world.clock.advance(24 * 3_600_000)
    world.contract = contract(*DEARER, more=ALL_MAY_PAY)
    registry.register(world.store, world.contract, by="operator", now_ms=world.clock())
    world.kernel = world.open_kernel()
    run(world, paid=1, denied=0, amount=then, start=10)
    assert why == stopped(world)
    world.close()


def test_what_paid_under_an_older_contract_has_paid_whatever_the_kind_is_called_now(world: World):
    run(world, paid=6, denied=0)
    renamed = contract(("version: 1.0.0", "version: 2.0.0"), ("GOODWILL", "KINDNESS"), more=LIMITS)
    registry.register(world.store, renamed, by="operator", now_ms=world.clock())
    world.contract = renamed
    world.kernel = world.open_kernel()
    run(world, paid=0, denied=4)
    assert TOO_OFTEN.format(0.6, 10) == stopped(world)
