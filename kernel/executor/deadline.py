"""Calls with a time limit: an executor may take for ever, a decision may not."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import Generic, TypeVar

T = TypeVar("T")

IDLE_MAX = 8  # threads that are kept for further calls
_idle: deque[_Thread] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # the threads stay in the parent


class LateError(Exception):
    """The call did not return in time. It goes on; `late` gets what it returns."""


class NotStartedError(Exception):
    """No thread can be started: the call has not begun."""


class EndingError(Exception):
    """The call raised what would end a program or a task (SystemExit, a cancellation); it has ended only its thread."""


class _Thread:
    """A thread for one call after another: to start one takes longer than most calls. A call that hangs keeps it."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="sds-executor", daemon=True).start()

    def _run(self) -> None:
        self.calls.get()()
        while len(_idle) < IDLE_MAX:
            _idle.append(self)
            self.calls.get()()


class _Call(Generic[T]):
    """One call in a thread of its own. The lock decides what came first: the result, or the end of the waiting."""

    def __init__(self, work: Callable[[], T], late: Callable[[T], None]) -> None:
        self._work, self._late = work, late
        self._lock, self._abandoned = threading.Lock(), False
        self._came: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

    def __call__(self) -> None:
        came: T | BaseException
        try:
            came = self._work()
        except BaseException as error:  # noqa: BLE001  `result` raises it
            came = error
        with self._lock:
            if not self._abandoned:
                self._came.put(came)
                return
        if not isinstance(came, BaseException):
            self._late(came)

    def _abandon(self) -> bool:
        """Hand the result to `late` once it comes. Return False where it is here already."""
        with self._lock:
            self._abandoned = self._came.empty()
        return self._abandoned

    def result(self, timeout_s: float) -> T:
        """Return what the call returns, or raise what it raises. Raises LateError after `timeout_s` seconds."""
        try:
            came = self._came.get(timeout=timeout_s)
        except queue.Empty:
            if self._abandon():
                raise LateError from None
            came = self._came.get()
        except BaseException:  # the waiting is interrupted: the call goes on, and `late` gets its result
            if not self._abandon() and not isinstance(came := self._came.get(), BaseException):
                self._late(came)
            raise
        if isinstance(came, Exception):
            raise came
        if isinstance(came, BaseException):
            raise EndingError(type(came).__name__).with_traceback(came.__traceback__) from came
        return came


def within(timeout_s: float, work: Callable[[], T], *, late: Callable[[T], None] = lambda _result: None) -> T:
    """Return what `work` returns, or raise what it raises, within `timeout_s` seconds; else raise LateError, or NotStartedError.

    `work` runs in a copy of the caller's context (`contextvars`): its traces and logs belong to the caller's. When it
    raises SystemExit or a cancellation, EndingError is raised here: that is not meant for the caller. A thread that
    hangs stays behind, as a daemon, and calls `late` with the result if there ever is one.
    """
    context = copy_context()
    call = _Call(lambda: context.run(work), late)
    try:
        thread = _idle.pop()
    except IndexError:
        try:
            thread = _Thread()
        except RuntimeError as error:
            raise NotStartedError(f"no thread can be started: {error}") from error
    thread.calls.put(call)
    return call.result(timeout_s)
