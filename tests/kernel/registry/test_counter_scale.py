"""A contract that counts in other units than the record, or under other names: what was drawn and spent is not taken for a
hundredth of it, and not forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.contract.schema import Contract
from sds.kernel.errors import ContractError
from sds.kernel.registry import registry
from tests.kernel.durable import World, compensate, contract, counters, goodwill, refund, whole
from tests.kernel.orders import recovered
from tests.stores.records import alone

HOUR_MS = 3_600_000
WHOLE = (
    ("ticket.refundable_minor: fixed(2)", "ticket.refundable_minor: int"),
    ("hi: ticket.refundable_minor, scale: 2", "hi: ticket.refundable_minor"),
    ("fills: {amount: {value: 25000, scale: 2}}", "fills: {amount: {value: 250}}"),
    ("hi: 1000, scale: 2", "hi: 10"),
)

HIGHER = ("version: 1.0.0", "version: 1.1.0")
SOURCE = ("source: tickets", "source: bookings")
FIELD = ("ticket.refundable_minor", "ticket.open_minor")
IN_SOURCE = ("kinds:\n", "draws_settle_in: source\nkinds:\n")
NOT_DRAWN = "    draws: {ticket.refundable_minor: amount}\n"
DRAWN = "`ticket.refundable_minor` is declared as `fixed\\(2\\)`, but draws from it were counted with 0 decimals"
SPENT = "what is spent in this hour or day was counted with 0 decimals, but this contract spends with another number"

SHARED = "`ticket.refundable_minor` is declared as `fixed(2)`, but gate `claims`, which shares it, declares it as `int`"


@pytest.fixture
def euros(folder: Path) -> Iterator[World]:
    """A world whose first contract counts whole euros: a fare of 200."""
    with whole(World(folder, terms=contract(*WHOLE))) as made:
        made.tickets.put("T1", refundable_minor=200, mood="angry")
        yield made


def cents(version: str, *changes: tuple[str, str]) -> Contract:
    return contract(("version: 1.0.0", f"version: {version}"), *changes)


def put_in_force(world: World, terms: Contract) -> None:
    registry.register(world.store, terms, by="operator", now_ms=world.clock())
    world.kernel = world.open_kernel(terms=terms)


def in_force(world: World) -> str:
    return registry.lookup(world.store, "claims-agent").contract_hash  # type: ignore[union-attr]


def test_a_field_something_is_drawn_from_is_not_counted_in_other_units(euros: World):
    assert "SUCCESS" == euros.decide(refund("200")).execution
    euros.clock.advance(24 * HOUR_MS)
    with pytest.raises(ContractError, match=DRAWN) as caught:
        put_in_force(euros, cents("1.1.0"))
    assert "keep the field's type" in caught.value.hint
    assert euros.contract.hash == in_force(euros)
    assert ["REFUSED"] == euros.column("SELECT kind FROM ledger ORDER BY idx DESC LIMIT 1")
    assert 0 == euros.packet("C2").snapshot.fields["ticket.refundable_minor"]


def test_nor_while_an_order_holds_it_and_once_it_is_given_back_it_may_be(euros: World):
    euros.rail.misfortunes, euros.rail.blind = ["drop"], True
    assert "UNKNOWN" == euros.decide(refund("200")).execution
    with pytest.raises(ContractError, match=DRAWN):
        put_in_force(euros, cents("1.1.0"))
    euros.rail.blind, euros.rail.misfortunes = False, ["refuse"]
    assert 1 == recovered(euros).failed
    put_in_force(euros, cents("1.1.0"))
    euros.tickets.put("T1", refundable_minor=20_000)
    assert "SUCCESS" == euros.decide(refund("200.00"), "C2").execution
    put_in_force(euros, cents("1.2.0"))


def test_what_was_drawn_is_not_forgotten_by_a_contract_that_does_not_name_the_field(euros: World):
    euros.decide(refund("200"))
    euros.clock.advance(24 * HOUR_MS)
    without = ("hi: ticket.refundable_minor", "hi: 200"), ("    when: ticket.refundable_minor > 0\n", "")
    gone = (NOT_DRAWN, ""), ("  ticket.refundable_minor: int\n", "")
    with pytest.raises(ContractError, match="would be forgotten: this contract draws from it no more"):
        put_in_force(euros, cents("1.1.0", *WHOLE[:2], *without, *gone, *WHOLE[2:]))
    put_in_force(euros, cents("1.1.0", *WHOLE[:2], *without, *gone, *WHOLE[2:], IN_SOURCE))
    with pytest.raises(ContractError, match=DRAWN):
        put_in_force(euros, cents("1.2.0"))


def test_nor_by_a_contract_that_only_looks_at_it(euros: World):
    euros.decide(refund("200"))
    euros.clock.advance(24 * HOUR_MS)
    with pytest.raises(ContractError, match=DRAWN):
        put_in_force(euros, cents("1.1.0", (NOT_DRAWN, "")))


def test_nor_by_another_gate_of_the_same_source(euros: World):
    euros.decide(refund("200"))
    names = ("gate: claims", "gate: others"), ("agent_id: claims-agent", "agent_id: others-agent")
    with pytest.raises(ContractError, match=DRAWN):
        put_in_force(euros, contract(*names))
    put_in_force(euros, contract(*names, ("source: tickets", "source: bookings")))


def test_two_gates_in_force_never_count_what_they_share_in_different_units(euros: World):
    """Nothing is drawn yet: as soon as one had, the other would take it for a hundred times as much."""
    names = ("gate: claims", "gate: others"), ("agent_id: claims-agent", "agent_id: others-agent")
    for draws in ((), ((NOT_DRAWN, ""),)):  # that it only looks at what the other draws is enough
        with pytest.raises(ContractError) as caught:
            put_in_force(euros, contract(*names, *draws))
        assert SHARED == str(caught.value)
        assert "declare it as that gate does" in caught.value.hint
    put_in_force(euros, contract(*names, *WHOLE))
    with pytest.raises(ContractError, match="gate `others`, which shares it, declares it as `int`"):
        put_in_force(euros, cents("1.1.0"))
    registry.transition(euros.store, "others-agent", "RETIRED", by="operator", reason="moved", now_ms=1)
    put_in_force(euros, cents("1.1.0"))


def test_nor_does_a_revoked_contract_keep_another_gate_from_its_units(euros: World):
    registry.revoke(euros.store, euros.contract.hash, who="ada", reason="wrong units", now_ms=1)
    put_in_force(
        euros, contract(("gate: claims", "gate: others"), ("agent_id: claims-agent", "agent_id: others-agent"))
    )


def test_two_gates_that_only_look_may_look_in_units_of_their_own(folder: Path):
    world = World(folder, terms=contract(*WHOLE, (NOT_DRAWN, "")))
    names = ("gate: claims", "gate: others"), ("agent_id: claims-agent", "agent_id: others-agent")
    put_in_force(world, contract(*names, (NOT_DRAWN, "")))
    world.close()


def test_other_units_of_another_field_are_no_matter(euros: World):
    euros.decide(compensate)
    euros.clock.advance(24 * HOUR_MS)
    put_in_force(euros, cents("1.1.0"))
    assert [("tickets:T1#ticket.compensations_left", 1)] == euros.store.rows("SELECT resource, drawn FROM resources")


def test_what_is_spent_is_not_counted_in_other_units_in_the_same_hour_or_day(euros: World):
    assert "SUCCESS" == euros.decide(goodwill("10")).execution
    for ms in (0, HOUR_MS):
        euros.clock.advance(ms)
        with pytest.raises(ContractError, match=SPENT) as caught:
            put_in_force(euros, cents("1.1.0"))
    assert "suspend the agent until the hour or day is over" in caught.value.hint
    euros.clock.advance(7 * HOUR_MS)  # START_MS is 16:00
    put_in_force(euros, cents("1.1.0"))
    assert "SUCCESS" == euros.decide(goodwill("10.00"), "C2").execution


def test_what_kinds_of_several_scales_spent_is_in_nobodys_units(euros: World):
    """An older version of this program took such a contract, if the human's kind replaced the agent's."""
    assert "SUCCESS" == euros.decide(goodwill("10")).execution
    (text,) = euros.column("SELECT body FROM contracts")
    body = json.loads(str(text))
    kind = json.loads(str(text))["kinds"]["GOODWILL"]
    kind["params"]["amount"]["scale"] = 2
    body["human"]["kinds"] = {"GOODWILL": kind}
    alone(euros.store, "UPDATE contracts SET body = ?", (json.dumps(body),))
    with pytest.raises(ContractError, match="was counted with different numbers of decimals"):
        put_in_force(euros, cents("1.1.0"))
    alone(euros.store, "UPDATE contracts SET body = ?", (text,))


def test_a_flow_that_was_open_does_not_count_in_the_older_units_any_more(euros: World):
    packet = euros.packet()
    older = euros.kernel
    put_in_force(euros, cents("1.1.0"))
    answer = older.decide(packet, refund("200")(packet))
    assert ("ABORTED", "CONTRACT_REVOKED") == (answer.state, answer.tag)
    assert [] == list(counters(euros.store))


def test_a_gate_that_starts_again_with_its_own_contract_is_not_asked(euros: World):
    euros.decide(refund("200"))
    head = verify.verify(euros.store).head
    put_in_force(euros, euros.contract)
    assert head == verify.verify(euros.store).head


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


MORE = "    draws: {ticket.refundable_minor: amount, ticket.open_minor: amount}\n"
OPEN = ("  ticket.refundable_minor: fixed(2)\n", "  ticket.refundable_minor: fixed(2)\n  ticket.open_minor: fixed(2)\n")
OTHER = (NOT_DRAWN, "    draws: {ticket.open_minor: amount}\n")
FORGOTTEN = "`tickets:\\*#ticket.refundable_minor` would be forgotten"
NEXT = ("version: 1.0.0", "version: 1.2.0")


def test_a_kind_that_draws_from_more_forgets_nothing_and_one_that_draws_no_more_does(world: World) -> None:
    world.decide(refund("50.00"))
    more = "    draws: {ticket.refundable_minor: amount, ticket.compensations_left: 1}\n"
    put_in_force(world, contract(HIGHER, (NOT_DRAWN, more)))
    with pytest.raises(ContractError, match=f"{FORGOTTEN}: this contract draws from it no more"):
        put_in_force(world, contract(NEXT, (NOT_DRAWN, "")))


def test_nor_in_two_steps(world: World) -> None:
    world.decide(refund("50.00"))
    put_in_force(world, contract(HIGHER, OPEN, (NOT_DRAWN, MORE)))
    with pytest.raises(ContractError, match=f"{FORGOTTEN}: this contract draws from `tickets:.#ticket.open_minor`"):
        put_in_force(world, contract(NEXT, OPEN, OTHER))


def test_nor_where_the_kind_has_another_name_too(world: World) -> None:
    world.decide(refund("50.00"))
    kind = ("REFUND_TICKET", "PAY_BACK")
    with pytest.raises(ContractError, match=FORGOTTEN):
        put_in_force(world, contract(HIGHER, kind, (NOT_DRAWN, "")))
    with pytest.raises(ContractError, match=FORGOTTEN):
        put_in_force(world, contract(HIGHER, kind, OPEN, OTHER))
    put_in_force(world, contract(HIGHER, kind))


def test_nor_by_a_flow_that_was_open_when_nothing_was_drawn_yet(world: World) -> None:
    """Under the contract before it would draw what the one in force does not look at."""
    packet, older = world.packet("C1"), world.kernel
    put_in_force(world, contract(HIGHER, OPEN, OTHER))
    answer = older.decide(packet, refund("200.00")(packet))
    assert ("ABORTED", "CONTRACT_REVOKED") == (answer.state, answer.tag)
    assert [] == world.rail.paid()


def test_what_was_given_up_while_nothing_was_drawn_keeps_no_later_contract_out(world: World) -> None:
    """Another kind has drawn from it since."""
    both = (
        "    spends: amount\n    reasons: [SHORT_DELAY]",
        f"{NOT_DRAWN}    spends: amount\n    reasons: [SHORT_DELAY]",
    )
    world.tickets.put("T1", mood="angry", open_minor=20_000)
    put_in_force(world, contract(HIGHER, OPEN, OTHER, both))
    assert "SUCCESS" == world.decide(goodwill("10.00")).execution
    put_in_force(world, contract(NEXT, OPEN, OTHER, both, ("mission: Decide claims.", "mission: Decide all claims.")))
