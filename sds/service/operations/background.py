"""The background threads of one process. No error ends a thread: it is logged and counted, and the work is tried again.

For each gate, one process at a time recovers, and one delivers webhooks (`Store.exclusively`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from sds.engines.protocol import language_model_of
from sds.gate import Gate
from sds.kernel.errors import SdsError, WorldError
from sds.service.deciding.idempotency import SWEPT_MAX
from sds.service.operations.health import Health
from sds.service.operations.metrics import Metrics
from sds.service.operations.webhooks import Deliverer
from sds.service.state import Service

NO_THREAD_HINT = "raise the limits of memory and of processes (`ulimit -u`, `TasksMax`)"
SAMPLE_EVERY_S = 1.0
STOP_S_MAX = 15.0  # how long a process that ends waits for the work its threads have begun


class Background:
    """The threads of one process: recovery and webhooks for each gate, health probes, gauges, sweeping of old answers.

    `sample` sets the gauges of what this process has in hand, for a scrape of another process that adds them up.
    """

    def __init__(self, service: Service, metrics: Metrics, health: Health, sample: Callable[[], object]) -> None:
        self._service, self._metrics = service, metrics
        self._stopping = threading.Event()
        self._threads = list[threading.Thread]()
        settings = service.settings
        works: list[tuple[str, float, Callable[[], object]]] = [
            ("look", settings.probe_every_s, health.look),
            ("sample", SAMPLE_EVERY_S, sample),
            ("sweep", settings.sweep_every_s, self._sweep),
        ]
        for name, each in service.gates.items():
            metrics.recovery_errors.labels(name)
            metrics.recovered.labels(name, "unknown")
            works.append((f"recover-{name}", settings.recover_every_s, partial(self._recover, each.gate)))
            deliverer = Deliverer(service, name, metrics, self._stopping)
            works.append((f"webhooks-{name}", settings.webhooks_every_s, deliverer.run))
            if language_model_of(each.gate.engine) is not None:
                probe = partial(health.probe_language_model, each)
                works.append((f"language_model-{name}", settings.probe_every_s, probe))
        self._works = works
        for work, _, _ in works:
            metrics.store_errors.labels(_kind(work))

    def start(self) -> None:
        """Start all threads. Raises WorldError, with none left, where the system gives too few."""
        for name, every_s, work in self._works:
            thread = threading.Thread(target=self._repeat, args=(name, every_s, work), name=f"sds-{name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.stop()
                raise WorldError(f"no thread can be started: {error}", hint=NO_THREAD_HINT) from error
            self._threads.append(thread)

    def stop(self) -> None:
        """Start no more work, and wait up to `STOP_S_MAX` seconds for work that has begun. It may be called twice."""
        self._stopping.set()
        until_s = time.monotonic() + STOP_S_MAX
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _repeat(self, name: str, every_s: float, work: Callable[[], object]) -> None:
        """Run `work` at once, and again `every_s` seconds after each run, until the process stops or drains."""
        while not self._stopping.is_set() and not self._service.draining:
            with suppress(Exception):  # where memory is out, to tell of it or to wait may fail, too
                try:
                    work()
                except Exception as error:  # noqa: BLE001  whatever it is, the next time may go well
                    self._failed(name, error)
                self._stopping.wait(every_s)

    def _failed(self, name: str, error: Exception) -> None:
        self._metrics.store_errors.labels(_kind(name)).inc()
        code = error.reason_code if isinstance(error, SdsError) else type(error).__name__
        self._service.log("service.background_failed", {"work": name, "reason_code": code})

    def _recover(self, gate: Gate) -> None:
        """Recover a gate, unless another process is doing so. Raises what recovery raises, once it is counted."""
        name, began_s = gate.contract.gate, time.monotonic()
        with gate.store.exclusively("recovery") as mine:
            if not mine:
                return
            try:
                recovered = gate.recover(at_once=False)
            except Exception:
                self._metrics.recovery_errors.labels(name).inc()
                raise
        self._metrics.recovery_s.labels(name).observe(time.monotonic() - began_s)
        self._metrics.recovery_errors.labels(name).inc(len(recovered.errors))
        counts = {
            "interrupted": recovered.interrupted,
            "success": recovered.success,
            "failed": recovered.failed,
            "unknown": recovered.unknown - recovered.paused,
            "sagas_ended": recovered.sagas_ended,
        }
        for became, number in counts.items():
            self._metrics.recovered.labels(name, became).inc(number)
        if any(counts.values()) or recovered.errors:
            self._service.log("recovery.ran", {"gate": name, **counts, "errors": len(recovered.errors)})

    def _sweep(self) -> None:
        """Forget kept answers that are too old, and those about events whose texts were erased."""
        for each in self._service.gates.values():
            self._service.kept.forget_erased(each.gate)
        while self._service.kept.sweep() == SWEPT_MAX and not self._stopping.is_set():
            pass


def _kind(work: str) -> str:
    """Return what a work's name begins with: `recover` of `recover-refund`."""
    return work.partition("-")[0]
