"""HTTP/1.1 connections that cannot be held for nothing: who is silent, slow to speak or slow to listen is closed in time.

uvicorn's own protocol bounds the silence between two requests. Here the head of a request has a length and a time as well, and
what a client does not take off its connection; beyond `connections_max` the one that has been silent longest makes place.
llhttp reads the requests (`httptools`): a quarter of what a reader written in Python takes. What it lets through and HTTP/1.1
does not is refused here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar

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

REQUEST_BYTES_MAX = 8 << 20  # as they come: of a body within its limit the frames of the smallest chunks, too
WAITING_MAX = 16  # requests of one connection behind the one that is answered; beyond them nothing more is read of it
_TAKEN = frozenset({("1.1", 1), ("1.0", 1), ("1.0", 0)})  # which version, with how many headers `Host` (RFC 9112, 3.2)
_CLOSE = (b"connection", b"close")


class BoundedConnection(HttpToolsProtocol):
    """One connection; `settings`, `shedding` and `by_silence` are set by `connection_class`."""

    settings: ClassVar[ServiceSettings]
    shedding: ClassVar[LoadShedding]
    by_silence: ClassVar[OrderedDict[BoundedConnection, None]]

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._came = 0  # bytes of the request that is being read
        self._in_head, self._upgrades, self._refused = True, False, False
        self._over = False  # nothing more is read: what was asked is answered, and then it is closed
        self._answered: RequestResponseCycle | None = None  # the oldest request that is not yet; `cycle` is the latest

    @property
    def asking(self) -> bool:
        """Whether a request is there that has not been answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.by_silence[self] = None
        self._await_head()
        if len(self.by_silence) > self.settings.connections_max:
            silent = next((each for each in self.by_silence if not each.asking), self)
            silent.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.by_silence.pop(self, None)
        self._heard()
        self._listened()
        self._gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self._over or self.transport.is_closing():  # it is lost, or was refused
            return
        self.by_silence.move_to_end(self)
        self._unset_keepalive_if_required()
        self._came += len(data)
        try:
            self._read(data)
            if self._in_head and self._came > self.settings.head_bytes_max:
                raise httptools.HttpParserError("its head is too long")
        except httptools.HttpParserError as error:
            self.send_400_response(str(error))
        if self._came > REQUEST_BYTES_MAX:
            self.transport.abort()
        if self.asking:
            self._heard()
        elif self._head_timer is None and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self._await_head()

    def _read(self, data: bytes) -> None:
        """Read what came. A request that asks for another protocol is read once more without asking: this is HTTP/1.1."""
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]

    def _without_upgrade(self) -> bytes:
        """Begin to read anew; return the head that was read, without what asks for another protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("this is no proxy")
        self.parser = httptools.HttpRequestParser(self)
        headers = (b"%b: %b" % each for each in self.headers if each[0] != b"upgrade")
        return b"\r\n".join([b"%b %b HTTP/%b" % (method, self.url, version), *headers, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()  # what came before it may have been refused at once
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer adds nothing to what was asked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer a request. What is raised is a 400."""
        size, hosts, version = len(self.url), 0, self.parser.get_http_version()
        for name, value in self.headers:
            size += len(name) + len(value)
            hosts += name == b"host"
            if name == b"transfer-encoding" and value.lower() != b"chunked":
                raise httptools.HttpParserError("its body is encoded in a way that nothing here reads")
        if size > self.settings.head_bytes_max:
            raise httptools.HttpParserError("its head is too long")
        if (version, hosts) not in _TAKEN:
            raise httptools.HttpParserError("it is no HTTP/1.1, or names no host, or two")
        if len(self.pipeline) >= WAITING_MAX:
            raise httptools.HttpParserError("too many wait behind another")
        self.expect_100_continue = self.expect_100_continue and version == "1.1"
        self._upgrades = self.parser.should_upgrade()
        self._refused = not self._upgrades and self._refuses()
        if not self._upgrades and not self._refused:
            super().on_headers_complete()  # raises for a target that is none
        self._in_head = False

    def _refuses(self) -> bool:
        """Answer a request that the service sheds at once, before a task is made for it: its body is read, and kept by nobody.

        One behind another, the last of its connection, or one that expects 100-continue takes the way of all.
        """
        last = self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive()
        waits = self.asking or self.expect_100_continue or self.flow.write_paused
        if last or waits or self.parser.get_method() != b"POST":
            return False
        found = self.shedding.refusal(self.url, self.headers)
        if found is None:
            return False
        status, headers, body = found
        lines = map(b": ".join, (*self.server_state.default_headers, *headers))
        self.transport.write(STATUS_LINE[status] + b"\r\n".join((*lines, b"", body)))
        return True

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._came, self._in_head = 0, True
        if self._refused:
            self._heard()
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
        self._listened()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  as uvicorn calls it
        """Answer what is no HTTP with a problem, where there is somebody to be answered."""
        if self.asking and not self.cycle.more_body:  # what was asked before it is answered first
            self.cycle.keep_alive, self._over = False, True
            return
        # what is wrong in a body belongs to a request, which may be answered
        unasked = self._in_head and not self.asking
        if unasked or (self.asking and self._answered is self.cycle and not self.cycle.response_started):
            problem = response_of(Problem("USAGE", "the request is no HTTP/1.1"))
            lines = [b"%b: %b\r\n" % each for each in (*problem.raw_headers, _CLOSE)]
            self.transport.write(b"".join([STATUS_LINE[problem.status_code], *lines, b"\r\n", bytes(problem.body)]))
        self._gone()
        self.transport.close()

    def _gone(self) -> None:
        """Tell the request that is being answered that nobody listens any more."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, _in_one(cycle, app))

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.settings.head_within_s, self.transport.abort)

    def _heard(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _listened(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _in_one(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Wrap an application so that an answer that is there as a whole is written at once: uvicorn writes its head first, looks at
    each header by itself, and wakes the client twice. HTTP/1.0 knows no chunks: an answer without a length ends with its
    connection.
    """
    heads, chunks = cycle.scope["method"] == "HEAD", cycle.scope["http_version"] == "1.1"

    async def wrapped(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        start: HTTPResponseStartEvent | None = None
        endless = False

        async def sent(message: ASGISendEvent) -> None:
            nonlocal start, endless
            if message["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in message.get("headers", ()))
                if has_length and not heads:
                    start = message
                    return
                endless = not chunks and not has_length
                cycle.chunked_encoding = False if endless else None
            elif message["type"] == "http.response.body":
                if endless:
                    cycle.expected_content_length = len(message.get("body", b""))  # of each part its own
                begun, start = start, None
                if begun is not None and _written(cycle, begun, message):
                    return
                if begun is not None:
                    await send(begun)
            await send(message)

        await app(scope, receive, sent)

    return wrapped


def _written(cycle: RequestResponseCycle, start: HTTPResponseStartEvent, message: HTTPResponseBodyEvent) -> bool:
    """Write an answer whose head and body are given; return False where that is for uvicorn: it is no whole one, closes its
    connection, or has to wait for its client.
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


def connection_class(settings: ServiceSettings, shedding: LoadShedding) -> type[BoundedConnection]:
    """Return the class of one server's connections, with its limits."""
    own = {"settings": settings, "shedding": shedding, "by_silence": OrderedDict()}
    return type("Connection", (BoundedConnection,), own)
