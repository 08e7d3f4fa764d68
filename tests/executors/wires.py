"""Gateways of single bytes, at an address of this machine: what they answer is exactly what a test gives them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

KEY = "k" * 64
GOOD = {"key": KEY, "status": "settled", "id": "p-1", "amount": 120, "currency": "EUR"}


@contextmanager
def _meeting(meet: Callable[[socket.socket], None]) -> Iterator[str]:
    """Accept one connection after another, and hang up when `meet` has returned; yield the address."""
    server = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{server.getsockname()[1]}"

    def serve() -> None:
        with server:  # closed here: closed by another thread, its number may be the next server's when this one accepts
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    meet(connection)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield address
    finally:
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


@contextmanager
def answering(reply: bytes | Callable[[bytes], bytes]) -> Iterator[str]:
    """Answer every request with these bytes, and hang up."""

    def meet(connection: socket.socket) -> None:
        asked = connection.recv(65_536)
        connection.sendall(reply(asked) if callable(reply) else reply)

    with _meeting(meet) as url:
        yield url


@contextmanager
def keeping_connections(replies: Callable[[int], bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """Answer the requests of a connection until a reply (by its number, from 0) is empty; yield the requests, too."""
    asked = list[bytes]()

    def meet(connection: socket.socket) -> None:
        with connection.makefile("rb") as reading:
            while request := _request(reading):
                asked.append(request)
                if not (reply := replies(len(asked) - 1)):
                    break
                connection.sendall(reply)

    with _meeting(meet) as url:
        yield url, asked


def _request(reading: BinaryIO) -> bytes:
    """Return one whole request, b"" at the end."""
    head = b""
    while (line := reading.readline()) not in (b"", b"\r\n"):
        head += line
    length = next((int(each[15:]) for each in head.lower().split(b"\r\n") if each.startswith(b"content-length:")), 0)
    return head + reading.read(length)


def http(status: str, body: bytes, *headers: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers])
    return head.encode() + b"\r\n\r\n" + body


def kept(body: bytes, *headers: str) -> bytes:
    return http("201 Created", body, *headers).replace(b"Connection: close", b"Connection: keep-alive")
