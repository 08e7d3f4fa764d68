"""Tickets and claims for real flights, generated from a seed: the same seed gives the same world.

No draw depends on how many claims are asked for, so a small world is the beginning of a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random

from .claims import Claim, Deck, corpus, write_claim
from .flights import Flight

AS_OF_AT = int(datetime(2013, 12, 20, tzinfo=UTC).timestamp())
DUE_AFTER_S = 36 * 3600  # no flight of 2013 was delayed and flying for longer
CLAIMS_MAX = 1_000_000
CUSTOMERS = 4_000
AWARD_FARE_MINOR = 560  # a ticket bought with miles: only the security fee was paid

# How often each case occurs, in a thousand claims.
_CASES = {
    "ordinary": 780,
    "unknown_ticket": 20,
    "not_due": 30,
    "fully_refunded": 30,
    "partly_refunded": 60,
    "compensated": 40,
    "voucher_issued": 20,
    "award": 20,
}
# How often each incident occurs, in a thousand claims.
_INCIDENTS = {"cancelled": 260, "long": 300, "very_long": 60, "medium": 250, "short": 100, "no_arrival": 30}


@dataclass(frozen=True, slots=True)
class Ticket:
    """One ticket as the airline knows it. Amounts in minor units; `customer` is a pseudonym."""

    ticket_id: str
    flight_id: str
    customer: str
    fare_minor: int
    refunded_minor: int = 0
    compensated: bool = False
    voucher_issued: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """The state of the demo at one moment. `flights` are those that tickets are for."""

    flights: tuple[Flight, ...]
    tickets: tuple[Ticket, ...]
    claims: tuple[Claim, ...]


def is_due(flight: Flight) -> bool:
    """Return whether the flight's outcome can be known: its scheduled departure is long enough before `AS_OF_AT`."""
    return flight.sched_dep_at + DUE_AFTER_S <= AS_OF_AT


def make_world(flights: Sequence[Flight], claims: int, rng: Random) -> World:
    """Generate `claims` claims, each with a ticket of its own and special cases at their rates. Their texts come from
    the test part of the corpus. Raises ValueError.
    """
    if not 0 <= claims <= CLAIMS_MAX:
        raise ValueError(f"`{claims}` claims are not between 0 and {CLAIMS_MAX}")
    pools, deck = _pools(flights), Deck(corpus("test"))
    used: dict[str, Flight] = {}
    tickets: list[Ticket] = []
    written: list[Claim] = []
    for index in range(claims):
        case = rng.choices(tuple(_CASES), tuple(_CASES.values()))[0]
        incident = rng.choices(tuple(_INCIDENTS), tuple(_INCIDENTS.values()))[0]
        flight = rng.choice(pools["not_due" if case == "not_due" else incident])
        # Random ids: the events of two worlds in one store do not contradict each other.
        tag = f"{index:06d}-{rng.getrandbits(32):08x}"
        ticket = _ticket(f"TKT-{tag}", flight, case, rng)
        written.append(write_claim(f"CLM-{tag}", ticket.ticket_id, flight, deck, rng))
        if case != "unknown_ticket":
            used[flight.flight_id] = flight
            tickets.append(ticket)
    return World(tuple(used.values()), tuple(tickets), tuple(written))


def _pools(flights: Sequence[Flight]) -> dict[str, list[Flight]]:
    pools: dict[str, list[Flight]] = {name: [] for name in (*_INCIDENTS, "not_due")}
    for flight in flights:
        pools[_incident(flight) if is_due(flight) else "not_due"].append(flight)
    empty = [name for name, pool in pools.items() if not pool]
    if empty:
        raise ValueError(f"no flight is `{empty[0]}`")
    return pools


def _incident(flight: Flight) -> str:
    dep, arr = flight.dep_delay_min, flight.arr_delay_min
    if dep is None:
        return "cancelled"
    if arr is None:
        return "no_arrival"
    if dep >= 300:
        return "very_long"
    return "long" if arr >= 180 else "medium" if arr >= 60 else "short"


def _ticket(ticket_id: str, flight: Flight, case: str, rng: Random) -> Ticket:
    fare_minor = AWARD_FARE_MINOR if case == "award" else _fare_minor(flight, rng)
    return Ticket(
        ticket_id=ticket_id,
        flight_id=flight.flight_id,
        customer=f"cust-{rng.randrange(CUSTOMERS):05d}",
        fare_minor=fare_minor,
        refunded_minor={"fully_refunded": fare_minor, "partly_refunded": rng.randrange(1, fare_minor)}.get(case, 0),
        compensated=case == "compensated",
        voucher_issued=case == "voucher_issued",
    )


def _fare_minor(flight: Flight, rng: Random) -> int:
    """Return a fare: a base and an amount for each kilometre, scaled by how full the aircraft was."""
    return (4_900 + flight.distance_m // 1000 * 8) * rng.randrange(60, 220) // 100 + rng.randrange(100)
