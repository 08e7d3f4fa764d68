"""The service's Prometheus metrics: the six golden signals of DIR 4.9 under their own names, and its own `sds_*`.

Each process counts for itself. Where several workers share a socket, a scrape may reach any of them: they keep their values
in shared files (`PROMETHEUS_MULTIPROC_DIR`, set by the supervisor), and each scrape adds them up. Gauges over a record or
the service's database are read at the scrape, by the process that answers it.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from sds.kernel.errors import SdsError, cause_of
from sds.service.reasons import REASONS

SHARED = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The shared files of one process, and the bytes of disk that each has from the start.
RESERVED_BYTES = {"counter": 1 << 17, "histogram": 1 << 21} | dict.fromkeys(
    ("gauge_livesum", "gauge_livemax", "gauge_livemin"), 1 << 17
)
ENDED = "ended-"  # in the name of a shared file whose process has ended, until another process goes on with it
RENAMED_MAX = 10  # files that may get another name while a scrape reads them
_USED = struct.Struct("i")  # at the head of a shared file: how many of its bytes are used

_MS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000)
_S = tuple(ms / 1_000 for ms in (0.5, *_MS))
_TOKENS = (16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)

# A second series for each counter and histogram: several workers do not have it either.
disable_created_metrics()  # type: ignore[no-untyped-call]

STAGES = ("open", "propose", "decide", "dispatch")


class Metrics:
    """The metrics of one process, counted where things happen; `render` returns them all.

    A counter that an alarm is on is 0 from the start: `increase` does not see one that is first scraped with its first event.
    Raises SdsError where the disk has no room for the shared files.
    """

    def __init__(self) -> None:
        if folder := os.environ.get(SHARED):
            _reserve(Path(folder))
        self._registry = CollectorRegistry()
        self._read = list[Callable[[], Iterable[Metric]]]()
        self._put_off = deque[Callable[[], object]]()
        self._of_decisions()
        self._of_requests()
        self._of_work()
        self._registry.register(_AtScrape(self._read))

    def _of_decisions(self) -> None:
        self.validation_ms = self._histogram(
            "validation_latency_ms", "Time in DIM; hard: its code, soft: the model that proposes", ("gate", "type"), _MS
        )
        self.stale = self._counter("stale_context_reject_rate", "Proposals rejected by the JIT state check", ("gate",))
        self.escalations = self._counter("escalation_count", "Cases handed to a human", ("agent_id", "reason"))
        self.tokens = self._histogram("token_budget_burn", "Tokens consumed by a decision flow", ("gate",), _TOKENS)
        self.saved = self._counter("idempotency_hit_rate", "Events answered without deciding them again", ("gate",))
        self.stage_s = self._histogram("sds_stage_seconds", "One stage of a decision", ("gate", "stage"), _S)
        self.decision_s = self._histogram("sds_decision_seconds", "One decision flow, all stages", ("gate",), _S)
        self.decided = self._counter("sds_decisions", "Decision flows that ended", ("gate", "state", "tag"))
        self.rows = self._histogram(
            "sds_batch_rows", "Rows in the passes of the model that a decision shared", ("gate",), _ROWS
        )

    def _of_requests(self) -> None:
        self.request_s = self._histogram("sds_http_seconds", "One request", ("route", "method", "status"), _S)
        self._shed_s = self.request_s.labels("none", "POST", "503")
        self.refused = self._counter("sds_refusals", "Requests answered with a problem", ("code",))
        for code in REASONS:
            self.refused.labels(code)
        self.queued = self._gauge(
            "sds_queue_decisions", "Decisions that wait for a thread, or are being decided", ("gate", "of")
        )
        self.in_hand = self._gauge("sds_admission_in_hand", "Requests for decisions in hand", ())
        self.expected_s = self._gauge(
            "sds_admission_expected_seconds", "Expected time of one more decision", ("gate",), "livemax"
        )
        self.streams = self._gauge("sds_streams", "Open streams of changes", ())
        self.processes = self._gauge("sds_processes", "Processes that serve", ())
        self.sampled_s = self._gauge(
            "sds_sampled_timestamp_seconds",
            "When the process last set its gauges, which it does every second",
            (),
            "livemin",
        )
        self.check_ok = self._gauge("sds_check_ok", "1: the check of /readyz is ok", ("check", "gate"), "livemin")

    def _of_work(self) -> None:
        self.recovered = self._counter("sds_recovered", "Flows and orders that recovery ended", ("gate", "became"))
        self.recovery_errors = self._counter(
            "sds_recovery_errors", "Failed recoveries of a gate, and flows whose recovery failed", ("gate",)
        )
        self.recovery_s = self._histogram("sds_recovery_seconds", "One recovery of a gate", ("gate",), _S)
        self.delivered = self._counter("sds_webhook_deliveries", "Attempts to deliver", ("webhook", "outcome"))
        self.store_errors = self._counter("sds_store_errors", "Background work that failed", ("work",))

    def was_shed(self, code: str, took_s: float) -> None:
        """Count a request that load shedding refused, before any route."""
        self.refused.labels(code).inc()
        self._shed_s.observe(took_s)

    def put_off(self, count: Callable[[], object]) -> None:
        """Have `count` called by the next `settle`, so that no answer waits for it."""
        self._put_off.append(count)

    def settle(self) -> None:
        """Call all that `put_off` was given. Thread-safe."""
        while self._put_off:
            with suppress(IndexError):  # another thread has just taken the last
                self._put_off.popleft()()

    def _counter(self, name: str, what: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, what, labels, buckets=buckets, registry=self._registry)

    def _gauge(
        self, name: str, what: str, labels: tuple[str, ...], how: Literal["livesum", "livemax", "livemin"] = "livesum"
    ) -> Gauge:
        return Gauge(name, what, labels, registry=self._registry, multiprocess_mode=how)

    def read_at_scrape(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Have `read` called at each scrape for further metrics. It must not raise."""
        self._read.append(read)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format. Blocks while the gauges are read."""
        self.settle()
        if not (folder := os.environ.get(SHARED)):
            return generate_latest(self._registry)
        Path(folder).mkdir(mode=0o700, exist_ok=True)  # without it nothing is scraped, and no alarm but `SdsDown` fires
        for _ in range(RENAMED_MAX):
            with suppress(FileNotFoundError):  # a file got another name since the folder was listed
                return self._of_all_processes()
        return self._of_all_processes()

    def _of_all_processes(self) -> bytes:
        shared = CollectorRegistry()
        MultiProcessCollector(shared)  # type: ignore[no-untyped-call]  # it registers itself
        shared.register(_AtScrape(self._read))
        return generate_latest(shared)


@contextmanager
def shared_values() -> Iterator[None]:
    """Have the processes started within the block keep their values in shared files, which `render` adds up."""
    with TemporaryDirectory(prefix="sds-metrics-") as folder:
        before = os.environ.get(SHARED)
        os.environ[SHARED] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[SHARED]
            else:
                os.environ[SHARED] = before


def _reserve(folder: Path) -> None:
    """Make this process's shared files and reserve their room on the disk. Raises SdsError.

    They are memory-mapped: a write to a page for which a full disk has no room would end the process by SIGBUS. A file gets its
    name once it has its size, since a scrape of another process fails on an empty one.

    The process goes on counting in the files of one that has ended: there are never more than of processes that lived at once.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)  # a cleaner of temporary files may have removed it
        for kind, size in RESERVED_BYTES.items():
            file = folder / f"{kind}_{os.getpid()}.db"
            _take_over(folder, kind, file)
            made = file if file.exists() else file.with_suffix(".new")  # it exists where an ended process had this id
            with made.open("ab") as opened:
                _allocate(opened, size)
            made.rename(file)
    except OSError as error:
        hint = "make room where temporary files are, or set TMPDIR to a folder that has room"
        raise SdsError(f"the metrics cannot be kept in `{folder}`: {cause_of(error)}", hint=hint) from error


def _take_over(folder: Path, kind: str, file: Path) -> None:
    """Give a file of a process that has ended, if there is one, the name of this process's."""
    for left in () if file.exists() else folder.glob(f"{kind}_{ENDED}*.db"):
        with suppress(FileNotFoundError):  # another process has just taken it
            left.rename(file)
            return


def _allocate(file: BinaryIO, size: int) -> None:
    """Reserve room on the disk for the first `size` bytes of a file that is open for appending."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    file.write(bytes(max(0, size - file.seek(0, os.SEEK_END))))  # macOS
    file.flush()
    os.fsync(file.fileno())


def forget_process(pid: int) -> None:
    """Remove the gauges of a process that has ended from the sums. Its counters and histograms stay, in the bytes they use, for
    the next process.
    """
    mark_process_dead(pid, folder := os.environ[SHARED])  # type: ignore[no-untyped-call]
    for kind in ("counter", "histogram"):
        file = Path(folder) / f"{kind}_{pid}.db"
        with suppress(OSError), file.open("rb+") as opened:
            opened.truncate(max(_USED.size, *_USED.unpack(opened.read(_USED.size))))
            file.rename(file.with_name(f"{kind}_{ENDED}{pid}.db"))


class _AtScrape(Collector):
    def __init__(self, read: list[Callable[[], Iterable[Metric]]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for each in self._read:
            yield from each()


def gauge(name: str, what: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """Return a gauge with its samples: (label values, value)."""
    family = GaugeMetricFamily(name, what, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family
