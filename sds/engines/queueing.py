"""Waiting in line, first come first served. Who is late for want of a place tells of the load, not of an engine's health."""

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
    """No place was free in time, or only after more than half of the time there was."""

    reason_code = DEADLINE_EXCEEDED


class FairPool(Generic[T]):
    """Things of which each is held by as many at once as times it is named, first come first served.

    Of a plain lock, whoever comes back at once can have it again before those who wait.
    """

    def __init__(self, *things: T) -> None:
        self._free, self._lock = list(things), threading.Lock()
        self._waiting: deque[queue.SimpleQueue[T]] = deque()

    @contextmanager
    def acquired(self, wait_s: float, late: str) -> Iterator[T]:
        """Hold that of which most are free, of equals the one released last: its cache is warm.

        Raises QueueTimeoutError, `late`, when none is free in time.
        """
        thing = self._acquire(min(max(wait_s, 0.0), threading.TIMEOUT_MAX), late)
        try:
            yield thing
        finally:
            self._release(thing)

    def _acquire(self, wait_s: float, late: str) -> T:
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
                self._release(mine.get())
            if isinstance(error, queue.Empty):
                raise QueueTimeoutError(late) from None
            raise

    def _release(self, thing: T) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().put(thing)
            else:
                self._free.append(thing)


@contextmanager
def after_waiting(asked_ms: float, admitted_ms: float, deadline_ms: float) -> Iterator[None]:
    """Raise what is late inside as QueueTimeoutError where the wait from `asked_ms` to `admitted_ms` took most of the time."""
    try:
        yield
    except ModelError as error:
        if error.reason_code == DEADLINE_EXCEEDED and waited_away(asked_ms, admitted_ms, deadline_ms):
            raise QueueTimeoutError(str(error), hint=error.hint) from error
        raise


def waited_away(asked_ms: float, admitted_ms: float, deadline_ms: float) -> bool:
    """Return whether less time was left at admission than had been waited for it."""
    return admitted_ms - asked_ms > max(0, deadline_ms - admitted_ms)
