"""What a service was started with, and its limits: every queue, body and wait has one here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sds.host.machine import is_loopback
from sds.kernel.errors import UsageError

WORKERS_MAX = PARALLEL_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """`gates`: by name or path. `store`: a `postgresql://` URL, "" for SQLite; it may hold a password, so no repr shows it.

    `drain_s`: what is under way at SIGTERM has so long to end. `dev_keys`: SHA-256 of keys that are good while this service
    runs and are kept nowhere. Raises UsageError where two things exclude each other.
    """

    gates: tuple[str, ...]
    store: str = field(default="", repr=False)
    engines: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    workers: int = 1
    drain_s: float = 25.0
    dev: bool = False
    dev_keys: tuple[str, ...] = ()

    parallel: int = 1  # decisions that the shared model is opened for
    queue_max: int = 256  # decisions waiting and under way in one process, of all its gates
    body_bytes_max: int = 64 * 1024
    body_within_s: float = 10.0  # from the first byte of a request's head to the last of its body
    head_within_s: float = 10.0  # a connection that says nothing, or not all of its head, is closed
    head_bytes_max: int = 16 * 1024
    idle_s: float = 30.0  # between two requests of one connection
    connections_max: int = 2_000  # beyond them the one that has been silent longest is closed
    rate_per_s: float = 1_000.0  # requests of one key in one process
    rate_burst: int = 2_000
    keys_kept_s: int = 24 * 3600  # answers under an Idempotency-Key
    key_cache_ms: int = 1_000  # a revoked key is refused after so long at the latest

    metrics_open: bool = False  # /metrics without a key, for who asks from this machine, through no proxy
    streams_max: int = 64  # streams of changes at once in one process
    streams_of_key_max: int = 8
    heartbeat_s: float = 15.0  # of a stream that has nothing to say
    stream_check_s: float = 1.0  # a stream whose key was revoked ends after so long at the latest
    follow_every_s: float = 0.2  # looks at the ledgers' heads, while anybody follows them
    recover_every_s: float = 5.0
    probe_every_s: float = 5.0  # of store, clock and model, for /readyz
    sweep_every_s: float = 600.0
    webhooks_every_s: float = 1.0
    webhook_within_s: float = 10.0  # an endpoint that has not answered by then has failed
    webhooks_parallel: int = 8

    def __post_init__(self) -> None:
        if not self.gates:
            raise UsageError("no gate is named", hint="sds serve --gate refund")
        if self.dev and not is_loopback(self.host):
            raise UsageError(f"--dev serves this machine alone, not `{self.host}`", hint="leave out --host or --dev")
