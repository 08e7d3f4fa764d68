"""The ASGI application of the service: its state, its routes, and what every answer carries."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from importlib.metadata import version

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sds.service import console, problems
from sds.service.admission import Admission
from sds.service.callers import Callers
from sds.service.database import Database
from sds.service.gates import OpenGates
from sds.service.problems import Log
from sds.service.routes import agents, catalog, decisions, escalations, events, halt, health
from sds.service.settings import ServiceSettings
from sds.service.state import Service

HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class SecurityHeaders:
    """Gives every answer the headers that a browser should be given; a route's own ones stay."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers)


def no_log(_event: str, _facts: object) -> None:
    """Write nothing."""


def create_app(
    settings: ServiceSettings,
    gates: OpenGates,
    database: Database,
    *,
    now_ms: Callable[[], int],
    log: Log = no_log,
    token: Callable[[int], str] = secrets.token_hex,
) -> FastAPI:
    """Make the application over open gates and an open database; both stay the caller's to close.

    `token`: where names of faults and sessions come from. What routes need is `app.state.service`.
    """
    app = FastAPI(
        title="Sovereign Decision Stream",
        version=version("sovereign-decision-stream"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    callers = Callers(
        database,
        now_ms=now_ms,
        rate_per_s=settings.rate_per_s,
        rate_burst=settings.rate_burst,
        cache_ms=settings.key_cache_ms,
        dev_keys=settings.dev_keys,
    )
    admission = Admission(parallel=settings.parallel, queue_max=settings.queue_max)
    app.state.service = Service(settings, gates, database, callers, admission, now_ms, log)
    app.state.token = token
    problems.add_to(app, log, token)
    for module in (health, catalog, decisions, escalations, agents, halt, events, console):
        app.include_router(module.router)
    app.add_middleware(SecurityHeaders)
    return app
