"""HTTP/1.1 connections with limits: a client that is silent, sends slowly or reads slowly is disconnected in time.

uvicorn's protocol limits only the silence between two requests. This one also limits the length and time of a request's head,
the time a client may leave an answer unread, and the number of connections: one more than `connections_max` closes the one
that has been silent longest. llhttp (`httptools`) parses requests in a quarter of the time of a parser in Python. What llhttp
accepts and HTTP/1.1 forbids is refused here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from sds.service.body import BODY_IS_THERE
from sds.service.operations.shedding import LoadShedding
from sds.service.problems import Problem, response_of
from sds.service.settings import ServiceSettings
from sds.service.state import Service

if TYPE_CHECKING:
    from uvicorn._types import (
        ASGI3Application,
        ASGIReceiveCallable,
        ASGISendCallable,
        ASGISendEvent,
        HTTPResponseBodyEvent,
        HTTPResponseStartEvent,
        Scope,
    )

REQUEST_BYTES_MAX = 8 << 20  # on the wire, with the framing of a body within its limit in the smallest chunks
WAITING_MAX = 16  # pipelined requests behind the one that is being answered; one more is a 400
_ACCEPTED = frozenset({("1.1", 1), ("1.0", 1), ("1.0", 0)})  # (version, number of `Host` headers) (RFC 9112, 3.2)
_CLOSE = (b"connection", b"close")


class BoundedConnection(HttpToolsProtocol):
    """One connection. `connection_class` sets the class's variables. `by_silence`: the one silent longest first."""

    service: ClassVar[Service]
    settings: ClassVar[ServiceSettings]
    shedding: ClassVar[LoadShedding]
    by_silence: ClassVar[OrderedDict[BoundedConnection, None]]

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._received_bytes = 0  # bytes received of the request that is being read
        self._in_head, self._upgrades, self._shed = True, False, False
        self._closing_after = False  # nothing more is read; the connection closes once the requests before are answered
        self._lingers = False  # the last answer was sent; what still comes is dropped
        self._answered: RequestResponseCycle | None = None  # the request being answered; `cycle` is the latest one read

    @property
    def asking(self) -> bool:
        """Whether a request was read and is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._closed_by_lingering = cast("asyncio.Transport", LingeringTransport(self))
        self.by_silence[self] = None
        self._start_head_timer()
        if len(self.by_silence) > self.settings.connections_max:
            silent = next((each for each in self.by_silence if not each.asking), self)
            silent.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.by_silence.pop(self, None)
        self._stop_head_timer()
        self._stop_write_timer()
        self._end_answered()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self._closing_after or self.transport.is_closing():
            self._drop(data)
            return
        self.by_silence.move_to_end(self)
        self._unset_keepalive_if_required()
        self._received_bytes += len(data)
        try:
            self._read(data)
            if self._in_head and self._received_bytes > self.settings.head_bytes_max:
                raise httptools.HttpParserError("its head is too long")
        except httptools.HttpParserError as error:
            if isinstance(
                error.__context__, MemoryError
            ):  # no mistake of the client's, which asks again where no answer came
                self.transport.abort()
            self.send_400_response(str(error))
        if self._lingers:
            return
        if self._received_bytes > REQUEST_BYTES_MAX:
            self.transport.abort()
        if self.asking:
            self._stop_head_timer()
        elif self._head_timer is None and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self._start_head_timer()

    def _drop(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes > REQUEST_BYTES_MAX:
            self.transport.abort()

    def _read(self, data: bytes) -> None:
        """Parse `data`. A request to upgrade to another protocol is parsed again without its `Upgrade` header."""
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]

    def _without_upgrade(self) -> bytes:
        """Start a new parser; return the head that was read, without `Upgrade`. Raises HttpParserError for CONNECT."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("this is no proxy")
        self.parser = httptools.HttpRequestParser(self)
        headers = (b"%b: %b" % each for each in self.headers if each[0] != b"upgrade")
        return b"\r\n".join([b"%b %b HTTP/%b" % (method, self.url, version), *headers, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()  # the request before it, if shed, has just set the timer
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check a request's head and start to answer it. Raises HttpParserError: it is answered with a 400."""
        size, hosts, version = len(self.url), 0, self.parser.get_http_version()
        for name, value in self.headers:
            size += len(name) + len(value)
            hosts += name == b"host"
            if name == b"transfer-encoding" and value.lower() != b"chunked":
                raise httptools.HttpParserError("its body is encoded in a way that nothing here reads")
        if size > self.settings.head_bytes_max:
            raise httptools.HttpParserError("its head is too long")
        if (version, hosts) not in _ACCEPTED:
            raise httptools.HttpParserError("it is no HTTP/1.1, or names no host, or two")
        if len(self.pipeline) >= WAITING_MAX:
            raise httptools.HttpParserError("too many wait behind another")
        self.expect_100_continue = self.expect_100_continue and version == "1.1"
        self._upgrades = self.parser.should_upgrade()
        self._shed = not self._upgrades and self._sheds()
        if not self._upgrades and not self._shed:
            super().on_headers_complete()  # raises for an invalid target
        self._in_head = False

    def _sheds(self) -> bool:
        """Answer a request that the service sheds, before a task is made for it; return whether that was done. Its body is
        read and dropped. A request behind another, the last of its connection or one that expects 100-continue is let pass.
        """
        last = self.service.stopping or self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive()
        waits = self.asking or self.expect_100_continue or self.flow.write_paused
        if last or waits or self.parser.get_method() != b"POST":
            return False
        refusal = self.shedding.refusal(self.url, self.headers)
        if refusal is None:
            return False
        status, headers, body = refusal
        lines = map(b": ".join, (*self.server_state.default_headers, *headers))
        self.transport.write(STATUS_LINE[status] + b"\r\n".join((*lines, b"", body)))
        return True

    def on_body(self, body: bytes) -> None:
        if not self._shed:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._received_bytes, self._in_head = 0, True
        if self._shed:
            self._stop_head_timer()
            self.on_response_complete()
        elif not self._upgrades:
            self.scope["state"][BODY_IS_THERE] = True
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.settings.body_within_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  as uvicorn calls it
        """Answer what is not HTTP/1.1 with a problem where no answer has been started, and close the connection."""
        if self.asking and not self.cycle.more_body:  # a whole request came before it: that is answered first
            self.cycle.keep_alive, self._closing_after = False, True
            return
        # a fault in a body is the answer to its request, unless that has been answered
        unasked = self._in_head and not self.asking
        if unasked or (self.asking and self._answered is self.cycle and not self.cycle.response_started):
            detail = "the request is not valid HTTP/1.1, its head is too long, or too many requests wait behind another"
            hint = "the service speaks plain HTTP, without TLS and without the PROXY protocol"
            problem = response_of(Problem("USAGE", detail, hint=hint))
            lines = [b"%b: %b\r\n" % each for each in (*problem.raw_headers, _CLOSE)]
            self.transport.write(b"".join([STATUS_LINE[problem.status_code], *lines, b"\r\n", bytes(problem.body)]))
        self._end_answered()
        self.linger()

    def linger(self) -> None:
        """End what is sent, and drop what still comes until the client closes or the time of a head is over. To close at once
        would reset the connection while a body still comes: a client may lose the answer to it, and a proxy takes that for
        a failure of this process (RFC 9112, 9.6).
        """
        if self._lingers or self.transport.is_closing():
            return
        self._closing_after = self._lingers = True
        self.transport.write_eof()
        self._stop_head_timer()
        self._start_head_timer()
        self.flow.resume_reading()

    def on_response_complete(self) -> None:
        if not self._lingers:
            super().on_response_complete()

    def _end_answered(self) -> None:
        """Tell the request that is being answered that its client is gone."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        cycle.transport = self._closed_by_lingering
        super()._start_asgi_task(cycle, _joined(cycle, app, self._is_last))

    def _is_last(self) -> bool:
        """Tell whether the answer that begins now is the connection's last: the process stops, and nothing more was asked."""
        return self.service.stopping and not self.pipeline

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.settings.head_within_s, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class LingeringTransport:
    """The transport of a connection as the answer to a request sees it: it closes the connection by lingering."""

    def __init__(self, connection: BoundedConnection) -> None:
        self.write, self.is_closing = connection.transport.write, connection.transport.is_closing
        self.close = connection.linger


def _joined(cycle: RequestResponseCycle, app: ASGI3Application, is_last: Callable[[], bool]) -> ASGI3Application:
    """Wrap an application so that a response whose body comes in one message is written at once. uvicorn would write the head
    first, check each header by itself, and wake the client twice. HTTP/1.0 has no chunks: there a response without a length
    ends with its connection. `is_last()`: whether the connection ends with it.
    """
    heads, chunks = cycle.scope["method"] == "HEAD", cycle.scope["http_version"] == "1.1"

    async def wrapped(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        start: HTTPResponseStartEvent | None = None
        endless = False

        async def sent(message: ASGISendEvent) -> None:
            nonlocal start, endless
            if message["type"] == "http.response.start":
                cycle.keep_alive = cycle.keep_alive and not is_last()
                has_length = any(name == b"content-length" for name, _ in message.get("headers", ()))
                if has_length and not heads:
                    start = message
                    return
                endless = not chunks and not has_length
                cycle.chunked_encoding = False if endless else None
            elif message["type"] == "http.response.body":
                if endless:
                    cycle.expected_content_length = len(message.get("body", b""))  # uvicorn checks each part against it
                begun, start = start, None
                if begun is not None and _write_joined(cycle, begun, message):
                    return
                if begun is not None:
                    await send(begun)
            await send(message)

        await app(scope, receive, sent)

    return wrapped


def _write_joined(cycle: RequestResponseCycle, start: HTTPResponseStartEvent, message: HTTPResponseBodyEvent) -> bool:
    """Write a response's head and body at once. Return False, with nothing written, where uvicorn has to write it: the body is
    not whole, a header is invalid, the connection closes after it, or the client is gone or not reading.
    """
    headers, body = list(start.get("headers", ())), message.get("body", b"")
    names, values = zip(*headers, strict=True)
    waits = cycle.disconnected or cycle.response_started or cycle.flow.write_paused
    whole = not message.get("more_body", False) and (b"content-length", b"%d" % len(body)) in headers
    sound = not HEADER_RE.search(b"".join(names)) and not HEADER_VALUE_RE.search(b"".join(values))
    if waits or not whole or not sound or not cycle.keep_alive or b"connection" in names:
        return False
    lines = map(b": ".join, (*cycle.default_headers, *headers))
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(STATUS_LINE[start["status"]] + b"\r\n".join((*lines, b"", body)))
    cycle.message_event.set()
    cycle.on_response()
    return True


def connection_class(service: Service, shedding: LoadShedding) -> type[BoundedConnection]:
    """Return the connection class of one server, with its limits."""
    own = {"service": service, "settings": service.settings, "shedding": shedding, "by_silence": OrderedDict()}
    return type("Connection", (BoundedConnection,), own)
