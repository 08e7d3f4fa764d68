"""What is known of a payment at its own time: counts and sums over 1, 7 and 28 days, updated payment by payment.

Nothing here looks ahead: a payment is described before it is added, and a fraud counts from the time it became known.
"""

from __future__ import annotations

from collections import defaultdict, deque
from heapq import heappop, heappush

from .customers import DAY_MIN
from .payments import Payment

WINDOWS_DAYS = (1, 7, 28)
IDLE_MIN_MAX = 28 * DAY_MIN  # also for a customer who has never paid
PERCENT_MAX = 10_000


class Window:
    """Count and sum of the entries in the last `minutes` minutes."""

    __slots__ = ("_entries", "_minutes", "count", "total")

    def __init__(self, minutes: int) -> None:
        self._minutes, self._entries = minutes, deque[tuple[int, int]]()
        self.count = self.total = 0

    def add(self, at_min: int, amount: int) -> None:
        self._entries.append((at_min, amount))
        self.count += 1
        self.total += amount

    def forget_before(self, now_min: int) -> None:
        """Remove the entries that are as old as the window is long, or older."""
        entries, oldest = self._entries, now_min - self._minutes
        while entries and entries[0][0] <= oldest:
            self.total -= entries.popleft()[1]
            self.count -= 1


def _idle(now_min: int, last_min: int | None) -> int:
    return IDLE_MIN_MAX if last_min is None else min(IDLE_MIN_MAX, now_min - last_min)


def _windows() -> tuple[Window, ...]:
    return tuple(Window(days * DAY_MIN) for days in WINDOWS_DAYS)


class History:
    """All payments up to now, from which the next one is described. Payments are added in the order of their time."""

    def __init__(self) -> None:
        self._paid = defaultdict[int, tuple[Window, ...]](_windows)  # by customer
        self._taken = defaultdict[int, tuple[Window, ...]](_windows)  # by terminal
        self._reported = defaultdict[int, tuple[Window, ...]](_windows)  # frauds at a terminal, when they became known
        self._last_min: dict[int, int] = {}
        self._last_here_min: dict[tuple[int, int], int] = {}  # of a customer at a terminal
        self._unknown: list[tuple[int, int]] = []  # a heap: when a fraud becomes known, and its terminal

    def fields(self, payment: Payment) -> dict[str, int]:
        """Return the features of a payment that is not added yet: whole numbers, by the contract's names."""
        now = payment.at_min
        self._learn(now)
        fields = {
            "payment.amount_minor": payment.amount_minor,
            "payment.hour": now % DAY_MIN // 60,
            "payment.online": payment.online,
            "payment.distance_band": payment.band,
            "customer.idle_min": _idle(now, self._last_min.get(payment.customer)),
            "customer.idle_here_min": _idle(now, self._last_here_min.get((payment.customer, payment.terminal))),
        }
        for days, window in zip(WINDOWS_DAYS, self._paid[payment.customer], strict=True):
            window.forget_before(now)
            fields[f"customer.count_{days}d"] = window.count
            fields[f"customer.sum_{days}d_minor"] = window.total
            fields[f"customer.mean_{days}d_minor"] = window.total // window.count if window.count else 0
        mean = fields["customer.mean_28d_minor"]
        fields["payment.of_mean_pct"] = min(PERCENT_MAX, payment.amount_minor * 100 // mean) if mean else 0
        taken, reported = self._taken[payment.terminal], self._reported[payment.terminal]
        for days, window, known in zip(WINDOWS_DAYS, taken, reported, strict=True):
            window.forget_before(now)
            known.forget_before(now)
            fields[f"terminal.count_{days}d"] = window.count
            fields[f"terminal.fraud_{days}d_permille"] = min(1_000, known.count * 1_000 // max(1, window.count))
        return fields

    def add(self, payment: Payment) -> None:
        """Add a payment. If it is fraud, that counts from when it becomes known."""
        for window in self._paid[payment.customer]:
            window.add(payment.at_min, payment.amount_minor)
        for window in self._taken[payment.terminal]:
            window.add(payment.at_min, payment.amount_minor)
        self._last_min[payment.customer] = self._last_here_min[payment.customer, payment.terminal] = payment.at_min
        if payment.known_at_min is not None:
            heappush(self._unknown, (payment.known_at_min, payment.terminal))

    def _learn(self, now_min: int) -> None:
        while self._unknown and self._unknown[0][0] <= now_min:
            known_at_min, terminal = heappop(self._unknown)
            for window in self._reported[terminal]:
                window.add(known_at_min, 1)
