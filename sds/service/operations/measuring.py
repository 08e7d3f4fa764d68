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
from sds.kernel.executor import breaker
from sds.kernel.human import cases
from sds.kernel.registry import registry
from sds.service.operations.changes import head
from sds.service.operations.health import OK, Health
from sds.service.operations.metrics import Metrics, gauge
from sds.service.operations.webhooks import undelivered
from sds.service.state import Service

READ_EVERY_S = 1.0

_ACTIVE = "SELECT count(*) FROM reservations WHERE status = 'live'"
# Orders, and the reversals that a saga waits for.
_UNKNOWN = (
    "SELECT (SELECT count(*) FROM decision_flows f JOIN execution_log e ON e.dfid = f.dfid WHERE f.state = 'EXECUTING'"
    " AND f.state IN ('ACTIVE', 'EXECUTING') AND e.status = 'UNKNOWN' AND f.gate = ?)"
    " + (SELECT count(*) FROM saga_reversals r JOIN decision_flows f ON f.dfid = r.saga"
    " WHERE r.status IN ('PENDING', 'UNKNOWN') AND f.state = 'ACTIVE' AND f.gate = ?)"
)
_OLDEST = "SELECT min(created_at_ms) FROM decision_flows WHERE state = 'ESCALATED' AND gate = ?"


class Standing:
    """Reads the gauges of records at most once in `READ_EVERY_S` seconds; a scrape before that gets the last values."""

    def __init__(self, service: Service, metrics: Metrics, health: Health, streams: Counter[str]) -> None:
        self._service, self._metrics, self._health, self._streams = service, metrics, health, streams
        self._read_s, self._found = float("-inf"), list[Metric]()
        metrics.read_at_scrape(self._standing)

    def sample(self) -> None:
        """Set the gauges of this process: what it has in hand, and its checks. A scrape combines those of several processes."""
        service, metrics = self._service, self._metrics
        metrics.settle()
        for name, each in service.gates.items():
            metrics.expected_s.labels(name).set(service.admission.expected_ms(name) / 1_000)
            metrics.queued.labels(name, "waiting").set(each.gate.queued)
            metrics.queued.labels(name, "deciding").set(each.gate.deciding)
        metrics.in_hand.set(service.admission.in_hand)
        metrics.streams.set(self._streams.total())
        metrics.processes.set(1)
        metrics.sampled_s.set(service.now_ms() / 1_000)
        for check, found in self._health.checks().items():
            for gate, result in [("", found)] if isinstance(found, str) else found.items():
                metrics.check_ok.labels(check, gate).set(result == OK)

    def _standing(self) -> Iterable[Metric]:
        if time.monotonic() - self._read_s >= READ_EVERY_S:
            self._found, self._read_s = list(self._read()), time.monotonic()
        return self._found

    def _read(self) -> Iterator[Metric]:
        read = dict[str, dict[str, float]]()
        for name, each in self._service.gates.items():
            try:
                read[name] = _of_record(each.gate, self._service.now_ms())
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
        wanted = self._service.settings.workers
        limit = float(wanted * self._service.gates.parallel)
        yield gauge(
            "resource_lock_limit", "Orders that may hold resources at once", ("gate",), [((g,), limit) for g in read]
        )
        yield gauge("sds_processes_wanted", "Processes that `--workers` asks for", (), [((), float(wanted))])
        yield from undelivered(self._service)


_OF_RECORD = {
    "resource_lock_contention": "Resources held by an order that is under way",
    "sds_escalations_waiting": "Cases that wait for a human",
    "sds_escalations_oldest_seconds": "Age of the oldest escalated case that waits for a human; 0 without one",
    "sds_orders_unknown": "Orders, and reversals of open sagas, whose end nobody knows",
    "sds_executor_up": "0: the executor has not answered several orders in a row, and events wait",
    "sds_ledger_entries": "Entries of the ledger",
    "sds_halted": "1: an operator has halted the gate",
    "sds_agent_active": "1: the gate's agent is ACTIVE",
}


def _of_record(gate: Gate, now_ms: int) -> dict[str, float]:
    store, name = gate.store, gate.contract.gate
    agent, since_ms = registry.lookup(store, gate.contract.agent_id), store.value(_OLDEST, (name,))
    return {
        "resource_lock_contention": store.value(_ACTIVE),
        "sds_escalations_waiting": cases.count_waiting(store, name),
        "sds_escalations_oldest_seconds": 0.0 if since_ms is None else max(0, now_ms - since_ms) / 1_000,
        "sds_orders_unknown": store.value(_UNKNOWN, (name, name)),
        "sds_executor_up": float(not breaker.read(store, name).is_open),
        "sds_ledger_entries": head(store),
        "sds_halted": float(store.halted),
        "sds_agent_active": float(agent is not None and agent.active),
    }
