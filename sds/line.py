"""Standing in line for one key: of decisions that draw on the same account only one is made at a time, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sds.engines.waiting import Lending


class Lines:
    """One line for each key, of the callers in this process. What another process holds shows when it is reserved."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, tuple[Lending[None], list[None]]] = {}  # key -> its one turn, and who asks for it

    @contextmanager
    def turn(self, key: str, wait_s: float) -> Iterator[None]:
        """Hold the key's turn for a block. Raises NoTurnError when it does not come within `wait_s` seconds."""
        with self._lock:
            line, asking = self._lines.setdefault(key, (Lending(None), []))
            asking.append(None)
        try:
            with line.lent(wait_s, "another decision on the same key has not ended in time"):
                yield
        finally:
            with self._lock:
                asking.pop()
                if not asking:
                    del self._lines[key]
