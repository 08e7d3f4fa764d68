"""Waiting in line, first come first served. A timeout while waiting is a sign of load, not of a failing engine.

A decision that waits can be stopped from another thread (`Cancellation`). A commit under way is never interrupted: it
goes on to where the decision waits next, or to its end, so nothing stops between a reservation and its order.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from sds.decoding.errors import DEADLINE_EXCEEDED
from sds.kernel.errors import ModelError, SdsError, WorldError
from sds.kernel.flow.states import Answer
from sds.models.protocol import ENDINGS

QUEUE_FULL = "QUEUE_FULL"
T = TypeVar("T")


class QueueTimeoutError(ModelError):
    """Nothing became free in time, or only after more than half of the time was gone."""

    reason_code = DEADLINE_EXCEEDED


class FairPool(Generic[T]):
    """A pool of things, first come first served. A thing is held by as many callers at once as times it is listed.

    With a plain lock, a caller that returns at once could overtake those who wait.
    """

    def __init__(self, *things: T) -> None:
        self._free, self._lock = list(things), threading.Lock()
        self._waiting: deque[queue.SimpleQueue[T]] = deque()

    @contextmanager
    def acquired(self, wait_s: float, late: str) -> Iterator[T]:
        """Hold the thing with most free entries; of equals the one released last, because its cache is warm.

        Raises QueueTimeoutError with the message `late` when none becomes free in time.
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
            if not mine.empty():  # given in the moment of the timeout
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


class KeyLocks:
    """A fair lock for each key: decisions that draw on one account are made one at a time, in order.

    It covers the callers in this process. A conflict with another process shows when the resource is reserved.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[FairPool[None], list[None]]] = {}  # by key: its lock, an entry per caller

    @contextmanager
    def hold(self, key: str, wait_s: float) -> Iterator[None]:
        """Hold the key for a block. Raises QueueTimeoutError when it is not free within `wait_s` seconds."""
        with self._guard:
            lock, asking = self._locks.setdefault(key, (FairPool(None), []))
            asking.append(None)
        try:
            with lock.acquired(wait_s, "another decision on the same key did not end in time"):
                yield
        finally:
            with self._guard:
                asking.pop()
                if not asking:
                    del self._locks[key]


@contextmanager
def after_waiting(asked_ms: float, admitted_ms: float, deadline_ms: float) -> Iterator[None]:
    """Turn a missed deadline in the block into QueueTimeoutError where the wait for admission took most of the time."""
    try:
        yield
    except ModelError as error:
        if error.reason_code == DEADLINE_EXCEEDED and waited_away(asked_ms, admitted_ms, deadline_ms):
            raise QueueTimeoutError(str(error), hint=error.hint) from error
        raise


def waited_away(asked_ms: float, admitted_ms: float, deadline_ms: float) -> bool:
    """Return whether the wait for admission was longer than the time left after it."""
    return admitted_ms - asked_ms > max(0, deadline_ms - admitted_ms)


@dataclass(frozen=True, slots=True)
class StopCause:
    """Why a decision is stopped: a reason code, and a message of one line."""

    code: str
    message: str

    def error(self) -> WorldError:
        """Return the error for a decision of which nothing was recorded; its event may be sent again."""
        return WorldError(self.message, reason_code=self.code, retryable=True)


CANCELLED = StopCause("CANCELLED", "the decision was cancelled")
DRAINING = StopCause("DRAINING", "the gate is closing and accepts no new events")

End = Callable[[StopCause], Answer]


class StoppedError(Exception):
    """The decision was stopped. `answer`: how its flow ended; None where it had none."""

    def __init__(self, cause: StopCause, answer: Answer | None) -> None:
        super().__init__(cause.message)
        self.cause, self.answer = cause, answer


class Cancellation:
    """Stops one decision. Shared by the thread that decides and those that may stop it. The first cause counts."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._cause: StopCause | None = None
        self._end: End | None = None  # ends the flow that is open while it waits
        self._waits, self._commits = False, False
        self.stopped: StoppedError | None = None  # once set, the deciding thread no longer touches the record

    @property
    def asked(self) -> bool:
        """Whether the decision is to stop: nothing new is begun for it."""
        return self._cause is not None

    def stop(self, cause: StopCause) -> bool:
        """Ask for the end. Return whether nothing will be committed; False: a proposal may be committed already."""
        with self._lock:
            self._cause = self._cause or cause
            if self._waits:
                self._stop(self._end)
            return self.stopped is not None or not self._commits

    @contextmanager
    def waiting(self, end: End | None = None, *, commits: bool = False) -> Iterator[None]:
        """Wait in a block in which the decision may be stopped; `end` then ends its open flow. Raises StoppedError.

        `commits`: what the block returns is committed next.
        """
        with self._lock:
            if self._cause is not None:
                self._stop(end)
            self._refuse()
            self._waits, self._end, self._commits = True, end, False
        try:
            yield
        except ENDINGS:  # the program is interrupted: the flow stays open until its lease ends
            self._waits = False
            raise
        except BaseException:
            self._leave(commits)
            raise
        else:
            self._leave(commits)

    def _leave(self, commits: bool) -> None:
        with self._lock:
            self._refuse()
            self._waits, self._end, self._commits = False, None, commits

    def _refuse(self) -> None:
        if self.stopped is not None:
            raise self.stopped

    def _stop(self, end: End | None) -> None:
        if self.stopped is not None or self._cause is None:
            return
        answer: Answer | None = None
        with suppress(SdsError):  # the store refuses, or the flow was ended elsewhere: there is no answer
            answer = end(self._cause) if end is not None else None
        self.stopped = StoppedError(self._cause, answer)
