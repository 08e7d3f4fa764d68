"""Whether a decision can be had in the time that is left: looked at before anything is written."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

from sds.service.problems import Problem

LOOKED_AT = 32  # the last decisions of a gate whose median is what the next is taken to last
SERVICE_MS_FIRST = 50.0  # until one has been seen
SLACK = 2.0  # of the time there is, over what is expected: half of all decisions take longer than the median


class Admission:
    """Counts what one process has in hand, by gate, and how long decisions take there. Safe in several threads.

    `parallel`: how many are decided at once; `queue_max`: how many may be in hand.
    """

    def __init__(self, *, parallel: int, queue_max: int) -> None:
        self.parallel, self.queue_max = parallel, queue_max
        self.looked_at = 0
        self._lock = threading.Lock()
        self._in_hand = Counter[str]()
        self._took_ms = defaultdict[str, deque[float]](lambda: deque(maxlen=LOOKED_AT))
        self._service_ms = dict[str, float]()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Count a request that is looked at: nobody knows yet whether it is to be decided. Used on the event loop alone."""
        self.looked_at += 1
        try:
            yield
        finally:
            self.looked_at -= 1

    @property
    def in_hand(self) -> int:
        """How many decisions wait or are under way."""
        return self._in_hand.total()

    @property
    def idle(self) -> bool:
        """Whether one more decision would have its turn at once."""
        return self._in_hand.total() < min(self.parallel, self.queue_max)

    def service_ms(self, gate: str) -> float:
        """Return how long a decision of a gate takes once it has its turn."""
        return self._service_ms.get(gate, SERVICE_MS_FIRST)

    def expected_ms(self, gate: str) -> float:
        """Return how long one more decision would take: what is in hand before it, and itself."""
        before_ms = sum(count * self.service_ms(each) for each, count in self._in_hand.items())
        return max(self.service_ms(gate), (before_ms + self.service_ms(gate)) / self.parallel)

    def refusal(self, gate: str, left_ms: float) -> Problem | None:
        """Return how `enter` would refuse a decision now; None: it would not."""
        with self._lock:
            return self._refusal(gate, left_ms)

    def _refusal(self, gate: str, left_ms: float) -> Problem | None:
        expected_ms, before = self.expected_ms(gate), self._in_hand.total()
        if before >= self.queue_max:
            return Problem("QUEUE_FULL", retry_after_s=expected_ms / 1000)
        if before and SLACK * expected_ms > left_ms:
            return Problem("OVERLOADED", retry_after_s=(expected_ms - left_ms / SLACK) / 1000)
        return None

    def enter(self, gate: str, left_ms: float) -> Callable[[], None]:
        """Take a place; return what gives it back.

        Raises Problem where the queue is full, or a decision would be at risk not to be there within `left_ms`. Where nothing is in
        hand one is let in all the same: who expects too much would never learn better.
        """
        with self._lock:
            if (problem := self._refusal(gate, left_ms)) is not None:
                raise problem
            self._in_hand[gate] += 1
        return partial(self._leave, gate)

    def _leave(self, gate: str) -> None:
        with self._lock:
            self._in_hand[gate] -= 1

    def took(self, gate: str, ms: float) -> None:
        """Learn how long a decision took from when it had its turn, also one that was cut short."""
        with self._lock:
            self._took_ms[gate].append(ms)
            self._service_ms[gate] = median(self._took_ms[gate])
