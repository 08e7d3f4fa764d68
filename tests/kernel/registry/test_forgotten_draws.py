"""A version that renames a source or a field does not make a paid ticket whole again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.contract.schema import Contract
from sds.kernel.errors import ContractError
from sds.kernel.registry import registry
from tests.kernel.durable import World, contract, refund, whole
from tests.kernel.orders import recovered

HIGHER = ("version: 1.0.0", "version: 1.1.0")
SOURCE = ("source: tickets", "source: bookings")
FIELD = ("ticket.refundable_minor", "ticket.open_minor")
IN_SOURCE = ("kinds:\n", "draws_settle_in: source\nkinds:\n")


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder)) as made:
        yield made


def put_in_force(world: World, terms: Contract) -> None:
    registry.register(world.store, terms, by="operator", now_ms=world.clock())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            SOURCE,
            "`tickets:*#ticket.refundable_minor` would be forgotten: this contract draws from `bookings:*#ticket.ref",
        ),
        (
            FIELD,
            "`tickets:*#ticket.refundable_minor` would be forgotten: this contract draws from `tickets:*#ticket.open_m",
        ),
    ],
)
def test_a_paid_ticket_is_not_forgotten_under_another_name(world: World, change: tuple[str, str], said: str) -> None:
    assert "SUCCESS" == world.decide(refund("200.00")).execution
    with pytest.raises(ContractError) as caught:
        put_in_force(world, contract(HIGHER, change))
    assert said in str(caught.value)
    assert ["1.0.0"] == world.column("SELECT version FROM contracts")


@pytest.mark.parametrize("change", [SOURCE, FIELD])
def test_while_nothing_is_drawn_names_may_change(world: World, change: tuple[str, str]) -> None:
    world.rail.misfortunes = ["refuse"]
    assert "FAILED" == world.decide(refund("200.00")).execution
    put_in_force(world, contract(HIGHER, change))


def test_a_source_that_shows_what_was_paid_may_have_another_name_once_no_order_is_in_flight(world: World) -> None:
    world.decide(refund("50.00"), "C1")
    world.rail.misfortunes, world.rail.blind = ["drop"], True
    assert "UNKNOWN" == world.decide(refund("50.00"), "C2").execution
    with pytest.raises(ContractError, match="would be forgotten"):
        put_in_force(world, contract(HIGHER, SOURCE, IN_SOURCE))
    world.rail.blind = False
    recovered(world)
    put_in_force(world, contract(HIGHER, SOURCE, IN_SOURCE))


def test_a_kind_that_draws_no_more_or_from_more_is_no_other_name(world: World) -> None:
    world.decide(refund("50.00"))
    more = "    draws: {ticket.refundable_minor: amount, ticket.compensations_left: 1}\n"
    put_in_force(world, contract(HIGHER, ("    draws: {ticket.refundable_minor: amount}\n", more)))
    put_in_force(world, contract((HIGHER[0], "version: 1.2.0"), ("    draws: {ticket.refundable_minor: amount}\n", "")))
