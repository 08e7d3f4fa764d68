"""Measures every request by its route, and counts what was refused by its reason code. It looks into no body but a problem's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sds.service.problems import MEDIA_TYPE

if TYPE_CHECKING:
    from sds.service.operations import Operations

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_PROBLEM = (b"content-type", MEDIA_TYPE.encode())
_REPLAYED = (b"idempotent-replayed", b"true")


class Measured:
    """Wraps an application. A stream of changes is measured until it begins."""

    def __init__(self, app: ASGIApp, operations: Operations) -> None:
        self._app, self._metrics = app, operations.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, problem = time.perf_counter(), False

        async def measured(message: Message) -> None:
            nonlocal problem
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                problem = _PROBLEM in headers
                self._began(scope, message["status"], time.perf_counter() - began_s)
                if _REPLAYED in headers:
                    self._metrics.saved.labels(_gate(scope)).inc()
            elif problem:
                self._refused(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, measured)

    def _began(self, scope: Scope, status: int, took_s: float) -> None:
        route = getattr(scope.get("route"), "path", "") or "none"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.request_s.labels(route, method, str(status)).observe(took_s)

    def _refused(self, body: bytes) -> None:
        try:
            code = orjson.loads(body)["reason_code"]
        except (ValueError, KeyError, TypeError):
            return
        self._metrics.refused.labels(code).inc()


def _gate(scope: Scope) -> str:
    return str(scope.get("path_params", {}).get("gate", ""))
