"""Locks that an interrupt does not leave held.

A signal handler may raise between any two steps of a program's main thread: Ctrl-C, or a task queue's time limit. After
`lock.acquire()` and before the `try` that releases it, such an interrupt would leave a lock held for good. `with lock:` has
no such moment. Waiting for a limited time has, and so have context managers written in Python, `with condition:` too: enter
a condition by its lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from traceback import walk_tb
from typing import Protocol


class OwnedLock(Protocol):
    """A lock that knows which thread holds it: `threading.RLock`. Another thread's `release` raises RuntimeError."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...

    def release(self) -> None: ...


@contextmanager
def acquired(lock: OwnedLock, wait_s: float) -> Iterator[bool]:
    """Hold a lock for a block; yield False where it was not free within `wait_s` seconds. The thread must not hold it yet."""
    try:
        yield lock.acquire(timeout=wait_s) if wait_s > 0 else lock.acquire(blocking=False)
    finally:
        try:  # noqa: SIM105  `suppress` is written in Python
            lock.release()
        except RuntimeError:  # it was not free
            pass


def end_blocks(error: BaseException) -> None:
    """End the blocks that an error has kept from being entered or left.

    An interrupt inside `__enter__` or `__exit__` of a context manager leaves its generator suspended, with what it holds,
    for as long as somebody keeps the error's traceback. Dropping the frames of `contextlib` ends it now and in this thread.
    """
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == contextlib.__file__:
            with suppress(RuntimeError):  # it still runs
                frame.clear()
