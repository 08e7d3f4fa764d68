"""Deliver final states to webhook endpoints: at least once, in the order of each gate's ledger, signed (Standard Webhooks).

The ledger is the outbox: the next delivery to an endpoint is the next final state after its position. A failed delivery is
tried again after growing pauses, and later ones wait for it, so that order is kept. An endpoint that is down delays no other.
A message names dfid, gate and state, and holds no text and no amount.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from random import Random

import httpx2
import orjson
from prometheus_client.core import Metric
from standardwebhooks import Webhook

from sds.host.clock import when
from sds.kernel.errors import SdsError
from sds.kernel.executor.deadline import LateError, within
from sds.kernel.storage.store import Reader
from sds.service.operations import endpoints
from sds.service.operations.changes import Change, entries_behind, head
from sds.service.operations.endpoints import Endpoint, EndpointPosition
from sds.service.operations.metrics import Metrics, gauge
from sds.service.state import Service

BACKOFF_MS, BACKOFF_MS_MAX = 1_000, 300_000
DOUBLINGS_MAX = 16
LOOK_S = 0.2  # pause between two looks for further due deliveries while some are under way
AT_ONCE_MAX = 100  # deliveries to one endpoint in a row, before others have their turn
_FIRST_BEHIND = "SELECT at_ms FROM ledger WHERE idx > ? ORDER BY idx LIMIT 1"
EXACTLY = "webhooks"  # the name of the lock under which one process at a time delivers for a gate

_Sample = tuple[tuple[str, ...], float]


class Deliverer:
    """Delivers one gate's final states to its endpoints, to several at once."""

    def __init__(
        self, service: Service, gate: str, metrics: Metrics, stopping: threading.Event, *, random: Random | None = None
    ) -> None:
        self._service, self._gate, self._metrics, self._stopping = service, gate, metrics, stopping
        self._settings = service.settings
        self._random = random or Random()  # noqa: S311  when to try again is no secret

    def run(self) -> None:
        """Deliver until nothing is due, unless another process is doing so. A slow endpoint delays no other."""
        record = self._service.gates[self._gate].gate.store
        if not self._due(record):
            return
        with record.exclusively(EXACTLY) as mine:
            if not mine:
                return
            with ThreadPoolExecutor(self._settings.webhooks_parallel, "sds-webhook") as pool:
                under_way = dict[Future[None], str]()
                while not self._stopping.is_set():
                    for endpoint, at in self._due(record):
                        if endpoint.name not in under_way.values():
                            under_way[pool.submit(self.deliver, endpoint, at, record)] = endpoint.name
                    if not under_way:
                        return
                    for done in wait(under_way, LOOK_S, FIRST_COMPLETED).done:
                        del under_way[done]
                        done.result()

    def _due(self, record: Reader) -> list[tuple[Endpoint, EndpointPosition]]:
        """Return the endpoints whose position is not the ledger's head, and whose next attempt is due."""
        last, now_ms = head(record), self._service.now_ms()
        behind = [at for at in endpoints.positions(self._service.database, self._gate) if at.idx != last]
        if not behind:
            return []
        known = {each.name: each for each in endpoints.endpoints(self._service.database)}
        return [(known[at.webhook], at) for at in behind if at.next_at_ms <= now_ms and at.webhook in known]

    def deliver(self, endpoint: Endpoint, at: EndpointPosition, record: Reader) -> None:
        """Deliver up to `AT_ONCE_MAX` final states after a position, in order, until one fails.

        None is begun after the time for one answer is over, so that endpoints which answer slowly delay no other.
        """
        at, sent = self._in_record(at, record), 0
        until_ms = self._service.now_ms() + round(self._settings.webhook_within_s * 1_000)
        skipped: Change | None = None  # the last entry since the last delivery: no final state, so nothing is sent
        with self._client() as client:
            for change in entries_behind(record, self._gate, at.idx):
                if self._stopping.is_set() or sent >= AT_ONCE_MAX or (sent and self._service.now_ms() >= until_ms):
                    break
                if not change.final:
                    skipped = change
                    continue
                sent, skipped = sent + 1, None
                if failure := self._post(client, endpoint, change):
                    self._failed(at, failure)
                    return
                if not self._moved(at, change):
                    return
                at = replace(at, idx=change.idx, attempts=0, failing_since_ms=None)
        if skipped is not None:
            self._moved(at, skipped)

    def _client(self) -> httpx2.Client:
        """Return an HTTP client that follows no redirects, uses no proxy of the environment, and verifies certificates."""
        timeout_s = self._settings.webhook_within_s
        return httpx2.Client(follow_redirects=False, trust_env=False, timeout=timeout_s, verify=_certificates())

    def _in_record(self, at: EndpointPosition, record: Reader) -> EndpointPosition:
        """Return a position in this record. Where the record was restored from a backup, it is moved there by its time."""
        if not at.idx or record.value("SELECT entry_hash FROM ledger WHERE idx = ?", (at.idx,)) == at.entry_hash:
            return at
        sql = "SELECT idx, entry_hash, at_ms FROM ledger WHERE at_ms <= ? ORDER BY idx DESC LIMIT 1"
        idx, entry_hash, at_ms = record.row(sql, (at.at_ms,)) or (0, "", 0)
        self._service.log(
            "webhooks.record_replaced", {"webhook": at.webhook, "gate": at.gate, "was": at.idx, "is": idx}
        )
        endpoints.move_position(self._service.database, at, idx, entry_hash, at_ms)
        return replace(at, idx=idx, entry_hash=entry_hash, at_ms=at_ms, attempts=0, failing_since_ms=None)

    def _moved(self, at: EndpointPosition, behind: Change) -> bool:
        return endpoints.move_position(self._service.database, at, behind.idx, behind.entry_hash, behind.at_ms)

    def _post(self, client: httpx2.Client, endpoint: Endpoint, change: Change) -> str:
        """Send one change; return "" where it was accepted, else `HTTP_` and the status, `TIMEOUT`, or the error's class."""
        body, headers = signed(endpoint.secret, change, self._service.now_ms())

        def send() -> int:
            with client.stream("POST", endpoint.url, content=body, headers=headers) as response:
                return int(response.status_code)  # the body is not read

        try:
            status = within(self._settings.webhook_within_s, send)
            failure = "" if 200 <= status < 300 else f"HTTP_{status}"
        except LateError:
            failure = "TIMEOUT"
        except Exception as error:  # noqa: BLE001  its message may hold the URL
            failure = type(error).__name__
        self._metrics.delivered.labels(endpoint.name, "failed" if failure else "delivered").inc()
        return failure

    def _failed(self, at: EndpointPosition, failure: str) -> None:
        now_ms = self._service.now_ms()
        wait_ms = min(BACKOFF_MS_MAX, BACKOFF_MS * 2 ** min(at.attempts, DOUBLINGS_MAX))
        next_at_ms = now_ms + round(wait_ms * self._random.uniform(0.5, 1.0))
        endpoints.write_failure(self._service.database, at, failure, now_ms=now_ms, next_at_ms=next_at_ms)
        facts = {"webhook": at.webhook, "gate": at.gate, "attempts": at.attempts + 1, "failure": failure}
        self._service.log("webhooks.failed", facts)


@cache
def _certificates() -> ssl.SSLContext:
    """Return the TLS context that verifies certificates. It is cached: making one takes longer than most deliveries."""
    return httpx2.create_ssl_context(trust_env=False)


def signed(secret: str, change: Change, now_ms: int) -> tuple[bytes, dict[str, str]]:
    """Return the message of a final state: its body, and the headers of Standard Webhooks.

    `webhook-id` is the same at every attempt and for every endpoint.
    """
    data = {**change.as_data(), "retryable": change.retryable}
    message = {"type": f"decision.{change.final.lower()}", "timestamp": when(change.at_ms), "data": data}
    body, sent_at = orjson.dumps(message), datetime.fromtimestamp(now_ms / 1000, UTC)
    name = f"{change.gate}_{change.idx}_{change.entry_hash[:16]}"
    return body, {
        "content-type": "application/json",
        "user-agent": "sds-webhooks",
        "webhook-id": name,
        "webhook-timestamp": str(int(sent_at.timestamp())),
        "webhook-signature": Webhook(secret).sign(name, sent_at, body.decode()),
    }


def undelivered(service: Service) -> Iterator[Metric]:
    """Yield gauges of the gates that are served: by how many entries each endpoint lags, how old the first of them is, and for
    how long it has been failing.

    Does not raise: of a record that cannot be read, the lag and the age are missing.
    """
    try:
        positions = [at for at in endpoints.positions(service.database) if at.gate in service.gates]
    except SdsError:
        return
    behind, waits, now_ms = list[_Sample](), list[_Sample](), service.now_ms()
    for at in positions:
        with suppress(SdsError):
            record, of = service.gates[at.gate].gate.store, (at.webhook, at.gate)
            first_ms = record.value(_FIRST_BEHIND, (at.idx,))
            behind.append((of, float(max(0, head(record) - at.idx))))
            waits.append((of, _seconds(first_ms, now_ms)))
    labels = ("webhook", "gate")
    yield gauge("sds_webhook_behind_entries", "Entries of the ledger by which an endpoint lags", labels, behind)
    yield gauge("sds_webhook_oldest_seconds", "Age of the first of these entries; 0 without one", labels, waits)
    since = [((at.webhook, at.gate), _seconds(at.failing_since_ms, now_ms)) for at in positions]
    yield gauge("sds_webhook_failing_seconds", "Seconds for which deliveries have failed", labels, since)


def _seconds(since_ms: int | None, now_ms: int) -> float:
    return 0.0 if since_ms is None else max(0, now_ms - since_ms) / 1_000
