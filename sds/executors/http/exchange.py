"""Sends a request and reads its whole answer within a deadline, over kept connections. Verifies TLS, follows no redirect,
keeps no cookies.

A failure is one of two: certainly nothing of the request left this machine, or nobody knows.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from threading import Lock, Thread
from typing import Any, TypeVar

from sds.host.forks import begin_anew_in_forks
from sds.kernel.canonical import one_line

BODY_BYTES_MAX = 64 * 1024
IDLE_S = 2.0  # how long an idle connection is kept: less than servers do, so that none closes it under an order
CONNECT_SHARE = 0.8  # of the deadline for connecting: after it, certainly nothing was sent
CAUSE_CHARS_MAX = 200
STOP_S = 5.0
GRACE_S = 1.0

T = TypeVar("T")


class NotSentError(Exception):
    """Nothing of the request has left this machine."""


class NoReplyError(Exception):
    """The request may have arrived, and there is no whole answer."""


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """A request. `headers` may hold the secret and is never shown."""

    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes = b""

    def __repr__(self) -> str:
        return f"GatewayRequest({self.method} ***)"


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Exchange:
    """Connections to one address. Safe in several threads; they share one event loop, in a thread of its own.

    `tls`: returns the context of new connections. Once it is another, the connections that are kept are used no more.
    `clock`: seconds, which must go on while this process is stopped.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Callable[[], ssl.SSLContext] | None,
        proxy: str,
        connections_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._address, self._tls, self._proxy, self._connections_max = address, tls, proxy, connections_max
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Any = None
        self._context: ssl.SSLContext | None = None  # the client's
        self._of_parents: tuple[Any, ...] = ()
        begin_anew_in_forks(self)

    def begin_anew(self) -> None:
        """Open connections of this process's own. The parent's are kept unused: closing them could hang up for the parent."""
        self._of_parents = (self._of_parents, self._loop, self._client)
        self._lock, self._loop, self._client = Lock(), None, None

    def ask(self, request: GatewayRequest, deadline_s: float, *, body_bytes_max: int = BODY_BYTES_MAX) -> Reply:
        """Return the whole answer to a request. Raises NotSentError, NoReplyError."""
        if deadline_s <= 0:
            raise NotSentError("nothing was sent: the deadline has passed")
        ends = self._clock() + deadline_s
        asked = self._run(lambda: self._ask_within(request, ends, body_bytes_max))
        try:
            return asked.result(deadline_s + GRACE_S)
        except TimeoutError:
            asked.cancel()
            raise NoReplyError(f"no answer within {round(deadline_s * 1000)} ms") from None
        except CancelledError:
            raise NoReplyError("the executor was closed while it waited for an answer") from None

    def close(self) -> None:
        """Close all connections. Requests under way get no answer; later requests open new connections."""
        with self._lock:
            loop, client, self._loop, self._client = self._loop, self._client, None, None
        if loop is not None:
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_end(client), loop).result(STOP_S)
            loop.call_soon_threadsafe(loop.stop)

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        with self._lock:
            if self._loop is None or self._loop.is_closed():  # its thread may have ended: a machine out of memory
                self._loop, self._client = self._begun_loop(), None
            context = self._tls() if self._tls else None
            if self._client is None or context is not self._context:
                before, self._client, self._context = self._client, self._new_client(context), context
                if before is not None:
                    asyncio.run_coroutine_threadsafe(_retire(before), self._loop)
            return asyncio.run_coroutine_threadsafe(work(), self._loop)

    @staticmethod
    def _begun_loop() -> asyncio.AbstractEventLoop:
        """Return an event loop that runs in a thread. Raises NotSentError where there is none: the next request tries again."""
        loop = None
        try:
            loop = asyncio.new_event_loop()
            Thread(target=_run_loop, args=(loop,), name="sds-gateway", daemon=True).start()
        except (OSError, RuntimeError) as error:  # no file or no thread is left
            if loop is not None:
                loop.close()
            raise NotSentError(f"nothing was sent: {_cause(error)}") from None
        return loop

    def _new_client(self, context: ssl.SSLContext | None) -> Any:
        import httpx2  # noqa: PLC0415  loaded when a gateway is asked

        limits = httpx2.Limits(
            max_connections=self._connections_max,
            max_keepalive_connections=self._connections_max,
            keepalive_expiry=IDLE_S,
        )
        client = httpx2.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            verify=context or False,  # False only for http, which is only for this machine
            proxy=self._proxy or None,
            limits=limits,
        )
        client.cookies.jar.set_policy(
            DefaultCookiePolicy(allowed_domains=[])
        )  # one order's answer must not mark another
        return client

    async def _ask_within(self, request: GatewayRequest, ends: float, body_bytes_max: int) -> Reply:
        import httpx2  # noqa: PLC0415

        sending = False

        async def on_event(event: str, _facts: object) -> None:
            nonlocal sending
            if event.endswith("send_request_headers.started"):
                if self._clock() >= ends:  # the process may have been stopped here for a while
                    raise _TooLateError
                sending = True

        try:
            async with asyncio.timeout(ends - self._clock()):
                return await self._stream_reply(request, ends, body_bytes_max, on_event)
        # RuntimeError: no thread can be started that looks the name up
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, RuntimeError, _TooLateError) as error:
            if sending:
                raise NoReplyError(_reason(error)) from None
            raise NotSentError(f"nothing was sent: {_cause(error)}") from None
        except TimeoutError:
            if sending:
                raise NoReplyError("no answer in time") from None
            raise NotSentError("nothing was sent: no connection in time") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            raise NoReplyError(_reason(error)) from None

    async def _stream_reply(self, request: GatewayRequest, ends: float, body_bytes_max: int, on_event: Any) -> Reply:
        import httpx2  # noqa: PLC0415

        left_s = max(ends - self._clock(), 0.001)
        connect_s = left_s * CONNECT_SHARE
        async with self._client.stream(
            request.method,
            f"{self._address}{request.path}",
            headers={**request.headers, "Accept-Encoding": "identity"},
            content=request.content,
            timeout=httpx2.Timeout(left_s, connect=connect_s, pool=connect_s),
            extensions={"trace": on_event},
        ) as response:
            body = b""
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > body_bytes_max:
                    raise NoReplyError(f"the answer is longer than {body_bytes_max} bytes")
            return Reply(response.status_code, {k.lower(): v for k, v in response.headers.items()}, body)


class _TooLateError(Exception):
    """The deadline passed before anything was sent."""


def _reason(error: Exception) -> str:
    """Return what failed, and no word of the gateway's, which may repeat what it was sent. OpenSSL's name of an alert is none."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"{type(error).__name__}: {error.reason}"
    return "the deadline has passed" if isinstance(error, _TooLateError) else f"{type(error).__name__}"


def _cause(error: Exception) -> str:
    """Return what failed before anything was sent, and why: a name, a certificate or a port that is wrong."""
    return one_line(f"{_reason(error)}: {error}" if str(error) else _reason(error), CAUSE_CHARS_MAX)


async def _end(client: Any) -> None:
    """Cancel the requests under way, then close the client."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await client.aclose()


async def _retire(client: Any) -> None:
    """Close a client once the requests that it may have under way have ended."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    await client.aclose()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
