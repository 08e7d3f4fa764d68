"""The language model that a policy may ask: opened on its first use, and closed with the policy."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from sds.engines.protocol import Engine


class LanguageModel:
    """An engine opened on demand. `needed`: whether a policy under this contract ever asks it. Safe in several threads."""

    def __init__(self, open_it: Callable[[], Engine], *, needed: bool) -> None:
        self._open, self.needed = open_it, needed
        self._engine: Engine | None = None
        self._lock = Lock()

    def get(self) -> Engine:
        """Return the engine, which the first call opens. Raises ModelError."""
        with self._lock:
            if self._engine is None:
                self._engine = self._open()
            return self._engine

    @property
    def opened(self) -> Engine | None:
        """The engine; None before the first call of `get`."""
        return self._engine

    def close(self) -> None:
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None
