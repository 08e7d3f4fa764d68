"""Waiting in line, first come first served. Who is late for want of a place tells of the load, not of an engine's health.

Who waits can be stopped from another thread (`Cancellation`). What is in the kernel's hands goes on to where it waits next,
or to its end: nothing is cut off between a reservation and its order.
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


class KeyLocks:
    """A fair lock for each key: of decisions that draw on one account only one is made at a time, in order.

    Among the callers in this process; what another process holds shows when it is reserved.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[FairPool[None], list[None]]] = {}  # by key, with an entry for each who asks

    @contextmanager
    def hold(self, key: str, wait_s: float) -> Iterator[None]:
        """Hold the key for a block. Raises QueueTimeoutError when it does not become free within `wait_s` seconds."""
        with self._guard:
            lock, asking = self._locks.setdefault(key, (FairPool(None), []))
            asking.append(None)
        try:
            with lock.acquired(wait_s, "another decision on the same key has not ended in time"):
                yield
        finally:
            with self._guard:
                asking.pop()
                if not asking:
                    del self._locks[key]


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


@dataclass(frozen=True, slots=True)
class StopCause:
    """Why a decision is stopped: its reason code, and one line."""

    code: str
    message: str

    def error(self) -> WorldError:
        """Return what is raised where nothing was recorded that could be answered: the event may be sent again."""
        return WorldError(self.message, reason_code=self.code, retryable=True)


CANCELLED = StopCause("CANCELLED", "the decision was cancelled")
DRAINING = StopCause("DRAINING", "the gate is closing: it takes nothing new")

End = Callable[[StopCause], Answer]


class StoppedError(Exception):
    """The decision was stopped. `answer`: how its flow was ended, None where it had none."""

    def __init__(self, cause: StopCause, answer: Answer | None) -> None:
        super().__init__(cause.message)
        self.cause, self.answer = cause, answer


class Cancellation:
    """Shared by the thread that decides and whoever may stop it. The first cause counts."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._cause: StopCause | None = None
        self._end: End | None = None  # of the flow that is open where it waits
        self._waits, self._commits = False, False
        self.stopped: StoppedError | None = None  # it has ended: whoever decides it touches the record no more

    @property
    def asked(self) -> bool:
        """Whether it is to end: nothing new is begun for it."""
        return self._cause is not None

    def stop(self, cause: StopCause) -> bool:
        """Ask for the end. Return whether nothing will be committed for it; False: what was proposed may be by now."""
        with self._lock:
            self._cause = self._cause or cause
            if self._waits:
                self._stop(self._end)
            return self.stopped is not None or not self._commits

    @contextmanager
    def waiting(self, end: End | None = None, *, commits: bool = False) -> Iterator[None]:
        """Wait in a block, in which it may be stopped; `end` then ends the flow that is open. Raises StoppedError.

        `commits`: whatever the block comes to is committed next.
        """
        with self._lock:
            if self._cause is not None:
                self._stop(end)
            self._refuse()
            self._waits, self._end, self._commits = True, end, False
        try:
            yield
        except ENDINGS:  # whoever interrupts the program: the flow stays open until its lease ends
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
        with suppress(SdsError):  # a store that refuses, or a flow that was ended elsewhere: nothing can be answered
            answer = end(self._cause) if end is not None else None
        self.stopped = StoppedError(self._cause, answer)
