"""Waiting for a turn with an engine. Who is late for want of one tells of the load, nothing of the engine's health."""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from sds.decoding.errors import DEADLINE_EXCEEDED
from sds.kernel.errors import ModelError

T = TypeVar("T")


class QueueTimeoutError(ModelError):
    """There was no turn in time, or so late a one that most of the time had been waited away."""

    reason_code = DEADLINE_EXCEEDED


class FairPool(Generic[T]):
    """Things that are lent, each to as many at once as times it is named, first come first served: of a lock, whoever comes
    back at once can have it again before those who wait.
    """

    def __init__(self, *things: T) -> None:
        self._free, self._lock = list(things), threading.Lock()
        self._waiting: deque[queue.SimpleQueue[T]] = deque()

    @property
    def all_lent(self) -> bool:
        return not self._free

    @contextmanager
    def lent(self, wait_s: float, late: str) -> Iterator[T]:
        """Lend that of which most are free, of equals the one that came back last: its cache is warm. Raises NoTurnError, `late`,
        when none is free in time.
        """
        thing = self._take(min(max(wait_s, 0.0), threading.TIMEOUT_MAX), late)
        try:
            yield thing
        finally:
            self._give_back(thing)

    def _take(self, wait_s: float, late: str) -> T:
        with self._lock:
            if self._free:  # then nobody waits
                free = Counter(self._free)
                place = max(range(len(self._free)), key=lambda place: (free[self._free[place]], place))
                return self._free.pop(place)
            self._waiting.append(mine := queue.SimpleQueue[T]())
        try:
            return mine.get(timeout=wait_s)
        except BaseException as error:
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
            if not mine.empty():  # it came at the last moment
                if isinstance(error, queue.Empty):
                    return mine.get()
                self._give_back(mine.get())
            if isinstance(error, queue.Empty):
                raise QueueTimeoutError(late) from None
            raise

    def _give_back(self, thing: T) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().put(thing)
            else:
                self._free.append(thing)


@contextmanager
def after_waiting(asked_ms: float, turn_ms: float, deadline_ms: float) -> Iterator[None]:
    """Tell what is late inside as NoTurnError where the wait from `asked_ms` to `turn_ms` took most of the time."""
    try:
        yield
    except ModelError as error:
        if error.reason_code == DEADLINE_EXCEEDED and waited_away(asked_ms, turn_ms, deadline_ms):
            raise QueueTimeoutError(str(error), hint=error.hint) from error
        raise


def waited_away(asked_ms: float, turn_ms: float, deadline_ms: float) -> bool:
    """Return whether less was left at the turn than had been waited for it."""
    return turn_ms - asked_ms > max(0, deadline_ms - turn_ms)
