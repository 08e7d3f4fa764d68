"""What both clients share of httpx: a request's arguments, and reading a reply within its limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import httpx2

from sds.client.connection import CONNECT_S_MAX, Connection
from sds.client.replies import REPLY_BYTES_MAX, HttpReply, Lost, unreadable
from sds.client.steps import HttpRequest
from sds.host.forks import begin_anew_in_forks
from sds.kernel.canonical import in_words
from sds.kernel.errors import UsageError

CONNECTIONS_MAX = 100
C = TypeVar("C", httpx2.Client, httpx2.AsyncClient)


def limits() -> httpx2.Limits:
    return httpx2.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX)


class Opened(Generic[C]):
    """An HTTP client, in each forked process another one: over a shared connection each would get the other's replies."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make: Callable[[], C] = make
        self._client: C | None = make()
        self._of_parents: list[C] = []
        begin_anew_in_forks(self)

    @property
    def client(self) -> C:
        made = self._client = self._client or self._make()
        return made

    def begin_anew(self) -> None:
        """Keep the parent's connections unused: closing them could hang up for the parent. A closed client stays closed."""
        if self._client is not None and not self._client.is_closed:
            self._of_parents.append(self._client)
            self._client = None


def arguments(http: httpx2.Client | httpx2.AsyncClient, connection: Connection, request: HttpRequest) -> dict[str, Any]:
    """Return a request as the arguments of `stream` of `http`. Raises UsageError where that is closed."""
    if http.is_closed:
        raise UsageError("the client is closed", hint="make another one, or call it within its `with` block")
    return {
        "method": request.method,
        "url": request.path,
        "params": dict(request.params),
        "headers": connection.headers(request),
        "content": request.body,
        "timeout": httpx2.Timeout(request.timeout_s, connect=min(CONNECT_S_MAX, request.timeout_s)),
    }


class Collector:
    """Collects a reply's body, for the request's `timeout_s` from now at most, and up to `REPLY_BYTES_MAX`."""

    def __init__(self, response: httpx2.Response, request: HttpRequest, *, now_s: Callable[[], float]) -> None:
        self._response, self._now_s, self._until_s = response, now_s, now_s() + request.timeout_s
        self._body = bytearray()

    def add(self, part: bytes) -> None:
        """Add a part of the body. Raises WorldError where the reply is too long, ReadTimeout where it is too slow."""
        self._body += part
        if len(self._body) > REPLY_BYTES_MAX:
            raise unreadable(f"longer than {REPLY_BYTES_MAX} bytes")
        if self._now_s() > self._until_s:
            raise httpx2.ReadTimeout("the reply took too long")

    def reply(self) -> HttpReply:
        headers = {name.lower(): value for name, value in self._response.headers.items()}
        return HttpReply(self._response.status_code, headers, bytes(self._body))


def lost(error: httpx2.HTTPError) -> Lost:
    before = httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout
    return Lost(in_words(error), sent=not isinstance(error, before))
