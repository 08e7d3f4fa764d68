"""Locks that a thread may take again: whether another one has them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

from sds.kernel.locks import OwnedLock


@contextmanager
def held_elsewhere(block: AbstractContextManager[object]) -> Iterator[None]:
    """Let another thread be in a block."""
    with ThreadPoolExecutor(1) as other:
        other.submit(block.__enter__).result()
        try:
            yield
        finally:
            other.submit(block.__exit__, None, None, None).result()


def is_held(lock: OwnedLock) -> bool:
    """Tell whether any thread has a lock, the caller's, too."""

    def taken() -> bool:
        free = lock.acquire(blocking=False)
        if free:
            lock.release()
        return not free

    with ThreadPoolExecutor(1) as other:
        return other.submit(taken).result()
