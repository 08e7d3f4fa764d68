"""Servers for the tests: llama.cpp's own, and small sockets that misbehave."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

START_S = 60
HANG_S = 20.0  # longer than any test waits
N_CTX = 2048


def free_port() -> int:
    """Return a port that is free and stays so: it lies below those that a system gives to who names none."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class LlamaServer:
    """llama.cpp's server in a process of its own; it can be killed and started again on its port."""

    model: Path
    log: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        threads = os.environ.get("SDS_THREADS", "1")
        options = {"model": self.model, "host": "127.0.0.1", "port": self.port, "n_ctx": N_CTX, "n_threads": threads}
        options |= {"n_threads_batch": threads, "verbose": "false"}
        told = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llama_cpp.server", *told], stdout=log, stderr=subprocess.STDOUT
            )
        self._wait()

    def _wait(self) -> None:
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up and self.process is not None and self.process.poll() is None:
            with suppress(OSError), closing(socket.create_connection(("127.0.0.1", self.port), 1)):
                return
            time.sleep(0.05)
        raise AssertionError(f"llama.cpp's server does not start:\n{self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_S)
            self.process = None


Misdeed = Callable[[socket.socket, bytes], None]


@contextmanager
def misbehaving(misdeed: Misdeed) -> Iterator[tuple[str, list[bytes]]]:
    """Serve `misdeed(connection, request)` on loopback; yield the url and the requests that came."""
    requests: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    threading.Thread(target=_serve, args=(listener, misdeed, requests), daemon=True).start()
    try:
        yield url, requests
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, misdeed: Misdeed, requests: list[bytes]) -> None:
    with listener:  # closed here: closed by another thread, its number may be the next server's when this one accepts
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_one, args=(connection, misdeed, requests), daemon=True).start()


def _one(connection: socket.socket, misdeed: Misdeed, requests: list[bytes]) -> None:
    with closing(connection), suppress(OSError):
        connection.settimeout(HANG_S)
        request = _read(connection)
        requests.append(request)
        misdeed(connection, request)


def _read(connection: socket.socket) -> bytes:
    """Return one whole request, headers and body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def body_of(request: bytes) -> dict[str, object]:
    found = json.loads(request.partition(b"\r\n\r\n")[2])
    assert isinstance(found, dict)
    return found


def reply(connection: socket.socket, body: bytes, status: str = "200 OK", more: str = "") -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    connection.sendall(head.encode() + body)


def completion(text: str, finish_reason: str = "stop") -> bytes:
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text}}
    whole = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return json.dumps({**whole, "usage": {"total_tokens": 7, "prompt_tokens": 3, "completion_tokens": 4}}).encode()


def hang(connection: socket.socket, _request: bytes) -> None:
    connection.recv(1)  # until the other side goes away


def drip_headers(connection: socket.socket, _request: bytes) -> None:
    _drip(connection, b"HTTP/1.1 200 OK\r\nX-Slow: ", b"a")


def drip_body(connection: socket.socket, _request: bytes) -> None:
    _drip(connection, b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{", b" ")


def _drip(connection: socket.socket, first: bytes, then: bytes) -> None:
    connection.sendall(first)
    give_up = time.monotonic() + HANG_S
    while time.monotonic() < give_up:
        connection.sendall(then)
        time.sleep(0.05)


def flood(connection: socket.socket, _request: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    give_up = time.monotonic() + HANG_S
    while time.monotonic() < give_up:
        connection.sendall(b"x" * 65536)


def continue_forever(connection: socket.socket, _request: bytes) -> None:
    _drip(connection, b"", b"HTTP/1.1 100 Continue\r\n\r\n")


def garbage(connection: socket.socket, _request: bytes) -> None:
    connection.sendall(b"\x00\xff I am no server\r\n\r\n")


def half_json(connection: socket.socket, _request: bytes) -> None:
    reply(connection, b'{"choices": [{"message": {"content": ')


def no_text(connection: socket.socket, _request: bytes) -> None:
    reply(connection, b'{"choices": [{"message": {"content": 5}}]}')


def nested(connection: socket.socket, _request: bytes) -> None:
    reply(connection, b"[" * 100_000)


def redirect(connection: socket.socket, _request: bytes) -> None:
    reply(connection, b"", "307 Temporary Redirect", "Location: http://127.0.0.1:1/elsewhere\r\n")


def fail(connection: socket.socket, _request: bytes) -> None:
    reply(connection, b'{"error": "out of memory"}', "503 Service Unavailable")


def hang_up(_connection: socket.socket, _request: bytes) -> None:
    """Close without a word."""


def cut_short(connection: socket.socket, _request: bytes) -> None:
    reply(connection, completion('{"action":"ESC', "length"))


FAULTS: dict[str, Misdeed] = {
    "hangs": hang,
    "drips its headers": drip_headers,
    "drips its body": drip_body,
    "never ends": flood,
    "continues forever": continue_forever,
    "speaks no HTTP": garbage,
    "answers half": half_json,
    "answers a number": no_text,
    "answers nested brackets": nested,
    "redirects": redirect,
    "fails": fail,
    "hangs up": hang_up,
    "cuts the answer short": cut_short,
}
