"""A saga from trigger to end: each child is one decision through the whole hot path, with the same engine.

event -> kernel.saga.claim -> step 1 -> step 2 ... -> CLOSED
                                       └ dirty -> one choice from the menu -> reverted, or a human
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sds.engines.queueing import Cancellation
from sds.kernel.errors import SdsError
from sds.kernel.flow.intake import Event
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from sds.kernel.operations import recovery
from sds.kernel.operations.recovery import Recovered
from sds.kernel.saga import driver
from sds.kernel.saga import state as saga
from sds.kernel.saga.claim import claim
from sds.kernel.saga.kernels import ChildKernel
from sds.kernel.saga.state import SagaAnswer
from sds.pipeline import Stream


class SagaStream:
    """Runs the sagas of one kernel. `stream_of(kernel)` returns the stream of a child's kernel. Safe in several threads."""

    def __init__(self, kernel: Kernel, stream_of: Callable[[Kernel], Stream], *, now_ms: Callable[[], int]) -> None:
        self._kernel, self._stream_of, self._now_ms = kernel, stream_of, now_ms

    def steps(self, name: str) -> int:
        """Return the number of steps of a saga. Raises UsageError where the contract has no such saga."""
        return len(saga.spec_of(self._kernel.contract, name).steps)

    def decide(
        self, name: str, event: Event, *, deadline_ms: int | None = None, cancellation: Cancellation | None = None
    ) -> SagaAnswer:
        """Return the saga's answer: decided now, resumed where it stands, or stored. A saga that is stopped stays open.

        `deadline_ms`: absolute, and stored with a saga that begins now; after it no step is sent.
        """
        kernel = self._kernel
        dfid = claim(kernel.store, kernel.contract, name, event, now_ms=self._now_ms(), deadline_ms=deadline_ms)
        return self.drive(dfid, cancellation=cancellation)

    def drive(self, dfid: str, *, cancellation: Cancellation | None = None) -> SagaAnswer:
        """Bring a saga of the record to its end."""

        def ask(child: ChildKernel, event: Event) -> Answer:
            return self._stream_of(child).decide(event, deadline_ms=child.deadline_ms, cancellation=cancellation)

        return driver.drive(self._kernel, dfid, ask, now_ms=self._now_ms)

    def take_on(self, found: Recovered) -> Recovered:
        """Drive every saga that needs a model and whose driver is gone: choose its compensation, or take the step that is due
        after one that the outside had only accepted. Return the counts of `found` with these. One saga that fails, or that
        somebody else is at by now, does not stop the others.
        """
        ended, errors = found.sagas_ended, list(found.errors)
        for dfid in driver.waiting(self._kernel, now_ms=self._now_ms()):
            try:
                ended += self.drive(dfid).phase == "ENDED"
            except Exception as error:  # noqa: BLE001  a fault of one saga must not stop the others
                if not isinstance(error, SdsError) or error.reason_code != "FLOW_IN_PROGRESS":
                    errors.append(recovery.failure(self._kernel, dfid, error))
        return replace(found, sagas_ended=ended, sagas_dirty=0, errors=tuple(errors))
