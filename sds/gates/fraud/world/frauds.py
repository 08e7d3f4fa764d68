"""Six kinds of fraud with other people's cards, or by customers against their own interest. Their shares drift with time.

Each leaves traces of its own, but good payments leave them, too: customers travel, buy big things, and use small shops.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp
from random import Random

from .customers import ABROAD, DAY_MIN, ELSEWHERE, Customer, Terminal, distance_band

# How many of each begin in a day: on the first day, and on the last.
BEGIN_PER_DAY = {
    "takeover": (0.9, 0.7),  # somebody else shops with the account
    "imitation": (1.4, 1.8),  # the customer pays at a terminal that imitates another
    "coached": (0.9, 1.7),  # the customer pays because somebody talks them into it
    "testing": (0.10, 0.35),  # tiny payments to see whether a stolen number works, then a large one
    "skimmed": (1.4, 0.5),  # copies of the cards that were used at one terminal
    "quiet": (0.3, 0.4),  # one ordinary payment with a stolen number
}
TERMINAL_DAYS = 12  # how long a terminal stays bad
BAD_TERMINALS = 2  # at a time, of each kind

# time, customer, terminal, amount in minor units, online, band, scenario
Fraud = tuple[int, int, int, float, bool, int, str]


class Fraudsters:
    """All fraud of so many days."""

    def __init__(self, customers: list[Customer], terminals: list[Terminal], days: int, rng: Random) -> None:
        self._customers, self._terminals, self._days, self._rng = customers, terminals, days, rng
        self._tail = [each for each in terminals if each.number >= len(terminals) // 3]  # not the busiest
        self._bad: dict[str, list[Terminal]] = {}

    def payments(self) -> Iterator[Fraud]:
        for day in range(self._days):
            if day % TERMINAL_DAYS == 0:
                self._bad = {name: self._rng.sample(self._tail, BAD_TERMINALS) for name in ("imitation", "skimmed")}
            for scenario, (first, last) in BEGIN_PER_DAY.items():
                for _ in range(self._count(first + (last - first) * day / self._days)):
                    yield from getattr(self, f"_{scenario}")(day, self._rng.choice(self._customers))

    def _count(self, mean: float) -> int:
        whole = int(mean)
        return whole + (self._rng.random() < mean - whole)

    def _amount(self, customer: Customer, factor: float, spread: float = 0.5) -> float:
        return exp(self._rng.gauss(customer.usual_log, spread)) * factor

    def _at(self, day: int, middle_h: float, spread_h: float) -> int:
        return day * DAY_MIN + int(self._rng.gauss(middle_h, spread_h) * 60) % DAY_MIN

    def _drift(self, day: int) -> float:
        """Return 0 on the first day, rising to 1 on the last."""
        return day / self._days

    def _takeover(self, day: int, customer: Customer) -> Iterator[Fraud]:
        rng, at_min = self._rng, self._at(day, 15 + 8 * self._rng.random(), 5)
        factor = 2.5 - 0.6 * self._drift(day)  # they learn to ask for less
        for _ in range(rng.randrange(1, 5)):
            terminal = rng.choice(self._tail)
            band = rng.choices((0, 1, 2, ELSEWHERE, ABROAD), (22, 12, 14, 26, 26))[0]
            amount = self._amount(customer, factor) * terminal.level
            yield at_min, customer.number, terminal.number, amount, terminal.online, band, "takeover"
            at_min += int(rng.expovariate(1 / 200)) + 2

    def _imitation(self, day: int, customer: Customer) -> Iterator[Fraud]:
        terminal = self._rng.choice(self._bad["imitation"])
        amount = self._amount(customer, 1.4) * terminal.level
        yield self._at(day, customer.awake_h, 3.6), customer.number, terminal.number, amount, True, 0, "imitation"

    def _coached(self, day: int, customer: Customer) -> Iterator[Fraud]:
        rng, at_min = self._rng, self._at(day, 13, 2.5)
        terminal = rng.choice(self._terminals)
        for _ in range(rng.choice((1, 1, 1, 2))):
            amount = self._amount(customer, 1.8 + 1.8 * rng.random() + 0.6 * self._drift(day))
            yield at_min, customer.number, terminal.number, amount, True, 0, "coached"
            at_min += rng.randrange(10, 200)

    def _testing(self, day: int, customer: Customer) -> Iterator[Fraud]:
        rng, at_min = self._rng, self._at(day, 3, 5)
        terminal = rng.choice(self._tail)
        for _ in range(rng.randrange(2, 5)):
            band = rng.choice((0, ELSEWHERE, ABROAD))
            yield at_min, customer.number, terminal.number, rng.uniform(100, 900), True, band, "testing"
            at_min += rng.randrange(1, 15)
        amount = self._amount(customer, 3)
        yield at_min + rng.randrange(5, 600), customer.number, terminal.number, amount, True, band, "testing"

    def _skimmed(self, day: int, customer: Customer) -> Iterator[Fraud]:
        terminal = self._rng.choice(self._bad["skimmed"])
        amount, band = self._amount(customer, 1.2) * terminal.level, distance_band(customer, terminal)
        at_min = self._at(day, customer.awake_h, 3.6)
        yield at_min, customer.number, terminal.number, amount, terminal.online, band, "skimmed"

    def _quiet(self, day: int, customer: Customer) -> Iterator[Fraud]:
        terminal = self._terminals[self._rng.choice(customer.favourites)]
        amount, band = self._amount(customer, 1.0) * terminal.level, distance_band(customer, terminal)
        yield self._at(day, 14, 5), customer.number, terminal.number, amount, terminal.online, band, "quiet"
