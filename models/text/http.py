"""One HTTP exchange that ends in time, whatever the other side does: hangs, drips, never stops, redirects.

httpx's own time limits apply to each read, and one byte a second keeps every read short. So the exchange is
asynchronous and is cancelled as a whole at the deadline. It runs in a thread of its own, because a name look-up cannot
be cancelled, only abandoned. Proxies in the environment are not used.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from dataclasses import dataclass
from threading import BoundedSemaphore, Thread
from urllib.parse import urlsplit

from sds.models.protocol import BackendError

BODY_BYTES_MAX = 1 << 20
REQUEST_BYTES_MAX = 4 << 20
EXCHANGES_MAX = 32  # including those that hang in a name look-up
SHOWN_CHARS = 120
URL_HINT = "http://127.0.0.1:8000/v1"

_UNSHOWN = re.compile(r"[^ -~]+")
_free = BoundedSemaphore(EXCHANGES_MAX)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server: `http://host:port/path`. Raises `BackendError` for any other shape, credentials included."""

    url: str

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            _ = parts.port  # raises unless it is a number
        except ValueError as error:
            raise BackendError("the url is malformed", hint=URL_HINT) from error
        plain = not (
            "@" in self.url or parts.query or parts.fragment
        )  # a `/` in a password leaves its rest in the path
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
            raise BackendError("the url is not `http(s)://host:port/path`", hint=URL_HINT)

    @property
    def path(self) -> str:
        return urlsplit(self.url).path.rstrip("/")


def post(address: Address, path: str, body: bytes, headers: dict[str, str], *, timeout_s: float) -> bytes:
    """Post `body` to a path under the address and return the body of the answer.

    Raises BackendError for anything but a whole answer with status 200, of at most BODY_BYTES_MAX, in time.
    """
    if len(body) > REQUEST_BYTES_MAX:
        raise BackendError(f"a request of {len(body)} bytes is larger than {REQUEST_BYTES_MAX}")
    if timeout_s <= 0:
        raise BackendError("no time is left to ask the server")
    if not _free.acquire(blocking=False):
        raise BackendError(f"{EXCHANGES_MAX} requests to servers have not ended yet")
    outcome: list[bytes | BackendError] = []

    def exchange() -> None:
        try:
            outcome.append(asyncio.run(_exchange(address.url.rstrip("/") + path, body, headers, timeout_s)))
        except Exception as error:  # noqa: BLE001  passed on to the calling thread
            outcome.append(_failure(error, timeout_s))
        finally:
            _free.release()

    thread = Thread(target=exchange, daemon=True, name="sds-exchange")
    try:
        thread.start()
    except RuntimeError as error:
        _free.release()
        raise BackendError("no thread can be started") from error
    thread.join(timeout_s)
    (found,) = outcome or [_failure(TimeoutError(), timeout_s)]
    if isinstance(found, BackendError):
        raise found
    return found


async def _exchange(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> bytes:
    from httpx2 import AsyncClient, RemoteProtocolError  # noqa: PLC0415  loaded when a server is asked

    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Connection": "close", **headers}
    secure = urlsplit(url).scheme == "https"  # urlsplit lowers the scheme
    verify = ssl.create_default_context() if secure else False  # reading the certificates takes a while
    async with (
        asyncio.timeout(timeout_s),
        AsyncClient(trust_env=False, follow_redirects=False, verify=verify, timeout=timeout_s) as client,
        client.stream("POST", url, content=body, headers=headers) as response,
    ):
        answer = b""
        try:
            async for some in response.aiter_raw():
                answer += some
                if len(answer) > BODY_BYTES_MAX:
                    raise BackendError(f"the server's answer is longer than {BODY_BYTES_MAX} bytes")
        except RemoteProtocolError as error:
            raise BackendError("the server's answer is incomplete") from error
    if response.status_code != 200:
        said = _UNSHOWN.sub(" ", answer[:SHOWN_CHARS].decode("utf-8", "replace")).strip()
        hint = "check the path of the url: it ends with /v1, for TGI without" if response.status_code == 404 else ""
        raise BackendError(
            f"the server answered with status {response.status_code}{f': {said}' if said else ''}", hint=hint
        )
    return answer


def _failure(error: Exception, timeout_s: float) -> BackendError:
    """Return an error of the exchange in one line, with its cause."""
    import httpx2  # noqa: PLC0415  it is loaded by now

    if isinstance(error, BackendError):
        return error
    if isinstance(error, (TimeoutError, httpx2.TimeoutException)):
        found = BackendError(f"the server did not answer within {round(timeout_s * 1000)} ms")
    elif isinstance(error, (httpx2.ReadError, httpx2.WriteError, httpx2.CloseError)):
        found = BackendError("the server closed the connection before it had answered")
    elif isinstance(error, (httpx2.NetworkError, OSError)):
        said = _UNSHOWN.sub(" ", str(error) or "it closed the connection").lower()
        found = BackendError(f"the server cannot be reached: {said[:SHOWN_CHARS]}")
    elif isinstance(error, httpx2.ProtocolError):
        found = BackendError("the server does not speak HTTP, or closed the connection")
    else:
        found = BackendError(f"the request to the server failed: {type(error).__name__}")
    found.__cause__ = error
    return found
