"""Monitors: what is measured over a window, from where it warns, and from where it stops the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.audit.agent_history import agent_record
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.flow import monitored
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from sds.kernel.registry import registry
from sds.kernel.registry.monitors import MonitoredDecision
from tests.kernel.authority import reactivate, status
from tests.kernel.crashes import crashing, every_step
from tests.kernel.durable import Propose, World, contract, deny, escalate, goodwill, refund
from tests.kernel.faults import Faults
from tests.stores.records import emptied

MINUTE_MS = 60_000
READINGS = "readings: {mood: {question: How is it, values: {calm: at ease, angry: cross, furious: very cross}}}\npolicy: [{otherwise: MODEL}]\n"
Worlds = Callable[..., World]


def terms(*monitors: str) -> str:
    return f"\n{READINGS}aggregate_thresholds:\n" + "".join(f"  - {{{monitor}}}\n" for monitor in monitors)


@pytest.fixture
def worlds(folder: Path) -> Iterator[Worlds]:
    made: list[World] = []

    def opened(*monitors: str) -> World:
        world = World(folder, terms=contract(more=terms(*monitors)))
        world.tickets.put("T1", mood="angry", refundable_minor=1_000_000)
        made.append(world)
        return world

    yield opened
    for world in made:
        assert () == verify.verify(world.store).faults
        world.close()


def decide(world: World, propose: Propose = deny, **measured: object) -> Answer:
    """Decide one more event."""
    (number,) = world.column("SELECT count(*) FROM events")
    packet = world.packet(f"event {number}")
    return world.kernel.decide(packet, propose(packet), Decoding(**measured))  # type: ignore[arg-type]  # by name


def many(world: World, count: int, propose: Propose = deny, **measured: object) -> None:
    for _ in range(count):
        decide(world, propose, **measured)


def why(world: World) -> str:
    """Return why the agent was suspended, without the monitor's name; nothing while it is active."""
    if "SUSPENDED" != status(world):
        return ""
    found = agent_record(world.store, "claims-agent", now_ms=world.clock())
    assert found is not None
    return found.moves[-1].reason.removeprefix("monitor m: ")


def value(world: World) -> str | None:
    found = agent_record(world.store, "claims-agent", now_ms=world.clock())
    assert found is not None
    return found.monitors[0].value


def warnings(world: World) -> list[object]:
    return [facts for event, facts in world.logged if event == "monitor.warn"]


READS = {"calm": {"readings": {"mood": {"calm": 0.9, "angry": 0.1}}}, "angry": {"readings": {"mood": {"angry": 1}}}}


@pytest.mark.parametrize(
    ("monitor", "within", "beyond", "said"),
    [
        ("of: approval_rate, stop: 0.5", [(deny, {})] * 5 + [(goodwill("1.00"), {})] * 5, (goodwill("1.00"), {}), "0.6 is over 0.5"),
        ("of: paid_share, stop: 0.5", [(deny, {})] * 5 + [(goodwill("1.00"), {})] * 5, (goodwill("1.00"), {}), "0.6 is over 0.5"),
        ("of: paid_mean_minor, stop: 150.5", [(goodwill("1.00"), {}), *[(deny, {})] * 8, (goodwill("2.01"), {})], (goodwill("2.01"), {}), "201 is over 150.5"),
        ("of: paid_sum_minor, stop: 300", [(goodwill("1.00"), {}), (goodwill("2.00"), {})], (goodwill("0.01"), {}), "301 is over 300"),
        ("of: reason_share, reason: SHORT_DELAY, stop: 0.1", [(goodwill("1.00"), {}), *[(deny, {})] * 9], (refund("1.00"), {}), ""),
        ("of: reason_share, reason: NOT_ELIGIBLE, stop: 0.9", [(goodwill("1.00"), {}), *[(deny, {})] * 9], (deny, {}), "1 is over 0.9"),
        ("of: confidence_mean, stop: 0.8", [(deny, {"confidence": 0.8})] * 10, (deny, {"confidence": 0.7}), "0.79 is under 0.8"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_the_agent_is_stopped_by_the_decision_that_goes_beyond_and_by_none_before(
    worlds: Worlds,
    monitor: str,
    within: Sequence[tuple[Propose, dict[str, object]]],
    beyond: tuple[Propose, dict[str, object]],
    said: str,
):
    world = worlds(f"name: m, window: {{last: 10}}, {monitor}")
    for propose, measured in within:
        decide(world, propose, **measured)
    assert "" == why(world)
    answer = decide(world, beyond[0], **beyond[1])
    assert "CLOSED" == answer.state
    of = monitor.removeprefix("of: ").partition(",")[0]
    expected = f"{of} {said} in the last 10 decisions, at decision {len(within) + 1}" if said else ""
    assert expected == why(world)


def test_a_shift_of_what_is_read_is_the_population_stability_index(worlds: Worlds):
    world = worlds(
        "name: m, of: reading_shift, reading: mood, window: {last: 10}, expected: {calm: 0.7, angry: 0.3}, stop: 0.5"
    )
    for mood in ("calm",) * 7 + ("angry",) * 3:
        decide(world, facts=READS[mood])
    assert "0" == value(world)
    many(world, 2, facts=READS["angry"])
    assert "0.1695" == value(world)  # (0.5 - 0.7) ln(0.5/0.7) + (0.5 - 0.3) ln(0.5/0.3)
    many(world, 3, facts={"readings": {"mood": {"furious": 1.0}}})
    assert "at decision 13" in why(world)


@pytest.mark.parametrize(
    "facts", [{}, {"readings": None}, {"readings": {"other": {"calm": 1}}}, {"readings": {"mood": "calm"}}, {"readings": {"mood": {}}}]
)  # fmt: skip
def test_a_decision_without_the_reading_is_not_measured(worlds: Worlds, facts: dict[str, object]):
    world = worlds("name: m, of: reading_shift, reading: mood, window: {last: 20}, expected: {calm: 1}, stop: 0.1")
    many(world, 9, facts=READS["angry"])
    many(world, 11, facts=facts)
    assert (None, "") == (value(world), why(world))


def test_what_no_engine_measures_is_not_taken_for_nothing(worlds: Worlds):
    world = worlds("name: m, of: confidence_mean, window: {last: 10}, stop: 0.5")
    many(world, 20)
    assert (None, "") == (value(world), why(world))


def test_a_window_of_minutes_forgets_by_sixtieths_and_a_clock_set_back_opens_none(worlds: Worlds):
    world = worlds("name: m, of: paid_sum_minor, window: {minutes: 60}, stop: 300")
    decide(world, goodwill("3.00"))
    world.clock.advance(-90 * MINUTE_MS)
    decide(world)
    assert "300" == value(world)
    world.clock.advance(90 * MINUTE_MS + 60 * MINUTE_MS)
    decide(world)
    assert "300" == value(world)
    world.clock.advance(MINUTE_MS)
    assert "0" == value(world)
    decide(world, goodwill("3.00"))
    assert "" == why(world)
    decide(world, goodwill("0.01"))
    assert "paid_sum_minor 301 is over 300 in the last 60 minutes, at decision 5" == why(world)


def test_a_share_over_minutes_is_judged_from_the_tenth_decision(worlds: Worlds):
    world = worlds("name: m, of: approval_rate, window: {minutes: 5}, stop: 0.5")
    many(world, 9, goodwill("1.00"))
    assert "" == why(world)
    decide(world)
    assert "approval_rate 0.9 is over 0.5 in the last 5 minutes, at decision 10" == why(world)


def test_a_warning_is_logged_when_it_is_first_crossed_and_again_only_after_it_was_back(worlds: Worlds):
    world = worlds("name: m, of: paid_sum_minor, window: {last: 10}, warn: 100")
    many(world, 3, goodwill("1.00"))
    (warning,) = warnings(world)
    assert isinstance(warning, dict)
    assert ("m", "200", "100", 2) == tuple(warning[name] for name in ("monitor", "value", "warn", "decision"))
    assert ("claims-agent", True) == (warning["agent_id"], bool(warning["dfid"]))
    many(world, 10)
    many(world, 2, goodwill("1.00"))
    assert 2 == len(warnings(world))
    assert "" == why(world)


def test_several_windows_over_the_same_decisions_are_each_exact(worlds: Worlds):
    lengths = (10, 12, 25)
    world = worlds(*(f"name: m{n}, of: paid_sum_minor, window: {{last: {n}}}, warn: 1000000" for n in lengths))
    for number in range(60):
        decide(world, goodwill(f"0.{number:02}") if number else deny)
    found = agent_record(world.store, "claims-agent", now_ms=world.clock())
    assert found is not None
    assert [str(sum(range(60 - n, 60))) for n in lengths] == [each.value for each in found.monitors]
    assert [3, 4, 5, 6] == world.column("SELECT n FROM monitor_entries")  # of eight decisions each: 25 to 56


def test_an_agent_that_waits_for_a_human_is_stopped_instead(folder: Path):
    more = terms("name: m, of: reason_share, reason: NOT_ELIGIBLE, window: {last: 10}, stop: 0.5")
    world = World(folder, terms=contract(("{per_hour: 1000000}", "{per_hour: 1000000, pauses_agent: true}"), more=more))
    many(world, 9)
    decide(world, escalate)
    assert "reason_share 0.9 is over 0.5 in the last 10 decisions, at decision 10" == why(world)
    world.close()


def test_whoever_reactivates_has_looked_and_the_windows_begin_anew(worlds: Worlds):
    world = worlds("name: m, of: paid_sum_minor, window: {minutes: 60}, stop: 100")
    many(world, 2, goodwill("0.60"))
    assert "120" == value(world)
    reactivate(world)
    assert [] == world.column("SELECT 1 FROM monitor_windows")
    decide(world, goodwill("1.00"))
    assert ("100", "") == (value(world), why(world))


def test_a_record_whose_windows_are_not_there_yet_fills_them_from_its_ledger_once(worlds: Worlds, folder: Path):
    """As that of an older version, or of a contract whose monitors were others."""
    world = World(folder)
    world.tickets.put("T1", mood="angry", refundable_minor=1_000_000)
    many(world, 3, goodwill("1.00"), confidence=0.9)
    many(world, 7, confidence=0.9)
    world.close()
    monitors = (
        "name: sum, of: paid_sum_minor, window: {minutes: 60}, warn: 1000",
        "name: rate, of: approval_rate, window: {last: 10}, warn: 0.9",
        "name: why, of: reason_share, reason: SHORT_DELAY, window: {last: 10}, warn: 0.9",
        "name: sure, of: confidence_mean, window: {last: 10}, warn: 0.1",
    )
    newer = contract(("version: 1.0.0", "version: 1.1.0"), more=terms(*monitors))
    world = World(folder, terms=newer)
    world.tickets.put("T1", mood="angry")
    decide(world, goodwill("2.00"), confidence=0.8)
    found = agent_record(world.store, "claims-agent", now_ms=world.clock())
    assert found is not None
    assert ["500", "0.3", "0.3", "0.89"] == [each.value for each in found.monitors]
    assert () == verify.verify(world.store).faults
    world.close()


def test_windows_are_filled_from_the_newest_entries_alone(
    worlds: Worlds, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Others may share the record: an agent that decides seldom is not looked for through all that they did."""
    world = World(folder)
    world.tickets.put("T1", mood="angry")
    many(world, 2, goodwill("1.00"))
    many(world, 5)
    world.close()
    monkeypatch.setattr(monitored, "ENTRIES_MAX", 6)  # five denied, and what the contract adds
    more = terms("name: sum, of: paid_sum_minor, window: {minutes: 60}, warn: 1000")
    world = World(folder, terms=contract(("version: 1.0.0", "version: 1.1.0"), more=more))
    world.tickets.put("T1", mood="angry")
    decide(world, goodwill("2.00"))
    found = agent_record(world.store, "claims-agent", now_ms=world.clock())
    assert found is not None
    assert ["200"] == [each.value for each in found.monitors]
    world.close()


ENTRIES = "SELECT idx, at_ms FROM ledger WHERE idx < ? ORDER BY idx DESC LIMIT ?"
DAY_MS = 24 * 60 * MINUTE_MS


@pytest.mark.parametrize(
    ("hours", "reach", "found"),
    [
        ([0] * 40 + [24] * 6, (0, 60), 6),
        ([0] * 40 + [24] * 6, (20, 60), 20),
        ([0] * 40 + [24] * 6, (20, 0), 20),
        ([0] * 40 + [24] * 6, (0, 25 * 60), 46),
        ([24] * 4 + [48] + [21] * 9 + [25], (0, 60), 15),  # a clock that ran ahead, and was set back too far
    ],
)
def test_windows_are_filled_from_no_further_back_than_they_reach(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch, hours: list[int], reach: tuple[int, int], found: int
):
    """It is done while nobody else can decide: a window of an hour must not read a year."""
    monkeypatch.setattr(monitored, "READ_AT_ONCE", 3)
    world = worlds("name: m, of: approval_rate, window: {last: 10}, warn: 0.9")
    begun_ms = world.clock() + DAY_MS
    for hour in hours:
        at_ms = begun_ms + hour * 60 * MINUTE_MS
        registry.write_act(world.store, "RECOVER", who="anna", reason="a test", now_ms=at_ms)
    read = monitored.newest_entries(world.store, ENTRIES, (), (reach[0], reach[1] * MINUTE_MS))
    every = [row[0] for row in world.store.rows(ENTRIES, (monitored.IDX_MAX, 100))]
    assert [row[0] for row in read] == every[: len(read)]
    assert found <= len(read) < found + 2 * monitored.READ_AT_ONCE


def test_windows_go_on_where_a_newer_contract_has_the_same_monitors(worlds: Worlds):
    monitor = (
        "name: m, of: reading_shift, reading: mood, window: {last: 10}, expected: {calm: 0.9, angry: 0.1}, stop: 1"
    )
    world = worlds(monitor)
    many(world, 9, facts=READS["calm"])
    world.contract = contract(("version: 1.0.0", "version: 1.1.0"), more=terms(monitor))
    registry.register(world.store, world.contract, by="operator", now_ms=world.clock())
    world.kernel = world.open_kernel()
    decide(world, facts=READS["angry"])
    assert "0" == value(world)


def steps(world: World) -> int:
    """Return how much counting one decision takes, in steps of SQLite's machine."""
    taken: list[None] = []
    monitors = monitored.decision_monitors(world.contract)
    with world.store.transaction():
        world.store._db.set_progress_handler(lambda: taken.append(None), 1)
        monitors.count(
            world.store, MonitoredDecision(), world.clock(), lambda _: pytest.fail("the windows are filled already")
        )
        world.store._db.set_progress_handler(None, 0)
        world.store.run("ROLLBACK")
        world.store.run("BEGIN")
    return len(taken)


@pytest.mark.sqlite_alone("steps of its machine")
def test_after_a_longer_past_a_decision_costs_no_more(worlds: Worlds):
    world = worlds(
        "name: m, of: approval_rate, window: {last: 10}, warn: 0.9",
        "name: n, of: paid_sum_minor, window: {minutes: 5}, warn: 900",
    )
    many(world, 11)
    early = steps(world)
    many(world, 200)
    assert early == steps(world)


LIMIT = terms("name: m, of: paid_sum_minor, window: {last: 10}, stop: 100")


def test_a_crash_anywhere_leaves_the_decision_its_count_and_the_suspension_together_or_none(folder: Path):
    def world() -> World:
        emptied(folder)
        made = World(folder, terms=contract(more=LIMIT))
        made.tickets.put("T1", mood="angry")
        return made

    def work(made: World, faults: Faults) -> bool:
        def beyond(kernel: Kernel) -> Answer:
            packet = kernel.open(made.event())
            assert isinstance(packet, DecisionPacket)
            return kernel.decide(packet, goodwill("1.01")(packet))

        answer = crashing(made, beyond, faults)
        decided = made.column("SELECT 1 FROM ledger WHERE kind = 'DECIDED'")
        assert decided == made.column("SELECT CAST(json_extract(body, '$[0]') AS BIGINT) FROM monitor_windows")
        assert ("SUSPENDED" if decided else "ACTIVE") == status(made)
        assert () == verify.verify(made.store).faults
        return answer is not None

    assert every_step(world, work, stride=3) > 50
