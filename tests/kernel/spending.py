"""A world with one spend limit of 100.00, in which money is asked for at one moment after another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

from sds.kernel.contract.schema import Contract
from sds.kernel.flow.states import Answer
from tests.kernel.durable import CONTRACT, World, contract, escalate, refund, whole

MAX_MINOR = 10_000
_SPEND = CONTRACT[CONTRACT.index("spend:\n") : CONTRACT.index("retry:")]


def limited(limit: str) -> Contract:
    """Return the test contract with one limit, of 100.00, that is called `till`."""
    return contract((_SPEND, f"spend:\n  - {{name: till, max_minor: {MAX_MINOR}, {limit}}}\n"))


class Till(World):
    """Each payment is about a ticket of its own, of a customer of its own unless told otherwise."""

    def __init__(self, folder: Path, limit: str) -> None:
        super().__init__(folder, terms=limited(limit))
        self._asked = itertools.count(1)

    def at(self, when: str, zone: str = "UTC", *, fold: int = 0) -> Till:
        """Set the clock to a local time; `fold` 1: the second of the two that a zone's clocks show."""
        local = datetime.fromisoformat(when).replace(tzinfo=ZoneInfo(zone), fold=fold)
        self.clock.now_ms = round(local.timestamp() * 1000)
        return self

    def _ticket(self, customer: str) -> tuple[str, str]:
        number = next(self._asked)
        self.tickets.put(f"K{number}", customer=customer or f"customer {number}", compensations_left=0)
        return f"E{number}", f"K{number}"

    def pay(self, amount: str, customer: str = "") -> Answer:
        return self.decide(refund(amount), *self._ticket(customer))

    def hand_over(self) -> Answer:
        """Have a case escalated: an entry in the ledger, and nothing spent."""
        return self.decide(escalate, *self._ticket(""))

    def left(self, customer: str = "") -> int:
        """Return what may be spent now, in minor units."""
        kind = self.kernel.preview(self.event(*self._ticket(customer))).envelope.kind("REFUND_TICKET")
        return kind.params[0][1].hi if kind else 0


@contextmanager
def till(folder: Path, limit: str) -> Iterator[Till]:
    with whole(Till(folder, limit)) as made:
        yield made
