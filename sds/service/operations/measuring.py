"""Gauges over the records, the service's database and this process, read when they are scraped.

A record that cannot be read has `sds_store_up` 0 and no other gauges; the scrape does not fail.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

from sds.gate import Gate
from sds.kernel.errors import SdsError
from sds.kernel.human import cases
from sds.kernel.registry import registry
from sds.service.operations.changes import head
from sds.service.operations.metrics import Metrics, gauge
from sds.service.operations.webhooks import undelivered
from sds.service.state import Service

READ_EVERY_S = 1.0

_ACTIVE = "SELECT count(*) FROM reservations WHERE status = 'live'"


class Standing:
    """Reads the gauges of records at most once in `READ_EVERY_S` seconds; a scrape before that gets the last values."""

    def __init__(self, service: Service, metrics: Metrics, streams: Counter[str]) -> None:
        self._service, self._metrics, self._streams = service, metrics, streams
        self._read_s, self._found = float("-inf"), list[Metric]()
        metrics.read_at_scrape(self._standing)

    def sample(self) -> None:
        """Set the gauges of what this process has in hand. A scrape adds up those of several processes."""
        service, metrics = self._service, self._metrics
        metrics.settle()
        for name, each in service.gates.items():
            metrics.expected_s.labels(name).set(service.admission.expected_ms(name) / 1_000)
            metrics.queued.labels(name, "waiting").set(each.gate.queued)
            metrics.queued.labels(name, "deciding").set(each.gate.deciding)
        metrics.in_hand.set(service.admission.in_hand)
        metrics.streams.set(self._streams.total())

    def _standing(self) -> Iterable[Metric]:
        if time.monotonic() - self._read_s >= READ_EVERY_S:
            self._found, self._read_s = list(self._read()), time.monotonic()
        return self._found

    def _read(self) -> Iterator[Metric]:
        read = dict[str, dict[str, float]]()
        for name, each in self._service.gates.items():
            try:
                read[name] = _of_record(each.gate)
            except SdsError:
                read[name] = {}
        yield gauge(
            "sds_store_up",
            "1: the record can be read",
            ("gate",),
            [((gate,), bool(found)) for gate, found in read.items()],
        )
        for metric, what in _OF_RECORD.items():
            samples = [((gate,), found[metric]) for gate, found in read.items() if found]
            yield gauge(metric, what, ("gate",), samples)
        limit = float(self._service.gates.parallel)
        yield gauge(
            "resource_lock_limit", "Orders that may hold resources at once", ("gate",), [((g,), limit) for g in read]
        )
        yield from undelivered(self._service)


_OF_RECORD = {
    "resource_lock_contention": "Resources held by an order that is under way",
    "sds_escalations_waiting": "Cases that wait for a human",
    "sds_ledger_entries": "Entries of the ledger",
    "sds_halted": "1: an operator has halted the gate",
    "sds_agent_active": "1: the gate's agent is ACTIVE",
}


def _of_record(gate: Gate) -> dict[str, float]:
    store, name = gate.store, gate.contract.gate
    agent = registry.lookup(store, gate.contract.agent_id)
    return {
        "resource_lock_contention": store.value(_ACTIVE),
        "sds_escalations_waiting": cases.count_waiting(store, name),
        "sds_ledger_entries": head(store),
        "sds_halted": float(store.halted),
        "sds_agent_active": float(agent is not None and agent.active),
    }
