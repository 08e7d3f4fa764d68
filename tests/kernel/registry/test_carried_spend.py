"""A contract's new limits count what was spent in their running window before: no version gives a day's budget twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.contract.schema import Contract
from sds.kernel.errors import ContractError
from sds.kernel.registry import registry
from tests.kernel.durable import CONTRACT, contract, escalate, refund
from tests.kernel.orders import recovered
from tests.kernel.spending import MAX_MINOR, Till, till

_SPEND = CONTRACT[CONTRACT.index("spend:\n") : CONTRACT.index("retry:")]
DAY = "{name: till, max_minor: 10000, window: day}"
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
OTHERS = [
    "{name: daily, max_minor: 10000, window: day}",
    "{name: till, max_minor: 10000, window: day, timezone: Europe/Berlin}",
    "{name: till, max_minor: 10000, window: day, timezone: America/Los_Angeles}",
    "{name: till, max_minor: 10000, window: day, sliding: true}",
    "{name: till, max_minor: 10000, window: hour}",
    "{name: till, max_minor: 10000, window: hour, sliding: true}",
    "{name: till, max_minor: 10000, window: day, per: ticket.customer}",
]


def limits(version: str, *those: str) -> Contract:
    spend = "spend: []\n" if not those else "spend:\n" + "".join(f"  - {each}\n" for each in those)
    return contract((_SPEND, spend), ("version: 1.0.0", f"version: {version}"))


def put_in_force(world: Till, version: str, *those: str) -> None:
    terms = limits(version, *those)
    registry.register(world.store, terms, by="operator", now_ms=world.clock())
    world.contract, world.kernel = terms, world.open_kernel(terms=terms)
    assert () == verify.verify(world.store).faults


@pytest.mark.parametrize("other", OTHERS)
def test_a_limit_under_another_name_window_or_zone_is_not_given_anew(folder: Path, other: str):
    with till(folder, "window: day") as world:
        world.at("2026-11-28T12:00").pay("60.00", "ada")
        put_in_force(world, "1.1.0", other)
        assert 4_000 == world.left("ada")
        assert "SUCCESS" == world.pay("40.00", "ada").execution
        assert 0 == world.left("ada")


def test_a_limit_that_is_added_counts_what_the_day_has_spent(folder: Path):
    with till(folder, "window: day") as world:
        put_in_force(world, "1.1.0")
        world.at("2026-11-28T12:00").pay("60.00")
        put_in_force(world, "1.2.0", DAY)
        assert 4_000 == world.left()


def test_a_limit_by_customer_counts_what_each_customer_got(folder: Path):
    with till(folder, "window: day") as world:
        world.pay("60.00", "ada")
        world.pay("10.00", "bob")
        put_in_force(world, "1.1.0", OTHERS[-1])
        assert (4_000, 9_000, MAX_MINOR) == (world.left("ada"), world.left("bob"), world.left("cy"))


def test_going_to_and_fro_between_two_limits_counts_each_order_once(folder: Path):
    with till(folder, "window: day") as world:
        for index, limit in enumerate((OTHERS[0], DAY, OTHERS[0], DAY, OTHERS[3], DAY, OTHERS[3])):
            world.pay("10.00")
            put_in_force(world, f"1.{index + 1}.0", limit)
            assert MAX_MINOR - 1_000 * (index + 1) == world.left()


def test_what_was_spent_on_the_day_before_or_came_to_nothing_is_not_carried_over(folder: Path):
    with till(folder, "window: day") as world:
        world.at("2026-11-27T23:59:59").pay("60.00")
        world.at("2026-11-28T00:00")
        world.rail.misfortunes = ["refuse"]
        assert "FAILED" == world.pay("30.00").execution
        put_in_force(world, "1.1.0", OTHERS[0])
        assert MAX_MINOR == world.left()


def test_a_day_of_another_zone_counts_the_orders_of_that_day(folder: Path):
    """Berlin's day has begun at 23:00 UTC of the day before."""
    with till(folder, "window: day") as world:
        world.at("2026-11-27T22:59").pay("20.00")
        world.at("2026-11-27T23:00").pay("30.00")
        world.at("2026-11-28T08:00")
        put_in_force(world, "1.1.0", OTHERS[1])
        assert MAX_MINOR - 3_000 == world.left()
        assert MAX_MINOR == world.at("2026-11-29T00:00", "Europe/Berlin").left()


def test_what_was_carried_into_a_sliding_window_leaves_it_never_early(folder: Path):
    with till(folder, "window: day") as world:
        world.at("2026-11-28T08:00:30").pay("60.00")
        world.at("2026-11-28T09:00")
        put_in_force(world, "1.1.0", OTHERS[3])
        assert 4_000 == world.at("2026-11-29T08:00:30").left()
        assert MAX_MINOR == world.at("2026-11-29T08:02:01").left()


@pytest.mark.parametrize("limit", [OTHERS[3], OTHERS[5]])
def test_what_was_carried_into_a_sliding_window_counts_for_a_process_whose_clock_is_behind(folder: Path, limit: str):
    with till(folder, "window: day") as world:
        world.at("2026-11-28T08:05:10").pay("60.00")
        put_in_force(world, "1.1.0", limit)
        assert 4_000 == world.left()
        assert 4_000 == world.at("2026-11-28T08:04:20").left()


def test_an_order_that_comes_to_nothing_later_stays_counted_until_its_window_ends(folder: Path):
    with till(folder, "window: day") as world:
        world.at("2026-11-28T12:00")
        world.rail.misfortunes, world.rail.blind = ["drop"], True
        assert "UNKNOWN" == world.pay("60.00").execution
        put_in_force(world, "1.1.0", OTHERS[0])
        world.rail.blind, world.rail.misfortunes = False, ["refuse"]
        recovered(world)
        assert 4_000 == world.left()
        assert MAX_MINOR == world.at("2026-11-29T00:00").left()
        assert () == verify.verify(world.store).faults


def test_a_flow_under_the_older_limits_ends_where_a_newer_one_would_not_count_it(folder: Path):
    with till(folder, "window: day") as world:
        packet = world.packet()
        newer = limits("1.1.0", DAY, "{name: customer, max_minor: 5000, window: day, per: ticket.customer}")
        registry.register(world.store, newer, by="operator", now_ms=world.clock())
        answer = world.kernel.decide(packet, refund("60.00")(packet))
        assert ("ABORTED", "CONTRACT_REVOKED", None) == (answer.state, answer.tag, answer.execution)


def test_a_limit_that_is_only_raised_or_lowered_revokes_nothing_and_keeps_its_count(folder: Path):
    with till(folder, "window: day") as world:
        world.pay("60.00")
        put_in_force(world, "1.1.0", DAY.replace("10000", "7000"))
        assert 1_000 == world.left()
        put_in_force(world, "1.2.0", DAY.replace("10000", "5000"))
        assert 0 == world.left()
        put_in_force(world, "1.3.0", DAY.replace("10000", "15000"))
        assert 9_000 == world.left()
        assert 0 == world.store.value("SELECT count(*) FROM contract_revocations")


def test_a_clock_that_was_set_back_does_not_lose_what_is_carried_over(folder: Path):
    with till(folder, "window: day") as world:
        world.at("2026-11-29T00:30").pay("60.00")
        world.at("2026-11-28T12:00").decide(escalate, *world._ticket(""))
        put_in_force(world, "1.1.0", OTHERS[0])
        assert 4_000 == world.left()


def test_what_was_spent_in_other_units_is_not_carried_over_under_another_name(folder: Path):
    """A version that renames the limit and changes its decimals would take 60.00 for 6000 whole units, or the reverse."""
    with till(folder, "window: day") as world:
        world.pay("60.00")
        terms = contract(
            (_SPEND, f"spend:\n  - {OTHERS[0]}\n"),
            ("version: 1.0.0", "version: 1.1.0"),
            ("fills: {amount: {value: 25000, scale: 2}}", "fills: {amount: {value: 250}}"),
            ("hi: ticket.refundable_minor, scale: 2", "hi: 10"),
            ("    draws: {ticket.refundable_minor: amount}\n", ""),
            ("hi: 1000, scale: 2", "hi: 10"),
        )
        with pytest.raises(ContractError, match="what is spent in this hour or day was counted with 2 decimals"):
            registry.register(world.store, terms, by="operator", now_ms=world.clock())


def test_a_changed_row_of_what_was_carried_over_is_found(folder: Path):
    world = Till(folder, "window: day")
    world.pay("60.00")
    put_in_force(world, "1.1.0", OTHERS[0])
    with world.store.transaction():
        world.store.run("UPDATE spend SET amount = 1 WHERE dfid = ?", (world.contract.hash,))
        world.store.run("UPDATE spend_totals SET used = 1 WHERE scope LIKE 'claims/daily/%'")
    faults = verify.verify(world.store).faults
    world.close()
    assert [f"spend before contract {world.contract.hash}"] == [fault.partition(":")[0] for fault in faults]
