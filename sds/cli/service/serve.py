"""`sds serve`: run the decision service."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sds.cli.render import echo
from sds.cli.service import needs_service
from sds.definitions.registry import find
from sds.kernel.errors import UsageError
from sds.service.settings import PARALLEL_MAX, WORKERS_MAX, ServiceSettings

StoreUrl = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="SDS_STORE",
        help="A postgresql:// URL, without a password. Default: files in $SDS_HOME.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Listening:
    """The options about the service's address and its processes."""

    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="The port; 0: any free port.")] = 8080
    workers: Annotated[
        int, typer.Option("--workers", min=1, max=WORKERS_MAX, help="Processes. Each loads its own model.")
    ] = 1
    metrics_open: Annotated[
        bool,
        typer.Option(
            "--metrics-open", help="Serve /metrics without a key to requests from this machine, not through a proxy."
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class Limits:
    """The options that limit one process."""

    parallel: Annotated[
        int, typer.Option("--parallel", min=1, max=PARALLEL_MAX, help="Decisions at once, in each process.")
    ] = 1
    queue_max: Annotated[int, typer.Option("--queue", min=1, help="Decisions waiting or under way in a process.")] = 256
    rate_per_s: Annotated[
        float,
        typer.Option(
            "--rate", min=0.01, max=1e9, help="Requests a second of one key in one process. Bursts may be twice that."
        ),
    ] = 1_000.0
    drain_s: Annotated[
        float, typer.Option("--drain-s", min=0.0, max=3_600.0, help="Seconds to end decisions under way after SIGTERM.")
    ] = 25.0
    shutdown_delay_s: Annotated[
        float,
        typer.Option(
            "--shutdown-delay-s",
            min=0.0,
            max=3_600.0,
            help="Seconds after SIGTERM to answer as before, not ready, until balancers have noticed.",
        ),
    ] = 0.0
    idle_s: Annotated[
        float,
        typer.Option(
            "--idle-s",
            min=1.0,
            max=3_600.0,
            help="Seconds a connection may be silent between requests: more than a balancer keeps it.",
        ),
    ] = 75.0


def serve(
    gate: Annotated[list[str], typer.Option("--gate", help="A gate's name or path. Give it once for each gate.")],
    listening: Listening,
    limits: Limits,
    store: StoreUrl = "",
    engines: Annotated[
        Path | None, typer.Option("--engines", help="A YAML file with a chain of engines.", show_default=False)
    ] = None,
    dev: Annotated[bool, typer.Option("--dev", help="Serve this machine only, with a key that is printed.")] = False,
) -> None:
    """Serve gates over HTTP until SIGTERM. Callers need keys: sds keys add.

    Example: sds serve --gate refund --dev
    """
    with needs_service():
        from sds.service import callers  # noqa: PLC0415  the extra
        from sds.service.server import serving  # noqa: PLC0415
        from sds.service.server.workers import Supervisor  # noqa: PLC0415
    key = callers.new_key() if dev else ""
    settings = ServiceSettings(
        gates=tuple(gate),
        store=store,
        engines=engines,
        dev=dev,
        dev_keys=(callers.digest_of(key),) if key else (),
        rate_burst=max(1, int(2 * limits.rate_per_s)),
        **asdict(listening),
        **asdict(limits),
    )
    says = f"serving {', '.join(find(each).name for each in gate)}"
    if not dev:
        _refuse_without_key(store, " ".join(f"--gate {shlex.quote(each)}" for each in gate))
    with serving.bound(settings.host, settings.port) as listener:
        says = f"{says} at {serving.address_of(listener)}"
        started = partial(echo, says + (f"\nkey (until this ends): {key}" if key else ""), err=True)
        if settings.workers == 1:
            serving.serve(settings, listener, started)
        else:
            Supervisor(settings, listener, started).run()


def _refuse_without_key(store: str, gates: str) -> None:
    """Raise UsageError where the service's database has no valid key, so that nobody could ask for anything."""
    from sds.service import callers, database  # noqa: PLC0415

    opened = database.open_database(store)
    try:
        if not any(key.revoked_at_ms is None for key in callers.stored_keys(opened)):
            hint = "sds keys add NAME --role submit,read --gate all; or, for this machine only: "
            hint += f"sds serve {gates} --dev"
            raise UsageError("there is no valid key, so no request would be answered", hint=hint)
    finally:
        opened.close()
