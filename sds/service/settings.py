"""The settings of a service: its options, and the limit of every queue, body and wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sds.host.machine import is_loopback
from sds.kernel.errors import UsageError

WORKERS_MAX = PARALLEL_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """`gates`: names or paths. `store`: a `postgresql://` URL, or "" for SQLite; repr hides it, as it may hold a password.

    `shutdown_delay_s`: the time that a balancer has after SIGTERM to notice `/readyz`, while everything is answered as before.
    `drain_s`: the time that decisions under way have to end after it. `dev_keys`: SHA-256 digests of keys that hold only
    while this service runs, and are not stored. Raises UsageError: no gate, or `dev` with a host that is not loopback.
    """

    gates: tuple[str, ...]
    store: str = field(default="", repr=False)
    engines: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    workers: int = 1
    drain_s: float = 25.0
    shutdown_delay_s: float = 0.0
    idle_s: float = 75.0  # between two requests of one connection; a balancer's must be less
    dev: bool = False
    dev_keys: tuple[str, ...] = ()

    parallel: int = 1  # decisions at once that the shared model is opened for
    queue_max: int = 256  # decisions waiting and under way in one process, over all its gates
    body_bytes_max: int = 64 * 1024
    body_within_s: float = 10.0  # from the first byte of a request's head to the last of its body
    head_within_s: float = 10.0  # a connection that has not sent a whole head by then is closed
    head_bytes_max: int = 16 * 1024
    connections_max: int = 2_000  # one more closes the connection that has been silent longest
    rate_per_s: float = 1_000.0  # requests of one key in one process
    rate_burst: int = 2_000
    keys_kept_s: int = 24 * 3600  # how long the answer under an Idempotency-Key is kept
    key_cache_ms: int = 1_000  # a revoked key is refused after this time at the latest

    metrics_open: bool = False  # /metrics without a key, for requests from this machine that came through no proxy
    streams_max: int = 64  # streams of changes at once in one process
    streams_of_key_max: int = 8
    heartbeat_s: float = 15.0  # between two comments of a stream that has no change to send
    stream_check_s: float = 1.0  # a stream whose key was revoked ends after this time at the latest
    follow_every_s: float = 0.2  # between two reads of the ledgers' heads, while a stream follows them
    recover_every_s: float = 5.0
    probe_every_s: float = 5.0  # between two probes of store, clock and model, for /readyz
    sweep_every_s: float = 600.0
    webhooks_every_s: float = 1.0
    webhook_within_s: float = 10.0  # a delivery that has not been answered by then has failed
    webhooks_parallel: int = 8

    def __post_init__(self) -> None:
        if not self.gates:
            raise UsageError("no gate is named", hint="sds serve --gate refund")
        if self.dev and not is_loopback(self.host):
            raise UsageError(f"--dev serves only this machine, not `{self.host}`", hint="leave out --host or --dev")
