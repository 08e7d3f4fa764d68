"""Whether a decision can be had in the time that is left: looked at before anything is written."""

from __future__ import annotations

from sds.service.problems import Problem

SERVICE_MS_FIRST = 50.0  # what a decision is taken to last until one has been seen
WEIGHT = 0.1  # of the latest in the moving average


class Admission:
    """Counts what one process has in hand, and how long a decision takes there. Used on the event loop alone.

    `parallel`: how many are decided at once; `queue_max`: how many may be in hand.
    """

    def __init__(self, *, parallel: int, queue_max: int) -> None:
        self.parallel, self.queue_max = parallel, queue_max
        self.in_hand = 0
        self.service_ms = SERVICE_MS_FIRST

    def expected_ms(self) -> float:
        """Return how long one more decision would take: what waits before it, and itself."""
        return self.service_ms * max(1.0, (self.in_hand + 1) / self.parallel)

    def check(self, left_ms: float) -> None:
        """Raise Problem where the queue is full, or a decision would not be there within `left_ms`."""
        expected_ms = self.expected_ms()
        if self.in_hand >= self.queue_max:
            raise Problem("QUEUE_FULL", retry_after_s=expected_ms / 1000)
        if expected_ms > left_ms:
            raise Problem("OVERLOADED", retry_after_s=(expected_ms - left_ms) / 1000)

    def enter(self) -> int:
        """Take a place; return how many were before it."""
        before, self.in_hand = self.in_hand, self.in_hand + 1
        return before

    def leave(self, before: int, took_ms: float | None) -> None:
        """Give a place back. `took_ms`: from `enter` until it was decided; None: nothing was."""
        self.in_hand -= 1
        if took_ms is not None:
            alone_ms = took_ms / max(1.0, (before + 1) / self.parallel)
            self.service_ms += WEIGHT * (alone_ms - self.service_ms)
