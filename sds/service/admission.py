"""Whether a decision can be had in the time that is left: looked at before anything is written.

Two questions. What waits, times what a decision takes: does it leave time? And how long do decisions take that share the machine
with so many: on few cores one more may bring nothing, and cost all of them theirs.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

from sds.service.problems import Problem

LOOKED_AT = 32  # the last decisions of a gate whose median is what the next is taken to last
SERVICE_MS_FIRST = 50.0  # until one has been seen
SLACK = 2.0  # of the time there is, over what is expected: half of all decisions take longer than the median
OUTSIDE = 0.2  # of the time there is, for what no stage of a decision counts: hand-overs between threads, and the answer's way
RECENT, RECENT_S = 512, 10.0  # decisions of a gate at each concurrency, and for how long they say something of the next
LATE_MAX = 0.01  # of what is let in
LOOKED_AT_MAX = 16  # requests at once; one more would only wait
CROWDED_S = 1.0


class Latencies:
    """How long decisions of one gate lately took, in milliseconds, by how many at most were in hand meanwhile, themselves included."""

    def __init__(self, parallel: int) -> None:
        self._took: list[deque[tuple[float, float]]] = [deque(maxlen=RECENT) for _ in range(parallel)]
        self._ordered: list[list[float]] = [[] for _ in range(parallel)]
        self._until_s = [-math.inf] * parallel

    def add(self, n: int, ms: float, now_s: float) -> None:
        """Learn of a decision with so many in hand."""
        took = self._took[n - 1]
        took.append((now_s, ms))
        while took[0][0] + RECENT_S < now_s:
            took.popleft()
        self._ordered[n - 1], self._until_s[n - 1] = sorted(ms for _, ms in took), now_s + RECENT_S

    def try_out(self, n: int, now_s: float) -> None:
        """Note that one is let in to learn how long it takes: until it has ended, nobody else is."""
        self._took[n - 1].clear()
        self._ordered[n - 1], self._until_s[n - 1] = [math.inf, math.inf], now_s + RECENT_S

    def in_time(self, n: int, left_ms: float, wait_ms: float, now_s: float) -> bool | None:
        """Return whether with so many in hand, after a wait, no more end late than LATE_MAX beside those that do alone, which
        wait for nobody; None: nobody knows.
        """
        known = {at + 1: ordered for at, ordered in enumerate(self._ordered) if self._until_s[at] >= now_s}
        most = LATE_MAX + (_late(known[1], left_ms) if 1 in known else 0.0)
        late = {at: _late(ordered, left_ms - wait_ms) for at, ordered in known.items()}
        if any(share > most for at, share in late.items() if at <= n):
            return False
        return any(share <= most for at, share in late.items() if at >= n) or None


def _late(ordered_ms: Sequence[float], left_ms: float) -> float:
    """Return which share ended late; one alone is an accident."""
    return max(0, len(ordered_ms) - bisect_right(ordered_ms, left_ms) - 1) / len(ordered_ms)


class Admission:
    """Counts what one process has in hand, by gate, and how long decisions take there. Safe in several threads.

    `parallel`: how many are decided at once; `queue_max`: how many may be in hand. `now_s`: a monotonic clock.
    """

    def __init__(self, *, parallel: int, queue_max: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self.parallel, self.queue_max, self._now_s = parallel, queue_max, now_s
        self.looked_at = self.elsewhere = 0
        self._lock = threading.Lock()
        self._in_hand = Counter[str]()
        self._took_ms = defaultdict[str, deque[float]](lambda: deque(maxlen=LOOKED_AT))
        self._service_ms = dict[str, float]()
        self._latencies = defaultdict[str, Latencies](lambda: Latencies(parallel))
        self._changes: deque[tuple[float, int]] = deque([(-math.inf, 0)], 1_024)  # of what is in hand, and when

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Count a request that is looked at: nobody knows yet whether it is to be decided. Used on the event loop alone."""
        self.looked_at += 1
        try:
            yield
        finally:
            self.looked_at -= 1

    @contextmanager
    def waiting_elsewhere(self) -> Iterator[None]:
        """Count a request whose event another process is deciding. Used on the event loop alone. Raises Problem: too many are."""
        if self.elsewhere >= self.queue_max:
            raise Problem("QUEUE_FULL", retry_after_s=CROWDED_S)
        self.elsewhere += 1
        try:
            yield
        finally:
            self.elsewhere -= 1

    def crowded(self) -> Problem | None:
        """Return how one more is refused that is to be looked at, however much room there seems to be for it; None: it is not."""
        return Problem("OVERLOADED", retry_after_s=CROWDED_S) if self.looked_at >= LOOKED_AT_MAX else None

    @property
    def in_hand(self) -> int:
        """How many decisions wait or are under way."""
        return self._in_hand.total()

    @property
    def calm(self) -> bool:
        """Whether nothing is in hand or looked at, and there is room: then nobody is refused."""
        return not self._in_hand.total() and not self.looked_at and self.queue_max > 0

    @property
    def idle(self) -> bool:
        """Whether one more decision would have its turn at once, and leave a thread to another: it may have to wait for another
        process.
        """
        return self._in_hand.total() < min(max(1, self.parallel - 1), self.queue_max)

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
        before = self._in_hand.total()
        if before == 0 < self.queue_max:  # in a calm service each request asks this several times
            return None
        expected_ms = self.expected_ms(gate)
        if before >= self.queue_max:
            return Problem("QUEUE_FULL", retry_after_s=expected_ms / 1000)
        late_ms = expected_ms - left_ms / SLACK
        if late_ms > 0 or self._in_time(gate, left_ms) is False:
            return Problem("OVERLOADED", retry_after_s=(late_ms if late_ms > 0 else expected_ms) / 1000)
        return None

    def enter(self, gate: str, left_ms: float) -> Callable[[], None]:
        """Take a place; return what gives it back.

        Raises Problem where the queue is full, or a decision would be at risk not to be there within `left_ms`. Where nothing is in
        hand one is let in all the same: who expects too much would never learn better.
        """
        with self._lock:
            if (problem := self._refusal(gate, left_ms)) is not None:
                raise problem
            n = self._in_hand.total() + 1
            if n > 1 and SLACK * n * self.service_ms(gate) > left_ms and self._in_time(gate, left_ms) is None:
                self._latencies[gate].try_out(min(n, self.parallel), self._now_s())
            self._change(gate, 1)
        return partial(self._leave, gate)

    def _leave(self, gate: str) -> None:
        with self._lock:
            self._change(gate, -1)

    def _change(self, gate: str, by: int) -> None:
        self._in_hand[gate] += by
        self._changes.append((self._now_s(), self._in_hand.total()))

    def _in_time(self, gate: str, left_ms: float) -> bool | None:
        n = self._in_hand.total() + 1
        wait_ms = max(0, n - self.parallel) * self.service_ms(gate) / self.parallel
        return self._latencies[gate].in_time(min(n, self.parallel), (1 - OUTSIDE) * left_ms, wait_ms, self._now_s())

    def took(self, gate: str, ms: float) -> None:
        """Learn how long a decision took from when it had its turn, also one that was cut short."""
        with self._lock:
            self._took_ms[gate].append(ms)
            self._service_ms[gate] = median(self._took_ms[gate])
            now_s = self._now_s()
            self._latencies[gate].add(min(self.parallel, self._peak(now_s - ms / 1000)), ms, now_s)

    def _peak(self, since_s: float) -> int:
        peak = 1
        for at_s, in_hand in reversed(self._changes):
            peak = max(peak, in_hand)
            if at_s <= since_s:
                break
        return peak
