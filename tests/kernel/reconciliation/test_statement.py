"""The record against the outside's own list: whatever the two do not agree on becomes a case, once, and nothing else.

The rail that lies has a file of its own: what it says to the kernel is one thing, what it did another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import UsageError
from sds.kernel.executor.protocol import Receipt
from sds.kernel.executor.statement import CLOCKS_APART_MS, KEYS_AT_ONCE, StatementLine, compare
from sds.kernel.human.cases import Case
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.operations import recovery
from sds.kernel.registry import escalation_budget
from sds.kernel.storage import ledger
from tests.gates.refund.rail.orders import key_of
from tests.kernel.authority import AGENT
from tests.kernel.durable import World, counters, deny, refund
from tests.kernel.sagas import REVERT, Script, run
from tests.kernel.statements import (
    Liar,
    ListingRail,
    adopted,
    backup,
    cases,
    codes,
    compared,
    listing,
    paid_elsewhere,
    restore,
)
from tests.stores.records import alone

DECLINED, PAID = Receipt("rejected", detail="no"), Receipt("settled", "PAY-1")


def test_an_honest_outside_agrees_and_nothing_is_written(world: World) -> None:
    rail = listing(world)
    rail.misfortunes = ["pay", "refuse", "lose"]
    for number in (2, 3, 4):
        world.decide(refund(), f"C{number}", f"T{number}")
    run(world.kernel, world, Script())
    before = ledger.head(world.store)

    found = compared(world)

    assert ((), 5, 5, 0) == (found.differences, found.orders, found.lines, found.in_flight)
    assert before == ledger.head(world.store)


def test_rejected_and_paid_is_a_case(world: World) -> None:
    listing(world, Liar(world.folder / "rail.db", DECLINED))
    dfid = world.decide(refund()).dfid

    (difference,) = compared(world).differences

    assert ("CARRIED_OUT_OUTSIDE", dfid, "T1") == (difference.code, difference.dfid, difference.resource_key)
    assert "FAILED: REFUND_TICKET amount 4000 on T1" == difference.here
    assert "settled 4000: REFUND_TICKET amount 4000 on T1" == difference.outside


def test_settled_and_nothing_done_is_a_case(world: World) -> None:
    listing(world, Liar(world.folder / "rail.db", PAID, pays=False))
    world.decide(refund())

    (difference,) = compared(world).differences

    assert ("NOT_CARRIED_OUT", "nothing") == (difference.code, difference.outside)


def test_settled_and_declined_by_its_own_list_is_a_case(world: World) -> None:
    rail = listing(world)
    world.decide(refund())
    rail.tells = lambda line: replace(line, outcome="rejected")

    assert ["REJECTED_OUTSIDE"] == codes(world)


@pytest.mark.parametrize("amount", [3999, 4001, 1])
def test_another_amount_is_a_case(world: World, amount: int) -> None:
    listing(world, Liar(world.folder / "rail.db", PAID, amount=amount))
    world.decide(refund())

    assert ["AMOUNT_DIFFERS"] == codes(world)


@pytest.mark.parametrize(
    "change",
    [
        {"dfid": "another"},
        {"kind": "GOODWILL"},
        {"resource_key": "T2"},
        {"params": {"amount": 1}},
        {"params": {"amount": 4000, "more": 1}},
    ],
)
def test_another_order_under_the_same_key_is_a_case(world: World, change: dict[str, object]) -> None:
    rail = listing(world)
    world.decide(refund())
    rail.tells = lambda line: replace(line, **change)  # type: ignore[arg-type]  # one field of a line

    (difference,) = compared(world).differences
    assert "ORDER_DIFFERS" == difference.code
    assert difference.here.partition(": ")[2] != difference.outside.partition(": ")[2]  # a human sees what differs


def test_an_outside_that_keeps_only_keys_and_amounts_is_compared_by_these(world: World) -> None:
    rail = listing(world)
    world.decide(refund())
    rail.tells = lambda line: StatementLine(line.key, line.outcome, line.at_ms)
    assert [] == codes(world)
    rail.tells = lambda line: StatementLine(line.key, line.outcome, line.at_ms, 4001)
    assert ["AMOUNT_DIFFERS"] == codes(world)


def test_an_order_that_nobody_here_gave_is_a_case(world: World) -> None:
    listing(world)
    paid_elsewhere(world.folder, key_of("x"), 500)

    (difference,) = compared(world).differences

    assert ("ORDER_UNKNOWN", key_of("x")) == (difference.code, difference.key)
    assert "no such order" == difference.here


def test_one_key_listed_twice_is_a_case(world: World) -> None:
    rail = listing(world)
    world.decide(refund())
    (line,) = rail.statement(0, CLOCKS_APART_MS + world.clock())
    rail.statement = lambda *_: iter((line, line))  # type: ignore[method-assign]  # what it lists is what is tested

    assert ["CARRIED_OUT_TWICE"] == codes(world)


def test_what_was_taken_back_and_here_was_not_is_a_case_and_the_other_way_round(world: World) -> None:
    rail = listing(world)
    dfid = world.decide(refund()).dfid
    (key,) = world.column("SELECT idempotency_key FROM execution_log WHERE dfid = ?", dfid)
    rail.revert(str(key), 1.0)
    assert ["REVERSED_OUTSIDE"] == codes(world)

    world.rail.misfortunes = ["pay", "refuse"]
    run(world.kernel, world, Script(compensation=REVERT), event="taken back")
    assert ["REVERSED_OUTSIDE"] == codes(world)
    rail.tells = lambda line: replace(line, outcome="settled" if line.outcome == "reverted" else line.outcome)
    assert ["NOT_REVERSED"] == codes(world)


def test_what_was_taken_over_as_taken_back_is_no_difference_in_its_amount(world: World) -> None:
    """The outside tells only keys and amounts; nothing that moved stands."""
    listing(world)
    data = backup(world)
    world.decide(refund())
    restore(world, data)
    assert isinstance(world.rail, ListingRail)
    world.rail.tells = lambda line: StatementLine(line.key, "reverted", line.at_ms, line.amount_minor)
    assert 1 == len(adopted(world))
    assert [] == codes(world)


def test_two_orders_of_one_event_that_both_stand_are_a_case(world: World) -> None:
    """What the executor declined was decided anew and paid; and then it turns out that the first was paid, too."""
    liar = Liar(world.folder / "rail.db", DECLINED)
    listing(world, liar)
    world.decide(refund("1.00"))
    liar.says = PAID
    opened = world.kernel.open(world.event())
    world.kernel.decide(opened, refund("1.00")(opened))  # type: ignore[arg-type]  # a packet: nobody has decided it

    assert {"CARRIED_OUT_OUTSIDE", "EVENT_CARRIED_OUT_TWICE"} == set(codes(world))


def test_what_is_in_flight_is_recoverys_and_only_counted(world: World) -> None:
    rail = listing(world)
    rail.misfortunes = ["raise", "drop"]
    rail.blind = True
    for number in (2, 3):
        world.decide(refund(), f"C{number}", f"T{number}")

    found = compared(world)

    assert ((), 2) == (found.differences, found.in_flight)


def test_a_contradiction_that_is_known_is_no_second_case(world: World) -> None:
    """FAILED, and carried out: once the executor itself has said so, it is DIRTY, and a human has it."""
    rail = listing(world)
    rail.misfortunes = ["refuse"]
    dfid = world.decide(refund()).dfid
    alone(world.store, "UPDATE execution_log SET status = 'DIRTY' WHERE dfid = ?", (dfid,))
    rail.tells = lambda line: replace(line, outcome="settled")
    assert [] == codes(world)
    alone(world.store, "UPDATE execution_log SET status = 'FAILED' WHERE dfid = ?", (dfid,))


class TestTheEndsOfThePeriod:
    def test_what_was_reserved_before_it_or_settled_after_it_is_no_difference(self, world: World) -> None:
        listing(world, Liar(world.folder / "rail.db", PAID, pays=False))
        world.decide(refund())
        at_ms = world.clock()

        assert () == compared(world, since_ms=at_ms + 1).differences
        assert () == compared(world, until_ms=at_ms - 1).differences
        assert 1 == len(compared(world, since_ms=at_ms, until_ms=at_ms).differences)

    def test_an_outside_whose_clock_is_hours_off_agrees(self, world: World) -> None:
        rail = listing(world)
        world.decide(refund())
        for hours in (-23, 23):
            rail.tells = lambda line, hours=hours: replace(line, at_ms=line.at_ms + hours * 3_600_000)  # type: ignore[misc]
            assert [] == codes(world)
            assert () == compared(world, since_ms=world.clock(), until_ms=world.clock()).differences

    def test_an_order_given_while_it_is_listed_is_known(self, world: World) -> None:
        rail = listing(world)
        world.decide(refund(), "C2", "T2")

        def meanwhile(line: StatementLine) -> StatementLine:
            if line.resource_key == "T2":
                world.decide(refund(), "C3", "T3")
            return line

        rail.tells = meanwhile
        found = compared(world)
        assert ((), 2, 1) == (found.differences, found.lines, found.orders)

    def test_what_is_taken_back_while_it_is_listed_is_no_difference(self, world: World) -> None:
        """A saga whose first step is paid, and is undone between the record's reading and the rail's answer."""
        rail = listing(world)
        asked, go_on = threading.Event(), threading.Event()

        def second(packet: DecisionPacket) -> bytes:
            asked.set()
            assert go_on.wait(10)
            return deny(packet)

        script = Script(step_2=second, compensation=REVERT)
        saga = threading.Thread(target=run, args=(world.kernel, world, script))
        saga.start()
        assert asked.wait(10)
        listed = rail.statement

        def statement(since_ms: int, until_ms: int) -> Iterator[StatementLine]:
            go_on.set()
            saga.join()
            return listed(since_ms, until_ms)

        rail.statement = statement  # type: ignore[method-assign]  # the moment between two readings of the record
        assert [] == codes(world)
        assert ["REVERTED"] == world.column("SELECT status FROM saga_reversals")


class TestTheCase:
    @pytest.fixture
    def case(self, world: World) -> Case:
        listing(world, Liar(world.folder / "rail.db", DECLINED))
        world.decide(refund())
        compared(world)
        (case,) = cases(world)
        return case

    def test_it_says_both_sides(self, case: Case) -> None:
        assert "STATEMENT_DIFFERS" == case.reason_code
        named, here, outside = case.reasons
        assert named.startswith("CARRIED_OUT_OUTSIDE: key ")
        assert "the record: FAILED: REFUND_TICKET amount 4000 on T1" == here
        assert "the outside: settled 4000: REFUND_TICKET amount 4000 on T1" == outside
        assert ("T1", None) == (case.key, case.action)

    def test_it_is_opened_once_however_often_it_is_compared(self, world: World, case: Case) -> None:
        for _ in range(3):
            world.clock.advance(60_000)
            assert ["CARRIED_OUT_OUTSIDE"] == codes(world)
        assert [case.dfid] == [each.dfid for each in cases(world)]

    def test_opening_it_changes_nothing_else(self, world: World, case: Case) -> None:
        assert ["FAILED"] == world.column("SELECT status FROM execution_log")
        assert {0} == {number for _, number in counters(world.store)}
        assert ["ACTIVE"] == world.column("SELECT status FROM agents")
        assert 1_000_000 == escalation_budget.left(world.store, AGENT, 1_000_000, world.clock())
        assert [] == world.column("SELECT 1 FROM events WHERE dfid = ?", case.dfid)
        assert 0 == recovery.recover(world.kernel, now_ms=world.clock()).interrupted

    def test_a_human_closes_it_and_it_stays_closed(self, world: World, case: Case) -> None:
        before = list(counters(world.store))
        answer = desk(world).resolve(case.dfid, Resolution("ABORT", "ada", "they took it back"))
        assert ("ABORTED", "HUMAN_ABORTED") == (answer.state, answer.tag)
        compared(world)
        assert [] == cases(world)
        assert before == list(counters(world.store))
        assert ["FAILED"] == world.column("SELECT status FROM execution_log")

    @pytest.mark.parametrize("decision", ["OVERRIDE", "MODIFY"])
    def test_nothing_can_be_carried_out_about_it(self, world: World, case: Case, decision: str) -> None:
        change = '{"action":"REFUND_TICKET","params":{"amount":1.00},"reason":"NOT_TRAVELLED"}'
        wanted = Resolution(decision, "ada", "why", change, acknowledged=True)  # type: ignore[arg-type]  # one of two
        with pytest.raises(UsageError, match="this case is a difference, not a decision to carry out"):
            desk(world).resolve(case.dfid, wanted)
        assert 1 == len(cases(world))

    def test_a_human_can_look_at_what_it_is_about(self, world: World, case: Case) -> None:
        assert "T1" == desk(world).view(case).packet.key

    def test_another_difference_about_the_same_key_is_another_case(self, world: World, case: Case) -> None:
        assert isinstance(world.rail, ListingRail)
        world.rail.tells = lambda line: replace(line, amount_minor=3999)
        compared(world)
        assert 2 == len(cases(world))


def desk(world: World) -> HumanReview:
    return HumanReview(world.kernel, now_ms=world.clock)


class TestMany:
    def test_a_thousand_unknown_orders_are_told_apart_from_those_that_are_known(self, world: World) -> None:
        rail = listing(world)
        world.decide(refund())
        (known,) = rail.statement(0, 10**14)
        strangers = [StatementLine(key_of(str(n)), "settled", n) for n in range(2 * KEYS_AT_ONCE)]
        rail.statement = lambda *_: iter([*strangers, known])  # type: ignore[method-assign]  # as above

        found = compare(world.store, "claims", world.kernel.dispatcher.statement, since_ms=0, until_ms=10**14)

        assert {line.key for line in strangers} == {difference.key for difference in found.differences}

    def test_one_comparison_opens_so_many_cases_and_the_next_goes_on(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sds.kernel.human.statement_cases.CASES_MAX", 2)
        rail = listing(world)
        strangers = [StatementLine(key_of(str(n)), "settled", n) for n in range(5)]
        rail.statement = lambda *_: iter(strangers)  # type: ignore[method-assign]  # as above
        opened = []
        for _ in range(4):
            assert 5 == len(codes(world))
            opened.append(len(cases(world)))
        assert [2, 4, 5, 5] == opened
