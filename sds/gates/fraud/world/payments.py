"""Card payments, generated from a seed: those of customers, fraud with their cards, and when it becomes known.

The same seed gives the same payments. They are ordered by time, in minutes since the beginning of day 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp
from random import Random
from typing import NamedTuple

from .customers import ABROAD, DAY_MIN, ELSEWHERE, Customer, Terminal, distance_band, make_customers, make_terminals
from .frauds import Fraudsters

CUSTOMERS, TERMINALS = 900, 500
AMOUNT_MINOR_MIN, AMOUNT_MINOR_MAX = 100, 2_000_000
FAVOURITE_RATE = 0.72
JOURNEY_RATE = 1 / 120  # share of a customer's days on which a journey begins
SPREE_RATE = 1 / 70  # share of their days with an afternoon in the shops
BIG_RATE = 0.012  # share of the payments for something that is not bought every month
STILL_CHARGED_DAYS = 20  # after the account was closed
KNOWN_AFTER_MEAN_MIN, KNOWN_AFTER_MIN, KNOWN_AFTER_MAX_MIN = 6 * DAY_MIN, DAY_MIN, 30 * DAY_MIN


class Payment(NamedTuple):
    """One payment. `known_at_min`: when it became known as fraud; None for a good one, which has no `scenario`.

    `unusual`: a good one whose customer is on a journey, buys something big or shops a lot.
    """

    at_min: int
    customer: int
    terminal: int
    amount_minor: int
    online: bool
    band: int
    scenario: str = ""
    known_at_min: int | None = None
    unusual: bool = False


class People(NamedTuple):
    customers: list[Customer]
    terminals: list[Terminal]


def make_people(rng: Random) -> People:
    terminals = make_terminals(TERMINALS, rng)
    return People(make_customers(CUSTOMERS, terminals, rng), terminals)


def make_payments(people: People, days: int, rng: Random) -> list[Payment]:
    """Return every payment of so many days, good ones and frauds, by time."""
    made = [payment for customer in people.customers for payment in _good(customer, people.terminals, days, rng)]
    made += (_fraud_payment(each, rng) for each in Fraudsters(*people, days, rng).payments())
    return sorted(made)


def _fraud_payment(fraud: tuple[int, int, int, float, bool, int, str], rng: Random) -> Payment:
    at_min, customer, terminal, amount, online, band, scenario = fraud
    after = KNOWN_AFTER_MIN + int(rng.expovariate(1 / (KNOWN_AFTER_MEAN_MIN - KNOWN_AFTER_MIN)))
    known = at_min + min(after, KNOWN_AFTER_MAX_MIN)
    return Payment(at_min, customer, terminal, minor(amount), online, band, scenario, known)


def minor(amount: float) -> int:
    return min(AMOUNT_MINOR_MAX, max(AMOUNT_MINOR_MIN, int(amount)))


def _good(customer: Customer, terminals: list[Terminal], days: int, rng: Random) -> Iterator[Payment]:
    away_until, away = -1, ABROAD
    for day in range(days if customer.closed_day is None else min(days, customer.closed_day + STILL_CHARGED_DAYS)):
        if day > away_until and rng.random() < JOURNEY_RATE:
            away_until, away = day + rng.randrange(2, 11), rng.choice((ELSEWHERE, ABROAD))
        travels = day <= away_until
        rate = customer.payments_per_day * (1.6 if travels else 1.0)
        count = _poisson(rate, rng)
        if rng.random() < SPREE_RATE:
            yield from _spree(customer, terminals, day, rng)
        for _ in range(count):
            at_min = day * DAY_MIN + int(rng.gauss(customer.awake_h, 3.6) * 60) % DAY_MIN
            yield _ordinary(customer, terminals, at_min, away if travels else None, rng)


def _ordinary(customer: Customer, terminals: list[Terminal], at_min: int, away: int | None, rng: Random) -> Payment:
    known_place = away is None and rng.random() < FAVOURITE_RATE
    terminal = terminals[rng.choice(customer.favourites)] if known_place else _draw(terminals, rng)
    big = rng.random() < BIG_RATE
    factor = rng.uniform(3, 9) if big else 1.3 if away else 1.0
    band = distance_band(customer, terminal) if away is None else away
    if terminal.online and away is None and rng.random() < 0.04:  # the network locates its user elsewhere
        band = rng.choice((1, 2, ELSEWHERE, ABROAD))
    amount = exp(rng.gauss(customer.usual_log, 0.55)) * terminal.level * factor
    unusual = big or away is not None
    return Payment(at_min, customer.number, terminal.number, minor(amount), terminal.online, band, unusual=unusual)


def _spree(customer: Customer, terminals: list[Terminal], day: int, rng: Random) -> Iterator[Payment]:
    at_min = day * DAY_MIN + int(rng.uniform(10, 19) * 60)
    for _ in range(rng.randrange(3, 8)):
        at_min += rng.randrange(4, 70)
        terminal = _draw(terminals, rng)
        amount = exp(rng.gauss(customer.usual_log + 0.25, 0.6)) * terminal.level
        band = distance_band(customer, terminal)
        yield Payment(at_min, customer.number, terminal.number, minor(amount), terminal.online, band, unusual=True)


def _draw(terminals: list[Terminal], rng: Random) -> Terminal:
    """Return a random terminal, more often a busy one."""
    return terminals[int(len(terminals) * rng.random() ** 1.6)]


def _poisson(mean: float, rng: Random) -> int:
    count, product, least = 0, rng.random(), exp(-mean)
    while product > least:
        count += 1
        product *= rng.random()
    return count
