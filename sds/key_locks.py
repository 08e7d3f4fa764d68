"""A fair lock for each key: of decisions that draw on the same account only one is made at a time, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sds.engines.queueing import FairPool


class KeyLocks:
    """First come first served among the callers in this process. What another process holds shows when it is reserved."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[
            str, tuple[FairPool[None], list[None]]
        ] = {}  # by key: its lock, and one entry for each who asks

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
