"""HTTP/1.1 connections that cannot be held for nothing: who is silent, slow to speak or slow to listen is closed in time.

uvicorn's own protocol bounds the silence between two requests. Here the head of a request has a time as well, and what a
client does not take off its connection; beyond `connections_max` the one that has been silent longest makes place.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sds.service.problems import Problem, response_of
from sds.service.settings import ServiceSettings


class BoundedConnection(H11Protocol):
    """One connection; `settings` and `by_silence` are set by `connection_class`."""

    settings: ClassVar[ServiceSettings]
    by_silence: ClassVar[OrderedDict[BoundedConnection, None]]

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

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
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.by_silence.move_to_end(self)
        super().data_received(data)
        if self.asking:
            self._heard()
        elif self._head_timer is None and not self.transport.is_closing():
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.settings.body_within_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._listened()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  as uvicorn calls it
        """Answer what is no HTTP with a problem, where there is somebody to be answered."""
        problem = response_of(Problem("USAGE", "the request is no HTTP/1.1"))
        head = h11.Response(status_code=problem.status_code, headers=[*problem.raw_headers, (b"connection", b"close")])
        with suppress(h11.LocalProtocolError):  # an answer was begun already
            for event in (head, h11.Data(data=bytes(problem.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

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


def connection_class(settings: ServiceSettings) -> type[BoundedConnection]:
    """Return the class of one server's connections, with its limits."""
    return type("Connection", (BoundedConnection,), {"settings": settings, "by_silence": OrderedDict()})
