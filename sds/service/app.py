"""Build the service's ASGI application: its state, its routes, and the middleware around every response."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import Depends, FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sds.kernel.errors import SdsError
from sds.kernel.flow.dispatch import Log, no_log
from sds.service import console, problems
from sds.service.admission import Admission
from sds.service.callers import Callers
from sds.service.database import Database
from sds.service.deciding.idempotency import KeptAnswers
from sds.service.fields import check_query
from sds.service.gates import OpenGates
from sds.service.operations import Operations
from sds.service.operations.metrics import Metrics
from sds.service.operations.shedding import LoadShedding
from sds.service.routes import agents, catalog, decisions, described, escalations, events, halt, health, looking, orders
from sds.service.settings import ServiceSettings
from sds.service.state import Service

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_PROBLEM = (b"content-type", problems.MEDIA_TYPE.encode())
BODY_BYTES_MAX = 1 << 20  # for any route; routes that read a body have lower limits of their own
# FastAPI's own spans and log records hold queries, messages and tracebacks. `operations.tracing` replaces them.
OWN_SPANS_ALONE: Any = {
    "tracing": False,
    "operation_spans": False,
    "metrics": False,
    "logs": False,
    "auto_configure": False,
}


class Outermost:
    """The outermost middleware. It adds the security headers that a route has not set, observes the time until each response
    begins by route, counts problems by reason code, and answers an unforeseen exception with a problem.

    The problem says nothing about the exception; the log line has the exception's type and place.
    """

    def __init__(
        self, app: ASGIApp, log: Log, token: Callable[[int], str], metrics: Metrics, body_within_s: float
    ) -> None:
        self._app, self._log, self._token = app, log, token
        self._metrics, self._body_within_s = metrics, body_within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, begun, problem, receive = time.perf_counter(), False, False, self._bounded(receive)

        async def with_headers(message: Message) -> None:
            nonlocal begun, problem
            if message["type"] == "http.response.start":
                begun, problem = True, _PROBLEM in message["headers"]
                message["headers"] = problems.with_safe_headers(message["headers"])
                self._observe(scope, message["status"], time.perf_counter() - began_s)
            elif problem:
                self._metrics.refused.labels(orjson.loads(message["body"])["reason_code"]).inc()
            await send(message)

        try:
            await self._app(scope, receive, with_headers)
        except Exception as error:  # noqa: BLE001  whatever it is, the caller gets a problem
            route, again = getattr(scope.get("route"), "path", ""), scope["method"] in ("GET", "HEAD")
            problem_of, instance = problems.failed(error, self._log, self._token, route, again=again)
            if not begun:
                await problems.response_of(problem_of, instance=instance)(scope, receive, with_headers)

    def _observe(self, scope: Scope, status: int, took_s: float) -> None:
        route = getattr(scope.get("route"), "path", "") or "none"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.request_s.labels(route, method, str(status)).observe(took_s)

    def _bounded(self, receive: Receive) -> Receive:
        """Return a `receive` for one request that reports a disconnected client where the body is longer than
        `BODY_BYTES_MAX`, or is not complete within `body_within_s` seconds.
        """
        ends_s, whole, length = time.monotonic() + self._body_within_s, False, 0

        async def received() -> Message:
            nonlocal whole, length
            if whole:
                return await receive()
            try:
                async with asyncio.timeout(ends_s - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                message = {"type": "http.disconnect"}
            length += len(message.get("body", b""))
            if length > BODY_BYTES_MAX:
                message = {"type": "http.disconnect"}
            whole = not message.get("more_body", False)
            return message

        return received


class Application(FastAPI):
    """FastAPI, except that `Decisions` answers requests for decisions: FastAPI's layers would double the time HTTP adds."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asking = scope["type"] == "http" and scope["method"] == "POST" and decisions.gate_asked(scope["path"])
        await (self.state.decisions if asking else super().__call__)(scope, receive, send)


def create_app(
    settings: ServiceSettings,
    gates: OpenGates,
    database: Database,
    *,
    now_ms: Callable[[], int],
    log: Log = no_log,
    token: Callable[[int], str] = secrets.token_hex,
) -> FastAPI:
    """Build the application over open gates and an open database. The caller closes both.

    `token(n)`: returns n random bytes as hexadecimal digits, for fault and session ids. Routes read `app.state.service`.
    """
    app = Application(
        lifespan=_lifespan,
        **described.ABOUT,
        version=version("sovereign-decision-stream"),
        generate_unique_id_function=described.operation_name,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=OWN_SPANS_ALONE,
    )
    app.state.service = _service(settings, gates, database, now_ms, log)
    app.state.operations = Operations(app.state.service)
    app.state.token = token
    problems.add_to(app)
    for module in (catalog, decisions, looking, orders, escalations, agents, halt, events):
        app.include_router(module.router, dependencies=[Depends(check_query)])
    for module in (health, console):
        app.include_router(module.router)
    described.describe(app, gates)
    metrics = app.state.operations.metrics
    app.add_middleware(Outermost, log=log, token=token, metrics=metrics, body_within_s=settings.body_within_s)
    app.state.decisions = decisions.Decisions(app.state.service, metrics, token)
    app.state.shedding = LoadShedding(app.state.service, refused=metrics.was_shed)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    try:
        async with app.state.operations.running():
            yield
    except SdsError as error:
        app.state.service.failed = error  # uvicorn keeps no exception
        raise


def _service(
    settings: ServiceSettings, gates: OpenGates, database: Database, now_ms: Callable[[], int], log: Log
) -> Service:
    callers = Callers(
        database,
        now_ms=now_ms,
        rate_per_s=settings.rate_per_s,
        rate_burst=settings.rate_burst,
        cache_ms=settings.key_cache_ms,
        dev_keys=settings.dev_keys,
    )
    admission = Admission(parallel=gates.parallel, queue_max=settings.queue_max)
    kept = KeptAnswers(database, now_ms=now_ms, kept_ms=1_000 * settings.keys_kept_s)
    return Service(settings, gates, database, callers, admission, kept, now_ms, log)
