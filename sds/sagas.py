"""A saga from trigger to end: each child is one decision through the whole hot path, with the same engine.

event -> kernel.saga.claim -> step 1 -> step 2 ... -> CLOSED
                                       └ dirty -> one choice from the menu -> reverted, or a human
"""

from __future__ import annotations

from collections.abc import Callable

from sds.engines.protocol import Engine
from sds.engines.queueing import KeyLocks
from sds.kernel.flow.answer import Answer
from sds.kernel.flow.intake import Event
from sds.kernel.flow.kernel import Kernel
from sds.kernel.saga import driver
from sds.kernel.saga import state as saga
from sds.kernel.saga.state import SagaAnswer
from sds.pipeline import Reasoned, Stream


class SagaStream:
    """Runs sagas through one kernel and one engine. Safe in several threads."""

    def __init__(
        self,
        kernel: Kernel,
        engine: Engine,
        *,
        now_ms: Callable[[], int],
        sleep: Callable[[float], None],
        on_reasoned: Reasoned | None = None,
        on_decided: Reasoned | None = None,
        locks: KeyLocks | None = None,
    ) -> None:
        self._kernel, self._engine = kernel, engine
        self._now_ms, self._sleep, self._locks = now_ms, sleep, locks
        self._on_reasoned, self._on_decided = on_reasoned, on_decided

    def decide(self, name: str, event: Event) -> SagaAnswer:
        """Return the saga's answer: decided now, resumed where it stands, or stored."""
        kernel = self._kernel
        dfid = saga.claim(kernel.store, kernel.contract, name, event, now_ms=self._now_ms())
        return self.drive(dfid)

    def drive(self, dfid: str) -> SagaAnswer:
        """Bring a saga of the record to its end."""
        return driver.drive(self._kernel, dfid, self._ask, now_ms=self._now_ms)

    def _ask(self, child: Kernel, event: Event) -> Answer:
        stream = Stream(
            child,
            self._engine,
            now_ms=self._now_ms,
            sleep=self._sleep,
            on_reasoned=self._on_reasoned,
            on_decided=self._on_decided,
            locks=self._locks,
        )
        return stream.decide(event)
