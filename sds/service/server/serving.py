"""Serve in one process: open gates and database, run the server, and drain when it is asked to stop."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from types import FrameType

import orjson
import uvicorn
from fastapi import FastAPI

from sds.engines.config import load_engines, open_chain
from sds.engines.factory import open_parallel
from sds.engines.protocol import Engine
from sds.host.clock import now_ms
from sds.host.interrupt import ends_at_once
from sds.kernel.canonical import seen_json
from sds.kernel.errors import SdsError, cause_of
from sds.service.app import create_app
from sds.service.database import open_database
from sds.service.gates import open_gates
from sds.service.server.connections import connection_class
from sds.service.settings import ServiceSettings
from sds.service.state import Service

BACKLOG = 1_024
FILES_BESIDE_CONNECTIONS = 256
SWITCH_S = 0.0005  # a deciding thread hands the interpreter's lock to the event loop after this time; Python's is 0.005
LAST_ANSWERS_S = 5  # for writing answers and ending streams, once everything is decided


def log(event: str, facts: Mapping[str, object]) -> None:
    """Write one line of JSON to standard error. The caller chooses the facts: never an event, a key or a URL."""
    line = {"event": event, "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"), **facts}
    try:
        sys.stderr.write(seen_json(orjson.dumps(line, default=str).decode()) + "\n")
    except (OSError, ValueError):  # standard error is closed
        return


def open_model(settings: ServiceSettings) -> Engine:
    """Open a process's language model: the chain in the file of engines, else the embedded model. Raises SdsError."""
    if settings.engines is not None:
        return open_chain(load_engines(settings.engines), now_ms=now_ms)
    return open_parallel(None, parallel=settings.parallel, now_ms=now_ms)


def serve(
    settings: ServiceSettings,
    listener: socket.socket,
    started: Callable[[], None],
    *,
    open_model: Callable[[ServiceSettings], Engine] = open_model,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. `started` is called once requests are answered.

    Raises UsageError, ModelError or StoreError where something does not open, SdsError where the server does not start.
    """
    if settings.store:
        os.environ["SDS_STORE"] = settings.store
    settings = replace(settings, connections_max=_connections_max(settings.connections_max))
    with ExitStack() as opened:
        database = open_database(settings.store)
        opened.callback(database.close)
        with ends_at_once():
            gates = open_gates(settings, open_model=lambda: open_model(settings), now_ms=now_ms)
        opened.callback(gates.close)
        server = server_over(create_app(settings, gates, database, now_ms=now_ms, log=log), started)
        _freeze_objects()
        sys.setswitchinterval(SWITCH_S)
        for sig in hang_up():
            signal.signal(sig, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        listen(listener)
        server.run(sockets=[listener])
    if not server.started:
        raise SdsError("the service did not start")


def hang_up() -> tuple[signal.Signals, ...]:
    """Return SIGHUP, which would end this process in the middle of its work; nothing where it is ignored (`nohup`) or handled,
    or outside the main thread.
    """
    main = threading.current_thread() is threading.main_thread()
    return (signal.SIGHUP,) if main and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else ()


def _freeze_objects() -> None:
    """Exempt all objects that exist now from garbage collection: they stay until the process ends.

    Otherwise a full service that refuses requests spends the event loop's time on collections that walk through them all.
    """
    gc.collect()
    gc.freeze()


def server_over(app: FastAPI, started: Callable[[], None]) -> Server:
    """Return the server of an application, with the limits of its settings."""
    settings: ServiceSettings = app.state.service.settings
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL + 1)  # its tracebacks may quote requests
    config = uvicorn.Config(
        app,
        http=connection_class(app.state.service, app.state.shedding),
        ws="none",
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.idle_s,  # type: ignore[arg-type]  # a float does
        timeout_graceful_shutdown=LAST_ANSWERS_S,
        backlog=BACKLOG,
    )
    return Server(config, app.state.service, started)


def _connections_max(wanted: int) -> int:
    """Raise this process's soft limit of open files for so many connections, to the hard limit at most; return how many there may
    be. Silent ones beyond it are closed: if they took every file, nobody else could connect, and no record could be opened.
    """
    files = wanted + FILES_BESIDE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = files if hard == resource.RLIM_INFINITY else min(files, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return min(wanted, max(allowed - FILES_BESIDE_CONNECTIONS, allowed // 4))


class Server(uvicorn.Server):
    """A server that stops on the first SIGTERM or SIGINT. For `shutdown_delay_s` it is not ready and answers as before. Then
    it drains: it goes on answering until the decisions under way have ended, or `drain_s` is over. A SIGINT after the first
    signal stops it at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._on_started = service, started
        self._stop_asked = False
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            raise self._service.failed or SdsError("the service did not start") from None
        if self.started:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  as uvicorn calls it
        if self._stop_asked and sig == signal.SIGINT:
            self.force_exit = self.should_exit = True
        self._stop_asked = True

    async def on_tick(self, counter: int) -> bool:
        if self._stop_asked and self._ending is None:
            self._ending = asyncio.create_task(self._stop())
        return await super().on_tick(counter)

    async def _stop(self) -> None:
        """Let balancers notice that the process is not ready, then drain. Until then clients are refused nothing."""
        service = self._service
        service.stopping = True
        service.log("service.stopping", {"drains_after_s": service.settings.shutdown_delay_s})
        await asyncio.sleep(service.settings.shutdown_delay_s)
        await self._drain()

    async def _drain(self) -> None:
        """Refuse new events, wait for decisions under way, end the rest NOT_DECIDED, then let the server stop."""
        service, began_s = self._service, time.monotonic()
        service.draining = True
        service.log("service.draining", {"in_hand": service.admission.in_hand})
        try:
            await _apart(service.stop_background)
            left_s = max(0.0, service.settings.drain_s - (time.monotonic() - began_s))
            await _apart(lambda: service.gates.close(left_s))
        except SdsError as error:
            service.log("service.closing_failed", {"reason_code": error.reason_code})
        finally:
            service.gates_closed = True
            service.log("service.drained", {"after_ms": round(1_000 * (time.monotonic() - began_s))})
            self.should_exit = True


async def _apart(work: Callable[[], object]) -> None:
    """Do some work in another thread, so that this one goes on answering; in this one where the system gives no other."""
    begun = False

    def marked() -> None:
        nonlocal begun
        begun = True
        work()

    try:
        await asyncio.to_thread(marked)
    except RuntimeError:
        if begun:
            raise
        work()


def bound(host: str, port: int) -> socket.socket:
    """Return a bound socket that child processes can inherit; port 0 takes any free one. Raises SdsError.

    It refuses connections until `listen`: else a request would wait until the gates are open. Until then no other process can
    bind its port either.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with the protocol named: otherwise asyncio does not set TCP_NODELAY, and answers wait 40 ms for Nagle's algorithm
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # else others with this option could bind it, too
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        listener.set_inheritable(True)
    except OSError as error:
        listener.close()
        raise _not_listening(host, port, error) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Take connections from now on. Raises SdsError where another process has begun to listen on the port meanwhile."""
    try:
        # connections inherit it: once they are closed, the next service can bind the port at once
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _not_listening(host, port, error) from error


def _not_listening(host: str, port: int, error: OSError) -> SdsError:
    elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    hint = "give --host an address of this machine" if elsewhere else "choose another port with --port"
    return SdsError(f"the service cannot listen on `{host}:{port}`: {cause_of(error)}", hint=hint)


def address_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
