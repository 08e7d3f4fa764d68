"""A minimal HTTP/1.1 client, so that the sender does not slow the measurement: one request at a time on a connection.

It reads only answers with `Content-Length`; anything else fails the run. It does not retry or redirect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

HEAD_BYTES_MAX = 64 * 1024
LOST = 0  # the status of a request without an answer


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply. `status`: LOST where the connection broke; `at_s`: when it was complete, by `time.perf_counter`."""

    status: int
    body: bytes
    at_s: float


Done = Callable[[Reply], None]


class Connection(asyncio.Protocol):
    """One connection, for one request after another; `done` is called with each reply."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer, self._needed, self._status, self._from = bytearray(), -1, LOST, 0
        self._done: Done | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, data: bytes, done: Done) -> None:
        self._done = done
        self._buffer.clear()
        self._needed = -1
        if self._transport is None or self._transport.is_closing():
            self._reply(LOST, b"")
        else:
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._reply(LOST, b"")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._needed < 0 and not self._read_head():
            return
        if len(self._buffer) - self._from >= self._needed:
            self._reply(self._status, bytes(self._buffer[self._from : self._from + self._needed]))

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            assert len(self._buffer) < HEAD_BYTES_MAX, "a head without an end"
            return False
        head = bytes(self._buffer[:end]).lower()
        _, found, rest = head.partition(b"\r\ncontent-length:")
        assert found, head
        self._status, self._from = int(head[9:12]), end + 4
        self._needed = int(rest.partition(b"\r\n")[0])
        return True

    def _reply(self, status: int, body: bytes) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(Reply(status, body, time.perf_counter()))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Pool:
    """Connections to one address. A request takes an idle one, else a new one, up to `most`, else waits for one."""

    def __init__(self, host: str, port: int, most: int) -> None:
        self._host, self._port, self._most = host, port, most
        self._idle, self._waiting = list[Connection](), list[tuple[bytes, Done]]()
        self.opened, self._opening = 0, set[asyncio.Task[None]]()

    async def open(self, n: int) -> None:
        """Open connections before they are needed."""
        self._idle += [await self._connect() for _ in range(n)]

    async def _connect(self) -> Connection:
        self.opened += 1
        _, connection = await asyncio.get_running_loop().create_connection(Connection, self._host, self._port)
        return connection

    def ask(self, data: bytes, done: Done) -> None:
        """Send a request as soon as there is a connection for it."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                self._send(connection, data, done)
                return
            self.opened -= 1
        if self.opened < self._most:
            task = asyncio.create_task(self._send_on_new(data, done))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            self._waiting.append((data, done))

    async def _send_on_new(self, data: bytes, done: Done) -> None:
        try:
            connection = await self._connect()
        except OSError:
            self.opened -= 1
            done(Reply(LOST, b"", time.perf_counter()))
            return
        self._send(connection, data, done)

    def _send(self, connection: Connection, data: bytes, done: Done) -> None:
        def over(reply: Reply) -> None:
            if not connection.is_open:
                self.opened -= 1
            elif self._waiting:
                self._send(connection, *self._waiting.pop(0))
            else:
                self._idle.append(connection)
            done(reply)

        connection.ask(data, over)

    async def asked(self, data: bytes) -> Reply:
        """Send one request and return its reply."""
        future = asyncio.get_running_loop().create_future()
        self.ask(data, future.set_result)
        found: Reply = await future
        return found

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


def request_of(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: load", f"Content-Length: {len(body)}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
