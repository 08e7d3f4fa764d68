"""The language model that a policy may ask: opened on its first use, and closed with the policy."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from sds.engines.breaker import Breaker, CountedError, EngineDownError
from sds.engines.protocol import Engine
from sds.engines.queueing import QueueTimeoutError
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import SdsError
from sds.models.protocol import ENDINGS


class LanguageModel:
    """An engine opened on demand. `needed`: whether a policy under this contract ever asks it. Safe in several threads.

    `breaker`: its own, since the readers answer while the language model is down.
    """

    def __init__(self, open_it: Callable[[], Engine], *, needed: bool, breaker: Breaker) -> None:
        self._open, self.needed, self.breaker = open_it, needed, breaker
        self._engine: Engine | None = None
        self._lock = Lock()

    def get(self) -> Engine:
        """Return the engine, which the first call opens. Raises ModelError."""
        with self._lock:
            if self._engine is None:
                self._engine = self._open()
            return self._engine

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        """Return what the engine proposes, while its breaker lets packets through. Raises EngineDownError while it is down,
        QueueTimeoutError, and CountedError for any other failure, so that the policy's own breaker does not count it.
        """
        engine = self.get()
        try:
            return self.breaker.ask(engine, packet, tokens_max=tokens_max)
        except (EngineDownError, QueueTimeoutError, *ENDINGS):
            raise
        except SdsError as error:
            raise CountedError(str(error), reason_code=error.reason_code, hint=error.hint) from error
        except BaseException as error:
            raise CountedError(f"the engine failed: {type(error).__name__}") from error

    @property
    def opened(self) -> Engine | None:
        """The engine; None before the first call of `get`."""
        return self._engine

    def close(self) -> None:
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None
