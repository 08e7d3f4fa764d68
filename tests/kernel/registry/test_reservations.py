"""What a decision takes: at most one live reservation for a resource, and never more than a window's limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sds.kernel.canonical import digest
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import StoreError
from sds.kernel.executor.protocol import ExecutionIntent
from sds.kernel.flow.in_flight import orders_in_flight
from sds.kernel.flow.intake import read_event
from sds.kernel.flow.kernel import Kernel
from sds.kernel.registry import registry, reservations, spend
from sds.kernel.storage.store import Row
from tests.kernel.durable import (
    Propose,
    World,
    compensate,
    contract,
    counters,
    deny,
    escalate,
    goodwill,
    if_permitted,
    refund,
    see_through,
    together,
    whole,
)
from tests.kernel.outside import FARE_MINOR

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
LIMITS = (
    ("max_minor: 5000000", "max_minor: 6000"),
    ("max_minor: 10000000", "max_minor: 10000"),
    ("max_minor: 100000", "max_minor: 5000"),
)


@contextmanager
def opened(folder: Path, terms: Contract) -> Iterator[World]:
    with whole(World(folder, terms=terms)) as made:
        for number in range(2, 10):
            made.tickets.put(f"T{number}")
        yield made


@pytest.fixture
def tight(folder: Path) -> Iterator[World]:
    """Return a world that may spend 60.00 an hour, 100.00 a day and 50.00 a day on one customer.

    No compensation is due on its tickets: it would be over the limit, and then only the human is left.
    """
    with opened(folder, contract(*LIMITS)) as made:
        for number in range(1, 10):
            made.tickets.put(f"T{number}", compensations_left=0)
        yield made


def highest(world: World, name: str, ticket: str) -> str | None:
    """Return the largest refund the envelope would allow now, as it is written."""
    kind = world.kernel.preview(world.event(name, ticket)).envelope.kind("REFUND_TICKET")
    return None if kind is None else f"{kind.params[0][1].hi / 100:.2f}"


def test_what_is_held_is_subtracted_from_live_state(world: World):
    world.rail.misfortunes = ["drop"]
    world.decide(refund("150.00"))
    assert "50.00" == highest(world, "C2", "T1")
    packet = world.packet("C2")
    assert FARE_MINOR - 15_000 == packet.snapshot.fields["ticket.refundable_minor"]


def test_a_resource_that_is_held_cannot_be_drawn_on_but_others_can(world: World):
    world.rail.misfortunes = ["drop"]
    world.decide(refund("150.00"), "C1")
    answer = world.decide(refund("10.00"), "C2")
    assert ("ABORTED", "RESOURCE_CONTENTION") == (answer.state, answer.tag)
    assert "SUCCESS" == world.decide(compensate, "C3").execution


@pytest.mark.parametrize("other", ["T1#2", "T1$", "T1!", "T10", "T"])
def test_the_resources_of_a_key_are_its_own_whatever_other_keys_it_looks_like(world: World, other: str):
    world.tickets.put(other)
    world.rail.misfortunes = ["drop", "drop"]
    world.decide(refund("150.00"), "C1", other)
    assert ("200.00", "50.00") == (highest(world, "C2", "T1"), highest(world, "C2", other))
    world.decide(refund("10.00"), "C3", "T1")
    assert ("190.00", "50.00") == (highest(world, "C4", "T1"), highest(world, "C4", other))
    assert (None, "UNKNOWN") == (world.kernel.holder("T2"), world.kernel.holder(other))


def test_contention_is_not_held_against_the_agent(world: World):
    world.rail.misfortunes = ["drop"]
    world.decide(refund("150.00"), "C1")
    world.decide(refund("10.00"), "C2")
    assert [0] == world.column("SELECT rejections FROM agents")


def test_a_draw_that_comes_between_reasoning_and_reservation_is_seen(world: World):
    packet = world.packet("C1")
    assert "SUCCESS" == world.decide(refund("150.00"), "C2").execution
    answer = world.kernel.decide(packet, refund("10.00")(packet))
    assert ("ABORTED", []) == (answer.state, [p for p in world.rail.paid() if p[0] == packet.dfid])


@pytest.mark.parametrize("between", [refund("150.00"), compensate], ids=["the same field", "another field"])
@pytest.mark.parametrize("after", ["judge", "just_in_time"])
def test_whatever_is_drawn_from_a_ticket_after_the_last_look_at_it_is_seen_by_its_epoch(
    folder: Path, between: Propose, after: str
):
    """Between the last look at the record and the reserving transaction only the resources' epochs can tell."""
    with opened(folder, contract(more="\ndraws_settle_in: source\n")) as world:
        packet = world.packet("C1")
        look = getattr(world.kernel, after)

        def and_then(*given: object) -> object:
            setattr(world.kernel, after, look)
            found = look(*given)
            assert "SUCCESS" == world.decide(between, "C2").execution
            return found

        setattr(world.kernel, after, and_then)
        answer = world.kernel.decide(packet, refund("10.00")(packet))
        assert ("ABORTED", "RESOURCE_CONTENTION") == (answer.state, answer.tag)


def test_what_settles_in_the_kernel_stays_subtracted(world: World):
    world.decide(refund("150.00"))
    assert "50.00" == highest(world, "C2", "T1")
    world.decide(refund("50.00"), "C2")
    assert None is highest(world, "C3", "T1")


def test_what_settles_in_the_source_is_given_back_because_the_source_now_tells(folder: Path):
    with opened(folder, contract(more="\ndraws_settle_in: source\n")) as world:
        world.rail.misfortunes = ["drop"]
        world.decide(refund("150.00"))
        assert "50.00" == highest(world, "C2", "T1")
        world.rail.misfortunes = []
        world.kernel.dispatcher.resolve(_only_order(world), world.kernel.still_valid)
        assert "200.00" == highest(world, "C2", "T1")
        world.tickets.put("T1", refundable_minor=5_000)
        assert "50.00" == highest(world, "C2", "T1")


def _only_order(world: World) -> ExecutionIntent:
    (intent,) = orders_in_flight(world.store, world.contract.gate, world.clock())
    return intent


def test_what_failed_is_given_back_whole(world: World):
    world.rail.misfortunes = ["refuse"]
    answer = world.decide(refund("150.00"))
    assert ("ABORTED", "EXECUTION_FAILED", "FAILED") == (answer.state, answer.tag, answer.execution)
    assert {0} == {used for _, used in counters(world.store)}
    assert "200.00" == highest(world, "C2", "T1")
    assert ["released"] == world.column("SELECT status FROM reservations")


def test_gates_over_one_source_share_its_resources(world: World):
    other = contract(("gate: claims", "gate: others"), ("agent_id: claims-agent", "agent_id: others-agent"))
    registry.register(world.store, other, by="registry", now_ms=1)
    world.decide(refund("150.00"))
    event = read_event(other, {"claim_id": "C1", "ticket_id": "T1", "text": ""})
    kind = world.open_kernel(terms=other).preview(event).envelope.kind("REFUND_TICKET")
    assert kind is not None
    assert 5_000 == kind.params[0][1].hi


def test_the_tightest_limit_bounds_the_envelope(tight: World):
    assert "50.00" == highest(tight, "C1", "T1")  # the customer's
    tight.decide(refund("20.00"), "C1", "T1")
    assert "30.00" == highest(tight, "C2", "T1")
    assert "40.00" == highest(tight, "C2", "T2")  # the hour's
    tight.clock.advance(HOUR_MS)
    assert "50.00" == highest(tight, "C2", "T2")
    tight.decide(refund("50.00"), "C2", "T2")
    tight.clock.advance(HOUR_MS)
    assert "30.00" == highest(tight, "C3", "T3")  # the day's


def test_an_exhausted_limit_leaves_only_the_human(tight: World):
    tight.decide(refund("50.00"), "C1", "T1")
    packet = tight.packet("C2", "T1")
    assert ("ESCALATE",) == packet.envelope.names
    answer = tight.kernel.decide(packet, escalate(packet))
    assert ("ESCALATED", "ESCALATED_BY_RULE") == (answer.state, answer.reason_code)


def test_windows_are_utc_hours_and_days(tight: World):
    assert (
        "claims/hour/2013-12-02T16/*",
        "claims/day/2013-12-02/*",
        f"claims/customer/2013-12-02/{digest('?')[:16]}",
    ) == spend.scopes(tight.contract, {}, tight.clock()).names
    tight.decide(refund("50.00"), "C1", "T1")
    tight.clock.advance(HOUR_MS)
    assert None is highest(tight, "C2", "T1")
    tight.clock.advance(DAY_MS)
    assert "50.00" == highest(tight, "C2", "T1")


def test_what_failed_does_not_count_and_what_is_unknown_does(tight: World):
    tight.rail.misfortunes = ["refuse", "drop"]
    tight.decide(refund("30.00"), "C1", "T1")
    assert "50.00" == highest(tight, "C2", "T1")
    tight.decide(refund("30.00"), "C2", "T1")
    assert "20.00" == highest(tight, "C3", "T1")


def test_a_limit_used_up_between_reasoning_and_reservation_refuses(tight: World):
    packet = tight.packet("C1", "T1")
    other = tight.decide(refund("40.00"), "C2", "T2")
    answer = tight.kernel.decide(packet, refund("30.00")(packet))
    assert ("ABORTED", [(other.dfid, "T2", "REFUND_TICKET", 4000)]) == (answer.state, tight.rail.paid())


def test_the_limit_is_asked_again_inside_the_reserving_transaction(tight: World):
    """Another process takes the last cents after the just-in-time check has seen them."""
    packet = tight.packet("C1", "T1")
    other = tight.open_kernel(tight.open_store())
    late = other.open(tight.event("C2", "T2"))
    tight.tickets.on_read = lambda key: _spend_once(tight, other, late, key)
    answer = tight.kernel.decide(packet, refund("30.00")(packet))
    assert ("ABORTED", 1) == (answer.state, len(tight.rail.paid()))
    assert answer.tag in ("SPEND_LIMIT_EXCEEDED", "STATE_DRIFT_DETECTED")


@pytest.mark.parametrize(("spends", "code"), [(5_000, None), (5_001, "SPEND_LIMIT_EXCEEDED")])
def test_the_reserving_transaction_itself_holds_the_spend_limits(tight: World, spends: int, code: str | None):
    """After the last check others may have spent, on other keys: what is reserved is compared once more."""
    store, terms = tight.store, tight.contract
    now = spend.scopes(terms, tight.kernel.preview(tight.event()).snapshot.fields, tight.clock())
    usage = reservations.usage(store, terms, "T1")
    refused, taken = None, list[Row]()
    with suppress(_UndoneError), store.transaction():
        refused = reservations.reserve(
            store, terms, "a flow", "T1", reservations.Claim((), spends), usage, usage.epochs, now
        )
        taken = store.rows("SELECT scope, amount FROM spend WHERE dfid = 'a flow' ORDER BY scope")
        raise _UndoneError
    assert (code, [] if code else [(name, spends) for name in sorted(now.names)]) == (refused, taken)


class _UndoneError(Exception):
    """Nothing of it stays: the ledger knows of no such flow."""


def _spend_once(world: World, kernel: Kernel, packet: DecisionPacket, key: str) -> None:
    if key == "T1":
        world.tickets.on_read = lambda _key: None
        kernel.decide(packet, refund("50.00")(packet))


def what_is_left(packet: DecisionPacket) -> bytes:
    """Propose 7.00, or less where the limit leaves less."""
    kind = packet.envelope.kind("REFUND_TICKET")
    return refund(f"{min(700, kind.params[0][1].hi if kind else 0) / 100:.2f}")(packet)


def test_two_kernels_racing_for_the_last_cents_never_pass_the_limit(tight: World):
    kernels = [tight.kernel, tight.open_kernel(tight.open_store())]

    def claim(number: int) -> object:
        event = tight.event(f"C{number}", f"T{1 + number % 9}")
        return see_through(kernels[number % 2], event, if_permitted(what_is_left, "REFUND_TICKET"))

    together(24, claim)
    paid = sum(amount for *_, amount in tight.rail.paid())
    assert 0 < paid <= 6_000
    assert dict(counters(tight.store))["claims/hour/2013-12-02T16/*"] == paid


def test_a_kind_that_draws_on_nothing_is_still_limited(tight: World):
    tight.tickets.put("T1", mood="angry")
    for number in range(5):
        assert "SUCCESS" == tight.decide(goodwill("10.00"), f"C{number}").execution
    assert ("ESCALATE",) == tight.packet("C9").envelope.names


def test_taking_nothing_leaves_every_counter_alone(world: World):
    world.tickets.put("T1", mood="angry")
    assert "CLOSED" == world.decide(deny, "C1").state
    assert "ACCEPTED" == world.decide(goodwill("0.00"), "C2").outcome
    assert [] == list(counters(world.store))


def test_nothing_negative_is_ever_taken(folder: Path):
    """A contract may be careless about its bounds: the safeguards are not, nor are the tables."""
    terms = contract(("lo: 1, hi: ticket.refundable_minor", "lo: -500, hi: ticket.refundable_minor"))
    with opened(folder, terms) as world:
        answer = world.decide(refund("-5.00"))
        assert ("ACTIVE", [], []) == (answer.state, world.rail.paid(), list(counters(world.store)))
        refused = 'CHECK constraint failed: amount > 0|violates check constraint "reservations_amount_check"'
        with pytest.raises(StoreError, match=refused), world.store.transaction():
            world.store.insert("reservations", dfid="d", resource="r", amount=-1, status="live")
