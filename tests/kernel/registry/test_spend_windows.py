"""The windows of spend limits: hours and days of UTC, of a time zone, and the last hour or 24 hours."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from sds.kernel.contract.sections import SpendLimit
from sds.kernel.errors import ContractError, StoreError
from sds.kernel.operations.recovery import Recovered
from sds.kernel.registry import spend
from tests.kernel.durable import START_MS
from tests.kernel.orders import recovered
from tests.kernel.spending import MAX_MINOR, Till, limited, till
from tests.scale import scale

MINUTE_MS, HOUR_MS = 60_000, 3_600_000
DAY_MS = 24 * HOUR_MS
BERLIN = "window: day, timezone: Europe/Berlin"


@pytest.mark.parametrize(
    ("limit", "names"),
    [
        ("window: hour", ["claims/till/2013-12-02T16/*"]),
        ("window: day", ["claims/till/2013-12-02/*"]),
        ("window: day, timezone: Asia/Tokyo", ["claims/till/2013-12-03@Asia/Tokyo/*"]),
        ("window: hour, timezone: Asia/Kolkata", ["claims/till/2013-12-02T21+0530@Asia/Kolkata/*"]),
        ("window: day, sliding: true", ["claims/till/~/*/2013-12-02T16:00"]),
    ],
)
def test_counters_are_named_by_gate_limit_window_and_whom_they_count_for(limit: str, names: list[str]):
    assert names == list(spend.scopes(limited(limit), {}, START_MS).names)


def test_a_day_of_a_zone_begins_at_its_midnight(folder: Path):
    with till(folder, BERLIN) as world:
        assert "SUCCESS" == world.at("2026-06-10T23:59", "Europe/Berlin").pay("60.00").execution
        assert 4_000 == world.at("2026-06-10T23:59:59", "Europe/Berlin").left()
        assert MAX_MINOR == world.at("2026-06-11T00:00", "Europe/Berlin").left()
        world.pay("60.00")
        assert 4_000 == world.at("2026-06-11T00:01", "UTC").left()


def test_a_shop_elsewhere_is_not_given_a_second_day_at_the_midnight_of_utc(folder: Path):
    with till(folder, "window: day, timezone: America/Los_Angeles") as world:
        world.at("2026-06-10T16:59", "America/Los_Angeles").pay("60.00")
        assert 4_000 == world.at("2026-06-10T17:01", "America/Los_Angeles").left()


@pytest.mark.parametrize(
    ("day", "after", "hours"), [("2026-03-29", "2026-03-30", 23), ("2026-10-25", "2026-10-26", 25)]
)
def test_a_day_has_23_or_25_hours_where_the_zone_has_it_so(folder: Path, day: str, after: str, hours: int):
    with till(folder, BERLIN) as world:
        first = world.at(f"{day}T00:00", "Europe/Berlin").clock()
        world.pay("100.00")
        assert hours * HOUR_MS == world.at(f"{after}T00:00", "Europe/Berlin").clock() - first
        assert MAX_MINOR == world.left()
        world.clock.advance(-1)
        assert 0 == world.left()


def test_the_hour_that_is_shown_twice_is_two_hours(folder: Path):
    with till(folder, "window: hour, timezone: Europe/Berlin") as world:
        world.at("2026-10-25T02:30", "Europe/Berlin").pay("100.00")
        assert 0 == world.at("2026-10-25T02:59", "Europe/Berlin").left()
        assert MAX_MINOR == world.at("2026-10-25T02:00", "Europe/Berlin", fold=1).left()


def test_a_day_without_midnight_begins_where_the_clocks_were_put_forward(folder: Path):
    with till(folder, "window: day, timezone: America/Santiago") as world:
        world.at("2026-09-05T23:59:59", "America/Santiago").pay("100.00")
        world.clock.advance(999)
        assert 0 == world.left()
        world.clock.advance(1)
        assert MAX_MINOR == world.left()


@pytest.mark.parametrize(("length", "length_ms"), [("hour", HOUR_MS), ("day", DAY_MS)])
def test_a_sliding_window_is_the_last_hour_or_24_hours_to_the_millisecond(folder: Path, length: str, length_ms: int):
    with till(folder, f"window: {length}, sliding: true") as world:
        world.at("2026-06-10T12:00:30.123").pay("60.00")
        world.clock.advance(20_000)
        world.pay("30.00")
        assert 1_000 == world.left()
        world.clock.advance(length_ms - 20_001)
        assert 1_000 == world.left()
        world.clock.advance(1)
        assert 7_000 == world.left()
        world.clock.advance(20_000)
        assert MAX_MINOR == world.left()


def test_a_sliding_window_opens_at_no_midnight(folder: Path):
    with till(folder, "window: day, sliding: true") as world:
        world.at("2026-06-10T23:59").pay("50.00")
        world.at("2026-06-11T00:01").pay("50.00")
        assert 0 == world.left()
        world.pay("1.00")
        assert 2 == len(world.rail.paid())


def test_a_sliding_window_is_for_each_value_of_its_field(folder: Path):
    with till(folder, "window: hour, sliding: true, per: ticket.customer") as world:
        world.pay("60.00", "ada")
        assert (4_000, MAX_MINOR) == (world.left("ada"), world.left("bob"))


@pytest.mark.parametrize("fate", ["refuse", "drop", "lose"])
def test_what_was_given_back_is_not_counted_and_what_may_have_been_paid_is(folder: Path, fate: str):
    with till(folder, "window: day, sliding: true") as world:
        world.rail.misfortunes, world.rail.blind = [fate], True
        world.pay("60.00")
        expected = MAX_MINOR if fate == "refuse" else 4_000
        for later_ms in (0, MINUTE_MS, DAY_MS - MINUTE_MS - 1):  # the last one in its oldest minute
            world.clock.advance(later_ms)
            assert expected == world.left()
        world.clock.advance(1)
        assert MAX_MINOR == world.left()


@pytest.mark.parametrize("seed", range(scale(3, 40)))
def test_a_sliding_window_counts_what_a_list_of_all_payments_would(folder: Path, seed: int):
    rng = Random(seed)
    with till(folder, "window: hour, sliding: true") as world:
        paid: list[tuple[int, int]] = []
        for _ in range(40):
            world.clock.advance(rng.choice((0, 1, 999, MINUTE_MS, 7 * MINUTE_MS + 13, HOUR_MS // 2, HOUR_MS)))
            now = world.clock()
            left = MAX_MINOR - sum(amount for at_ms, amount in paid if at_ms > now - HOUR_MS)
            assert left == world.left()
            amount = min(left, rng.randrange(1, 4_000))
            world.rail.misfortunes = [rng.choice(("pay", "pay", "refuse"))]
            if amount and world.pay(f"{amount / 100:.2f}").execution == "SUCCESS":
                paid.append((now, amount))
        assert 10 < len(paid)


@pytest.mark.parametrize(("later_ms", "paid"), [(DAY_MS - 1, 1), (DAY_MS, 0)], ids=["within its day", "after it"])
@pytest.mark.parametrize("limit", ["window: day, sliding: true", "window: day, timezone: America/Bogota"])
def test_an_order_is_sent_again_only_while_it_is_counted(folder: Path, limit: str, later_ms: int, paid: int):
    with till(folder, limit) as world:
        world.at("2026-06-10T00:00", "America/Bogota")
        world.rail.misfortunes = ["drop"]
        world.pay("100.00")
        world.clock.advance(later_ms)
        assert Recovered(success=paid, failed=1 - paid) == recovered(world)
        assert paid == len(world.rail.paid())
        assert (0 if paid else MAX_MINOR) == world.left()


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (
            "window: day, timezone: Europe/Berln",
            "spend.0.timezone: `Europe/Berln` is not an IANA time zone: write one like Europe/Berlin",
        ),
        (
            "window: day, timezone: ../etc/passwd",
            "spend.0.timezone: `../etc/passwd` is not an IANA time zone: write one like ",
        ),
        (
            "window: day, timezone: localtime",
            "spend.0.timezone: `localtime` is not an IANA time zone: write one like ",
        ),
        (
            "window: day, timezone: Asia/Tokyo, sliding: true",
            "spend.0.timezone: has no effect on a sliding window: leave it out",
        ),
        ("window: day, sliding: 1", "spend.0.sliding: must be true or false"),
    ],
)
def test_a_window_that_cannot_be_is_refused_with_its_line_and_a_mend(limit: str, message: str):
    with pytest.raises(ContractError) as caught:
        limited(limit)
    assert str(caught.value).startswith("contract:36: ")
    assert message in str(caught.value)


@pytest.mark.sqlite_alone("the plan of its statements")
def test_the_oldest_minute_is_found_by_its_index_and_so_is_what_was_reserved_since(world_of_a_till: Till):
    def plan(sql: str, *values: object) -> str:
        return " ".join(row[3] for row in world_of_a_till.store._fetched(f"EXPLAIN QUERY PLAN {sql}", values))

    assert "spend_by_minute" in plan(spend._OLDEST_MINUTE, "claims/till/~/*/2013-12-02T16:00", 0, "")
    assert "SCAN" not in plan(spend._MINUTES, "a", "b")
    for sql in (spend._BEFORE, spend._SINCE):
        assert "orders_by_time" in plan(sql, *["x", "y", 0, "", "", 0, 1, 2][: sql.count("?")])


@pytest.fixture
def world_of_a_till(folder: Path) -> Till:
    return Till(folder, "window: day, sliding: true")


def test_a_limit_says_whether_a_moment_counts_at_another():
    sliding = SpendLimit(name="till", window="hour", max_minor=1, sliding=True)
    assert [False, True, True] == [spend.counts(sliding, at_ms, HOUR_MS) for at_ms in (0, 1, HOUR_MS)]


@pytest.mark.parametrize("at_ms", [2**63 - 1, -(2**63)])
@pytest.mark.parametrize("zone", [None, "Asia/Tokyo"])
def test_a_time_of_the_record_that_is_none_is_told_in_one_typed_line(zone: str | None, at_ms: int):
    limit = SpendLimit(name="till", window="day", max_minor=1, timezone=zone)
    with pytest.raises(StoreError, match=f"^the record has a time that no calendar has: {at_ms} ms$"):
        spend.counts(limit, at_ms, HOUR_MS)


def test_an_order_in_flight_is_still_counted_by_the_limits_that_counted_it_alone(folder: Path):
    others = {"window: day": True, "window: hour": False, BERLIN: False, "window: day, sliding: true": False}
    with till(folder, "window: day") as world:
        dfid, now_ms = world.pay("60.00").dfid, world.clock()
        counted = {limit: spend.still_counted(world.store, limited(limit), dfid, {}, now_ms) for limit in others}
        days = [
            spend.still_counted(world.store, limited("window: day"), dfid, {}, now_ms + n * DAY_MS) for n in (-1, 1)
        ]
    assert (others, [False, False]) == (counted, days)
