"""What a service process does besides answering: metrics, spans, streams of changes, recovery, webhooks, health probes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import HTTPConnection

from sds.service.operations.background import Background
from sds.service.operations.following import Tail
from sds.service.operations.health import Health
from sds.service.operations.measuring import Standing
from sds.service.operations.metrics import Metrics
from sds.service.operations.observing import Flow, Observer
from sds.service.operations.tracing import Spans, configured_tracer
from sds.service.state import Service


class Operations:
    """The operational parts of one process. `streams`: the number of open streams of changes, by caller's name."""

    def __init__(self, service: Service) -> None:
        self.metrics, self._admission = Metrics(), service.admission
        self.spans = Spans(configured_tracer())
        self.streams = Counter[str]()
        service.traced = self.spans.asked
        self.health = Health(service)
        self.standing = Standing(service, self.metrics, self.health, self.streams)
        self.tail = Tail(
            lambda: {name: each.gate.store for name, each in service.gates.items()},
            every_s=service.settings.follow_every_s,
            failed=self.metrics.store_errors.labels("follow").inc,
        )
        self.background = Background(service, self.metrics, self.health, self.standing.sample)
        service.stop_background = self.background.stop
        observers = list[Observer]()
        for name, each in service.gates.items():
            agent_id = each.gate.contract.agent_id
            observers.append(Observer(name, agent_id, self.metrics, ended=self._ended))
            each.gate.listen(observers[-1])
        service.decides = lambda dfid: any(dfid in each for each in observers)

    def _ended(self, flow: Flow) -> None:
        self._admission.took(flow.gate, flow.took_ms)
        self.spans.ended(flow)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background threads for a block."""
        self.background.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.background.stop)


def operations(request: HTTPConnection) -> Operations:
    """Return the service's operations for a request."""
    running: Operations = request.app.state.operations
    return running
