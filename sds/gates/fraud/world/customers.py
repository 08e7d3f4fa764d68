"""Customers and the terminals they pay at, generated from a seed. None of them exists."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, hypot, log
from random import Random

DAY_MIN = 24 * 60
SIDE_KM = 100.0  # of the square that all customers live in
BANDS_KM = (5.0, 25.0, 60.0)  # ends of the distance bands 0, 1 and 2; band 3 is elsewhere in the country, 4 abroad
ELSEWHERE, ABROAD = 3, 4
FAVOURITES = 6
CLOSED_RATE, CLOSED_DAY_MAX = 0.02, 200


@dataclass(frozen=True, slots=True)
class Terminal:
    """A terminal. `level`: its amounts relative to a customer's usual one. `share`: how many customers use it."""

    number: int
    x_km: float
    y_km: float
    online: bool
    level: float
    share: float


@dataclass(frozen=True, slots=True)
class Customer:
    """One holder of a card. `usual_log`: natural logarithm of the usual amount in minor units.

    `limit_minor`: the limit of one payment. `closed_day`: when the account is closed; None: never.
    """

    number: int
    x_km: float
    y_km: float
    usual_log: float
    payments_per_day: float
    awake_h: float  # the middle of the day, in hours
    favourites: tuple[int, ...]
    limit_minor: int
    closed_day: int | None


def make_terminals(count: int, rng: Random) -> list[Terminal]:
    """Make terminals with a long tail: a few are busy, and many are hardly used."""
    return [
        Terminal(
            number,
            rng.uniform(0, SIDE_KM),
            rng.uniform(0, SIDE_KM),
            online=rng.random() < 0.35,
            level=exp(rng.gauss(0, 0.4)),
            share=rng.paretovariate(1.1),
        )
        for number in range(count)
    ]


def make_customers(count: int, terminals: list[Terminal], rng: Random) -> list[Customer]:
    """Make customers who live in one square; one in fifty closes the account some day."""
    return [_customer(number, terminals, rng) for number in range(count)]


def _customer(number: int, terminals: list[Terminal], rng: Random) -> Customer:
    x_km, y_km = rng.uniform(0, SIDE_KM), rng.uniform(0, SIDE_KM)
    usual_log = rng.gauss(log(3_500), 0.5)
    near = [
        each.share if each.online else each.share / (1 + hypot(each.x_km - x_km, each.y_km - y_km) / 4) ** 2
        for each in terminals
    ]
    return Customer(
        number,
        x_km,
        y_km,
        usual_log,
        payments_per_day=min(2.5, rng.lognormvariate(-0.9, 0.6)),
        awake_h=rng.gauss(14, 2),
        favourites=tuple(each.number for each in rng.choices(terminals, near, k=FAVOURITES)),
        limit_minor=round(exp(usual_log) * rng.choice((15, 20, 30)) / 10_000 + 1) * 10_000,
        closed_day=rng.randrange(CLOSED_DAY_MAX) if rng.random() < CLOSED_RATE else None,
    )


def distance_band(customer: Customer, terminal: Terminal) -> int:
    """Return how far from home a payment is made: 0 in the neighbourhood and, online, on the customer's own device."""
    if terminal.online:
        return 0
    km = hypot(terminal.x_km - customer.x_km, terminal.y_km - customer.y_km)
    return sum(km >= end for end in BANDS_KM)
