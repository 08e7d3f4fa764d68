"""Admission control: refuse a decision that could not be made within its deadline, before anything is written.

A decision is refused where the work before it would take too long (number of decisions, times the time of one), or where
decisions at this concurrency have lately been late: on few cores one more can make all of them miss their deadlines.
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

LOOKED_AT = 32  # the last decisions of a gate, whose median time is expected of the next
SERVICE_MS_FIRST = 50.0  # the expected time of a gate's first decision
SLACK = 2.0  # the time left must be so many times the expected time: half of all decisions take longer than the median
OUTSIDE = 0.2  # share of the deadline for what no stage measures: hand-overs between threads, and sending the answer
RECENT, RECENT_S = 512, 10.0  # decisions kept per gate and concurrency, and for how many seconds they count
LATE_MAX = 0.01  # share of admitted decisions that may be late
LOOKED_AT_MAX = 16  # requests looked at at once; one more would only wait for a thread
CROWDED_S = (
    1.0  # `Retry-After` of a request that is refused because too many are looked at, or wait for another process
)


class Latencies:
    """Recent decision times of one gate (ms) by concurrency: the most decisions in hand meanwhile, itself included."""

    def __init__(self, parallel: int) -> None:
        self._took: list[deque[tuple[float, float]]] = [deque(maxlen=RECENT) for _ in range(parallel)]
        self._ordered: list[list[float]] = [[] for _ in range(parallel)]
        self._until_s = [-math.inf] * parallel

    def add(self, n: int, ms: float, now_s: float) -> None:
        """Record that a decision at concurrency `n` took `ms`."""
        took = self._took[n - 1]
        took.append((now_s, ms))
        while took[0][0] + RECENT_S < now_s:
            took.popleft()
        self._ordered[n - 1], self._until_s[n - 1] = sorted(ms for _, ms in took), now_s + RECENT_S

    def try_out(self, n: int, now_s: float) -> None:
        """Admit one decision as a trial of concurrency `n`: until it has ended, that concurrency counts as too slow."""
        self._took[n - 1].clear()
        self._ordered[n - 1], self._until_s[n - 1] = [math.inf, math.inf], now_s + RECENT_S

    def in_time(self, n: int, left_ms: float, wait_ms: float, now_s: float) -> bool | None:
        """Return whether at most a share of LATE_MAX would be late at concurrency `n` after `wait_ms`, not counting the share
        that is late at concurrency 1. None: not known.
        """
        known = {at + 1: ordered for at, ordered in enumerate(self._ordered) if self._until_s[at] >= now_s}
        most = LATE_MAX + (_late(known[1], left_ms) if 1 in known else 0.0)
        late = {at: _late(ordered, left_ms - wait_ms) for at, ordered in known.items()}
        if any(share > most for at, share in late.items() if at <= n):
            return False
        return any(share <= most for at, share in late.items() if at >= n) or None


def _late(ordered_ms: Sequence[float], left_ms: float) -> float:
    """Return the share of times above `left_ms`. One late decision is not counted: it may be an accident."""
    return max(0, len(ordered_ms) - bisect_right(ordered_ms, left_ms) - 1) / len(ordered_ms)


class Admission:
    """Counts the decisions that one process has in hand (waiting or under way), by gate, and their times. Thread-safe.

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
        self._changes: deque[tuple[float, int]] = deque([(-math.inf, 0)], 1_024)  # (time in s, decisions in hand since)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Count a request whose event is being looked up: it may be known already. Only for the event loop."""
        self.looked_at += 1
        try:
            yield
        finally:
            self.looked_at -= 1

    @contextmanager
    def waiting_elsewhere(self) -> Iterator[None]:
        """Count a request whose event another process is deciding. Only for the event loop. Raises Problem: QUEUE_FULL."""
        if self.elsewhere >= self.queue_max:
            detail = f"another process decides the event, and {self.elsewhere} requests, the limit, wait for such decisions already"
            raise Problem("QUEUE_FULL", detail, retry_after_s=CROWDED_S)
        self.elsewhere += 1
        try:
            yield
        finally:
            self.elsewhere -= 1

    def crowded(self) -> Problem | None:
        """Return the problem for one more request, where as many as may be are being looked up; else None."""
        detail = f"{LOOKED_AT_MAX} events, the limit, are being looked up in the record already: nothing was written"
        return Problem("OVERLOADED", detail, retry_after_s=CROWDED_S) if self.looked_at >= LOOKED_AT_MAX else None

    @property
    def in_hand(self) -> int:
        """The number of decisions that wait or are under way."""
        return self._in_hand.total()

    @property
    def calm(self) -> bool:
        """Whether nothing is in hand or looked up, and decisions are admitted at all: then no request is refused."""
        return not self._in_hand.total() and not self.looked_at and self.queue_max > 0

    @property
    def idle(self) -> bool:
        """Whether one more decision would start at once and leave a thread free: it may have to wait for another process."""
        return self._in_hand.total() < min(max(1, self.parallel - 1), self.queue_max)

    def service_ms(self, gate: str) -> float:
        """Return the expected time of a decision of a gate, from its turn, in milliseconds."""
        return self._service_ms.get(gate, SERVICE_MS_FIRST)

    def expected_ms(self, gate: str) -> float:
        """Return the expected time of one more decision in milliseconds, with the decisions in hand before it."""
        before_ms = sum(count * self.service_ms(each) for each, count in self._in_hand.items())
        return max(self.service_ms(gate), (before_ms + self.service_ms(gate)) / self.parallel)

    def refusal(self, gate: str, left_ms: float) -> Problem | None:
        """Return the problem with which `enter` would refuse a decision now; None: it would admit it."""
        with self._lock:
            return self._refusal(gate, left_ms)

    def _refusal(self, gate: str, left_ms: float) -> Problem | None:
        before = self._in_hand.total()
        if before == 0 < self.queue_max:  # the usual case, asked several times a request
            return None
        expected_ms = self.expected_ms(gate)
        if before >= self.queue_max:
            detail = f"{self.queue_max} decisions, the limit, wait or run in this process already: nothing was written"
            return Problem("QUEUE_FULL", detail, retry_after_s=expected_ms / 1000)
        late_ms = expected_ms - left_ms / SLACK
        if late_ms > 0 or self._in_time(gate, left_ms) is False:
            return Problem("OVERLOADED", retry_after_s=(late_ms if late_ms > 0 else expected_ms) / 1000)
        return None

    def enter(self, gate: str, left_ms: float) -> Callable[[], None]:
        """Admit a decision that has `left_ms`; return the function that gives its place back.

        Raises Problem: QUEUE_FULL, or OVERLOADED where the decision may be late. Where nothing is in hand a decision is always
        admitted: otherwise an expected time that is too long would never be corrected.
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
        """Record how long a decision took from its turn to its end, also where it was cut short."""
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
