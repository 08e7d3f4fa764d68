"""A clock that was set back: no window of a spend limit opens anew for it, none stays shut, and verification says it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.storage import ledger
from sds.kernel.storage.ledger import BACK_MS, Step
from tests.kernel.audit.test_audit_tables import found_after
from tests.kernel.durable import LEASE_MS, START_MS, World, compensate, escalate, refund
from tests.kernel.spending import MAX_MINOR, Till, till
from tests.stores.opened import POSTGRESQL, SQLITE, Chosen, opened_store

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
LIMITS = ["window: day", "window: day, timezone: Asia/Tokyo", "window: day, sliding: true"]
YEARS_MS = 86 * 365 * DAY_MS


def paid(world: Till) -> int:
    return sum(amount for *_, amount in world.rail.paid())


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("ahead_ms", [DAY_MS, 9 * DAY_MS, YEARS_MS], ids=["a day", "nine days", "until 2099"])
def test_a_clock_ahead_and_set_back_pays_no_limit_twice_and_shuts_only_the_window_it_was_set_back_in(
    folder: Path, limit: str, ahead_ms: int
):
    with till(folder, limit) as world:
        world.clock.advance(ahead_ms)
        world.pay("100.00")
        world.clock.advance(-ahead_ms)
        assert 0 == world.left()
        world.pay("1.00")
        assert MAX_MINOR == paid(world)
        world.hand_over()
        world.clock.advance(HOUR_MS // 2)
        assert 0 == world.left()
        world.clock.advance(2 * DAY_MS)
        assert MAX_MINOR == world.left()


@pytest.mark.parametrize("limit", LIMITS)
def test_what_was_spent_ahead_is_spent_when_its_day_comes(folder: Path, limit: str):
    with till(folder, limit) as world:
        world.clock.advance(DAY_MS)
        world.pay("60.00")
        world.clock.advance(-DAY_MS)
        assert 4_000 == world.left()
        world.pay("30.00")
        assert 1_000 == world.left()
        world.clock.advance(DAY_MS)
        assert 1_000 == world.left()  # neither is forgotten, and neither counts twice


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("behind_ms", [DAY_MS, 300 * DAY_MS], ids=["a day", "300 days"])
def test_a_clock_that_was_behind_for_a_while_pays_no_limit_twice(folder: Path, limit: str, behind_ms: int):
    with till(folder, limit) as world:
        world.pay("30.00")
        world.clock.advance(-behind_ms)
        assert 7_000 == world.left()
        world.pay("50.00")
        world.clock.advance(behind_ms + BACK_MS)
        assert 2_000 == world.left()
        world.pay("20.00")
        assert 0 == world.left()
        world.clock.advance(2 * DAY_MS)
        assert MAX_MINOR == world.left()


def test_an_hour_is_not_spent_again_either(folder: Path):
    with till(folder, "window: hour") as world:
        world.clock.advance(3 * HOUR_MS)
        world.pay("100.00")
        world.clock.advance(-3 * HOUR_MS)
        assert 0 == world.left()
        world.hand_over()
        world.clock.advance(HOUR_MS)
        assert MAX_MINOR == world.left()


def test_what_the_executor_rejected_is_not_counted_anywhere(folder: Path):
    with till(folder, "window: day") as world:
        world.clock.advance(DAY_MS)
        world.rail.misfortunes = ["refuse"]
        world.pay("60.00")
        world.clock.advance(-DAY_MS)
        assert MAX_MINOR == world.left()


def test_each_limit_and_each_customer_is_counted_for_itself(folder: Path):
    with till(folder, "window: day, per: ticket.customer") as world:
        world.clock.advance(DAY_MS)
        world.pay("60.00", "ada")
        world.clock.advance(-DAY_MS)
        assert (4_000, MAX_MINOR) == (world.left("ada"), world.left("bob"))


def test_an_order_in_flight_is_not_counted_against_itself(folder: Path):
    with till(folder, "window: day") as world:
        world.clock.advance(-DAY_MS)
        world.pay("1.00")
        world.clock.advance(DAY_MS)
        world.rail.misfortunes, world.rail.blind = ["drop"], True
        dfid = world.pay("99.00").dfid
        world.clock.advance(-2 * BACK_MS)
        key = world.column("SELECT resource_key FROM execution_log WHERE dfid = ?", dfid)[0]
        seen = [world.kernel.observe(str(key), world.clock(), without=each).situation.spend_left for each in ("", dfid)]
        assert [0, MAX_MINOR - 100] == seen


@pytest.mark.parametrize("back_ms", [1, 5_000, BACK_MS])
def test_a_step_of_seconds_is_usual(world: World, back_ms: int):
    world.decide(refund(), "C1")
    world.clock.advance(-back_ms)
    world.decide(compensate, "C2")
    assert () == verify.verify(world.store).notes
    assert [] == world.column("SELECT idx FROM clock_steps")


def test_verification_says_when_the_clock_was_set_back_and_calls_it_no_fault(world: World):
    world.decide(refund(), "C1")
    world.clock.advance(-DAY_MS - 90_000)
    world.decide(escalate, "C2")
    found = verify.verify(world.store)
    (idx,) = world.column("SELECT idx FROM clock_steps")
    assert () == found.faults
    assert (
        f"entry {idx}: the clock was set back by 24 h 1 min, from 2013-12-02 16:00:00 UTC to 2013-12-01 15:58:30 UTC",
    ) == found.notes


def test_a_step_that_is_altered_left_out_or_made_up_is_found(world: World):
    world.decide(refund(), "C1")
    world.clock.advance(-DAY_MS)
    world.decide(escalate, "C2")
    (idx,) = world.column("SELECT idx FROM clock_steps")
    said = f"clock step at entry {idx}: the table and the ledger differ"
    assert (said,) == found_after(world, ("DELETE FROM clock_steps", ()))
    assert {said} == set(found_after(world, ("UPDATE clock_steps SET was_ms = was_ms + 1", ())))
    made_up = "INSERT INTO clock_steps VALUES (1, 2, 1)"
    assert ("clock step at entry 1: the table and the ledger differ",) == found_after(world, (made_up, ()))


@pytest.mark.sqlite_alone("no record on a server is that old")
def test_an_older_record_is_given_the_steps_that_its_ledger_has(world: World):
    world.decide(refund(), "C1")
    world.clock.advance(-DAY_MS)
    world.decide(escalate, "C2")
    steps = world.store.rows("SELECT * FROM clock_steps")
    with closing(sqlite3.connect(world.path)) as db, db:
        for what in ("TRIGGER clock_was_set_back", "TABLE clock_steps"):
            db.execute(f"DROP {what}")
        db.execute("UPDATE meta SET value = '2' WHERE key = 'schema_version'")
    with closing(opened_store(world.path)) as store:
        assert steps == store.rows("SELECT * FROM clock_steps")
        assert () == verify.verify(store).faults


def test_the_trigger_and_the_program_mean_the_same_step(world: World):
    entries = [(1, START_MS), (2, START_MS - BACK_MS), (3, START_MS - 2 * BACK_MS - 1), (4, START_MS)]
    assert [Step(3, START_MS - BACK_MS, START_MS - 2 * BACK_MS - 1)] == list(ledger.steps_of(entries))
    whose, end = {SQLITE: ("", "BEGIN"), POSTGRESQL: ("function ", ";")}[Chosen.kind]
    schema = world.store.schema[f"{whose}clock_was_set_back{'()' if whose else ''}"]
    assert f"-{BACK_MS}{end}" in "".join(schema.split())


def test_a_clock_set_back_holds_no_lease_and_loses_no_answer(world: World):
    answer = world.decide(refund(), "C1")
    world.clock.advance(-DAY_MS)
    assert answer == world.kernel.open(world.event("C1"))
    world.clock.advance(LEASE_MS)
    assert "SUCCESS" == world.decide(compensate, "C2").execution
