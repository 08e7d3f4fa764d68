"""The bank's knowledge of an account at the time of a payment: whether it was active, and the limit of one payment."""

from __future__ import annotations

from heapq import heappop, heappush

from .customers import DAY_MIN, Customer
from .payments import Payment

STATUSES = ("active", "compromised", "closed")
STOLEN = frozenset({"takeover", "testing", "skimmed", "quiet"})  # frauds after which the card is replaced
EXCHANGED_AFTER_MIN = 2 * DAY_MIN  # after a theft becomes known, until the card is replaced


class Accounts:
    """All accounts up to now. Payments are added in the order of their time."""

    def __init__(self, customers: list[Customer]) -> None:
        self._customers = customers
        self._unknown: list[tuple[int, int]] = []  # when a theft becomes known, and its customer
        self._known_min: dict[int, int] = {}

    def fields(self, payment: Payment) -> dict[str, int | str]:
        customer = self._customers[payment.customer]
        return {
            "account.id": account_id(payment.customer),
            "account.status": self._status(customer, payment.at_min),
            "account.limit_minor": customer.limit_minor,
        }

    def add(self, payment: Payment) -> None:
        if payment.known_at_min is not None and payment.scenario in STOLEN:
            heappush(self._unknown, (payment.known_at_min, payment.customer))

    def _status(self, customer: Customer, now_min: int) -> str:
        while self._unknown and self._unknown[0][0] <= now_min:
            known_min, number = heappop(self._unknown)
            self._known_min[number] = known_min
        if customer.closed_day is not None and now_min >= customer.closed_day * DAY_MIN:
            return "closed"
        known = self._known_min.get(customer.number)
        return "active" if known is None or now_min - known >= EXCHANGED_AFTER_MIN else "compromised"


def account_id(customer: int) -> str:
    return f"ACC-{customer:05d}"
