"""The orders of a record for its bookkeeping: who decided each, what became of it, and what stands of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sds.kernel.audit.orders import BookedOrder, orders, with_statement
from sds.kernel.executor.protocol import Receipt
from sds.kernel.executor.statement import StatementLine
from sds.kernel.human.review import attest
from sds.kernel.operations import adoption
from sds.kernel.registry.reservations import Claim
from tests.kernel.durable import World, deny, refund, whole
from tests.kernel.fraud import FRAUD, challenge
from tests.kernel.humans import PAY, TERMS, Silent, escalated, resolve, unknown
from tests.kernel.orders import recovered
from tests.kernel.sagas import REVERT, Script, run, terms
from tests.kernel.statements import ListingRail, adopted, forgetful, listing, restore

LATER_MS = 10**14
DAY_MS = 86_400_000


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder)) as made:
        for number in range(1, 5):
            made.tickets.put(f"T{number}")
        yield made


def listed(world: World) -> list[BookedOrder]:
    return orders(world.store, "claims", 0, LATER_MS)


def test_each_order_says_what_became_of_it(world: World) -> None:
    world.decide(refund("10.00"), "C1", "T1")
    world.rail.misfortunes = ["refuse"]
    world.decide(refund("20.00"), "C2", "T2")
    world.rail.misfortunes, world.rail.blind = ["drop"], True
    world.decide(refund("30.00"), "C3", "T3")
    found = {order.event_id: order for order in listed(world)}
    assert {"C1": ("PAID", 1000), "C2": ("REFUSED", 2000), "C3": ("OPEN", 3000)} == {
        name: (order.status, order.amount_minor) for name, order in found.items()
    }
    assert {("AGENT", "claims-agent", "1.0.0", 2)} == {
        (order.decision, order.decided_by, order.contract_version, order.decimals) for order in found.values()
    }


def test_an_order_of_a_kind_that_spends_nothing_is_carried_out_and_not_paid(folder: Path) -> None:
    world = World(folder, terms=FRAUD)
    world.rail = rail = listing(world)
    world.decide(challenge, "C1", "T1")
    (order,) = orders(world.store, world.contract.gate, 0, LATER_MS)
    assert ("CARRIED_OUT", None) == (order.status, order.amount_minor)
    assert [True] == [each.agrees for each in beside(world, rail, 0, LATER_MS, world.contract.gate)]
    rail.tells = lambda line: replace(line, outcome="reverted")
    assert [False] == [each.agrees for each in beside(world, rail, 0, LATER_MS, world.contract.gate)]
    world.close()


def test_a_period_holds_what_ended_in_it_and_what_is_open_since(world: World) -> None:
    began_ms = world.clock()
    world.rail.misfortunes, world.rail.blind = ["drop"], True
    world.decide(refund("30.00"), "C1", "T1")
    assert ["OPEN"] == [order.status for order in orders(world.store, "claims", began_ms, began_ms)]
    world.clock.advance(60_000)
    world.rail.blind = False
    recovered(world)
    assert [] == orders(world.store, "claims", 0, began_ms)
    assert [began_ms + 60_000] == [order.at_ms for order in orders(world.store, "claims", began_ms + 1, LATER_MS)]


def test_a_humans_order_says_who_and_why(folder: Path) -> None:
    with whole(World(folder, terms=TERMS)) as world:
        resolve(world, escalated(world), "MODIFY", PAY)
        (order,) = listed(world)
        assert ("MODIFY", "ada", 4000, "PAID") == (order.decision, order.decided_by, order.amount_minor, order.status)
        assert order.reason


def test_what_a_saga_took_back_is_not_paid(folder: Path) -> None:
    with whole(World(folder, terms=terms())) as world:
        run(world.kernel, world, Script(step_2=deny, compensation=REVERT))
        (order,) = listed(world)
        assert "TAKEN_BACK" == order.status


def test_an_end_by_a_humans_word_says_whose(folder: Path) -> None:
    world, silent = World(folder, terms=TERMS), Silent()
    dfid, said = unknown(world, silent), Receipt("settled", "B-7")
    kernel = world.open_kernel(executor=silent)
    attest(kernel, dfid, said, who="bob", reason="asked the bank", acknowledged=True, now_ms=world.clock)
    (order,) = listed(world)
    assert ("PAID", "bob", "B-7") == (order.status, order.settled_by, order.reference)
    world.close()


def beside(world: World, rail: ListingRail, since_ms: int, until_ms: int, gate: str = "claims") -> list[BookedOrder]:
    def statement(since: int, until: int) -> tuple[StatementLine, ...]:
        return tuple(line for line in rail.statement(0, LATER_MS) if since <= line.at_ms <= until)

    return with_statement(world.store, gate, statement, since_ms=since_ms, until_ms=until_ms)


def test_a_payment_whose_end_was_learned_days_later_is_in_one_period(world: World) -> None:
    rail, began_ms = listing(world), world.clock()
    rail.misfortunes, rail.blind = ["lose"], True
    assert "UNKNOWN" == world.decide(refund("30.00")).execution
    world.clock.advance(3 * DAY_MS)
    rail.blind = False
    recovered(world)
    (order,) = beside(world, rail, 0, began_ms + DAY_MS)
    assert ("PAID", True) == (order.status, order.agrees)
    assert [] == beside(world, rail, began_ms + 2 * DAY_MS, LATER_MS)


def test_what_is_paid_just_after_the_statement_was_read_is_no_difference(world: World) -> None:
    rail = listing(world)
    world.decide(refund("10.00"), "C1", "T1")
    rail.while_listing = lambda: world.decide(refund("30.00"), "C2", "T2")
    assert [] == [order.event_id for order in beside(world, rail, 0, LATER_MS) if not order.agrees]
    rail.while_listing = lambda: None
    assert [("PAID", True)] * 2 == [(order.status, order.agrees) for order in beside(world, rail, 0, LATER_MS)]


def test_an_order_of_another_gate_of_the_record_is_not_one_that_only_the_outside_has(world: World) -> None:
    rail = listing(world)
    world.decide(refund("30.00"))
    assert [] == beside(world, rail, 0, LATER_MS, gate="goodwill")


def test_money_that_moved_in_another_currency_is_not_added_to_that_of_this_one(world: World) -> None:
    rail = listing(world)
    world.decide(refund("30.00"))
    rail.tells = lambda line: replace(line, other_currency="JPY")
    (order,) = beside(world, rail, 0, LATER_MS)
    assert (False, 3000, 0) == (order.agrees, order.amount_minor, order.outside_minor)


def test_what_an_older_version_took_over_uncounted_has_the_amount_that_moved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rail = listing(world)
    rail.tells = forgetful
    world.decide(refund("30.00"))
    restore(world, None)
    with monkeypatch.context() as older:
        older.setattr(adoption, "_taken", lambda *_: Claim((), 0))
        assert 1 == len(adopted(world))
    (order,) = listed(world)
    assert ("ADOPTED", "PAID", 3000, 2) == (order.decision, order.status, order.amount_minor, order.decimals)
