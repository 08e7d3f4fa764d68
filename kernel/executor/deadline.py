"""Calls with a time limit: an executor may take for ever, a decision may not."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

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


def _thread() -> _Thread:
    try:
        return _idle.pop()
    except IndexError:
        pass
    try:
        return _Thread()
    except RuntimeError as error:
        raise NotStartedError(f"no thread can be started: {error}") from error


def within(timeout_s: float, work: Callable[[], T], *, late: Callable[[T], None] = lambda _result: None) -> T:
    """Return what `work` returns, or raise what it raises, within `timeout_s` seconds; else raise LateError. Raises
    NotStartedError where nothing was begun.

    `work` runs in a copy of the caller's context (`contextvars`): its traces and logs belong to the caller's. When it
    raises SystemExit or a cancellation, EndingError is raised here: that is not meant for the caller. A thread that
    hangs stays behind, as a daemon, and calls `late` with the result if there ever is one.
    """
    context, answers = copy_context(), queue.SimpleQueue[T | BaseException]()
    first = threading.Lock()  # taken by what comes first: the result, or the end of the waiting

    def call() -> None:
        came: T | BaseException
        try:
            came = context.run(work)
        except BaseException as error:  # noqa: BLE001  it is raised below
            came = error
        if first.acquire(blocking=False):
            answers.put(came)
            answers.put(came)  # again: an interrupt may come between taking the first and keeping it
        elif not isinstance(came, BaseException):
            late(came)

    _thread().calls.put(call)
    try:
        came = answers.get(timeout=timeout_s)
    except queue.Empty:
        if first.acquire(blocking=False):
            raise LateError from None
        came = answers.get()
    except BaseException:  # the waiting is interrupted: the call goes on, and `late` gets its result
        if not first.acquire(blocking=False) and not isinstance(came := answers.get(), BaseException):
            late(came)
        raise
    if isinstance(came, BaseException):
        raise _raised(came)
    return came


def _raised(error: BaseException) -> Exception:
    """Return what the caller is to see of what a call has raised."""
    if isinstance(error, Exception):
        return error
    ending = EndingError(type(error).__name__).with_traceback(error.__traceback__)
    ending.__cause__ = error
    return ending
