"""One HTTP exchange that ends in time, whatever the other side does: hangs, drips, never stops, redirects.

A time limit on each read is not enough: a byte a second keeps every read short. So the exchange runs in a thread of
its own, and at the deadline its socket is shut down. Proxies named in the environment are not used.
"""

from __future__ import annotations

import re
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from threading import BoundedSemaphore, Thread
from urllib.parse import urlsplit

from sds.models.protocol import BackendError

BODY_BYTES_MAX = 1 << 20
REQUEST_BYTES_MAX = 4 << 20
EXCHANGES_MAX = 32  # those that hang in a name look-up cannot be ended, only counted
SHOWN_CHARS = 120

_UNSHOWN = re.compile(r"[^ -~]+")
_free = BoundedSemaphore(EXCHANGES_MAX)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: `http://host:port/path`. Raises `BackendError` for any other shape, credentials included."""

    url: str
    secure: bool = field(init=False)
    host: str = field(init=False)
    port: int = field(init=False)
    path: str = field(init=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise BackendError("the url cannot be read", hint="http://127.0.0.1:8000/v1") from error
        plain = not (parts.username or parts.password or parts.query or parts.fragment)
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
            raise BackendError("the url is not `http(s)://host:port/path`", hint="http://127.0.0.1:8000/v1")
        for name, value in (
            ("secure", parts.scheme == "https"),
            ("host", parts.hostname),
            ("port", port or (443 if parts.scheme == "https" else 80)),
            ("path", parts.path.rstrip("/")),
        ):
            object.__setattr__(self, name, value)


def post(address: Address, path: str, body: bytes, headers: dict[str, str], *, timeout_s: float) -> bytes:
    """Post `body` to a path under the address and return the body of the answer.

    Raises BackendError for anything but a whole answer with status 200, of at most BODY_BYTES_MAX, in time.
    """
    if len(body) > REQUEST_BYTES_MAX:
        raise BackendError(f"a request of {len(body)} bytes is larger than {REQUEST_BYTES_MAX}")
    if timeout_s <= 0:
        raise BackendError("no time is left to ask the server")
    if not _free.acquire(blocking=False):
        raise BackendError(f"{EXCHANGES_MAX} exchanges with servers are hanging")
    exchange = _Exchange(address, address.path + path, body, headers, timeout_s)
    thread = Thread(target=exchange.run, daemon=True, name="sds-exchange")
    try:
        thread.start()
    except RuntimeError as error:
        _free.release()
        raise BackendError("the machine has no thread left") from error
    thread.join(timeout_s)
    if thread.is_alive():
        exchange.abandon()
        raise BackendError(f"the server did not answer within {round(timeout_s * 1000)} ms")
    return exchange.result()


class _Exchange:
    """One request and its answer, in a thread of its own."""

    def __init__(self, address: Address, path: str, body: bytes, headers: dict[str, str], timeout_s: float) -> None:
        self._address, self._path, self._body, self._timeout_s = address, path, body, timeout_s
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        self._socket: socket.socket | None = None
        self._abandoned = False
        self._status, self._answer = 0, b""
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  handed to the thread that asked
            self._error = error
        finally:
            _free.release()

    def _run(self) -> None:
        at = self._address
        connection = (
            HTTPSConnection(at.host, at.port, timeout=self._timeout_s, context=ssl.create_default_context())
            if at.secure
            else HTTPConnection(at.host, at.port, timeout=self._timeout_s)
        )
        try:
            connection.connect()
            self._socket = connection.sock
            if self._abandoned:
                return
            connection.request("POST", self._path, self._body, {**self._headers, "Connection": "close"})
            response = connection.getresponse()
            self._status = response.status
            self._answer = response.read(BODY_BYTES_MAX + 1)
            if response.length and len(self._answer) <= BODY_BYTES_MAX:  # what was announced and did not come
                raise IncompleteRead(self._answer, response.length)
        finally:
            connection.close()

    def abandon(self) -> None:
        self._abandoned = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def result(self) -> bytes:
        error = self._error
        if isinstance(error, OSError):
            why = "did not answer in time" if isinstance(error, TimeoutError) else "cannot be reached"
            raise BackendError(f"the server {why}: {(error.strerror or type(error).__name__).lower()}") from error
        if isinstance(error, IncompleteRead):
            raise BackendError("the server's answer is shorter than it announced") from error
        if isinstance(error, HTTPException):
            raise BackendError("the server does not speak HTTP") from error
        if error is not None:
            raise BackendError("the exchange with the server failed") from error
        if len(self._answer) > BODY_BYTES_MAX:
            raise BackendError(f"the server's answer is longer than {BODY_BYTES_MAX} bytes")
        if self._status != 200:
            said = _UNSHOWN.sub(" ", self._answer[:SHOWN_CHARS].decode("utf-8", "replace")).strip()
            hint = "does the url end as the server's own do: in /v1, for TGI without?" if self._status == 404 else ""
            raise BackendError(
                f"the server answered with status {self._status}{f': {said}' if said else ''}", hint=hint
            )
        return self._answer
