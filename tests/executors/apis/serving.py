"""What the APIs of this folder share: payments, requests as they arrive, and a server that may lose its replies."""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

Reply = tuple[int, dict[str, str], Any]

PAGE = Path(__file__).parents[3] / "docs" / "library.md"
_KEYS = ("idempotency-key", "paypal-request-id", "x-request-id")


def file_on_page(address: str, orders_at: str = "") -> str:
    """Return the gateway file of docs/library.md that is for an address, and whose orders go to a path there."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (block,) = [each for each in blocks if each.startswith(f"address: {address}\n") and f"path: {orders_at}" in each]
    return str(block)


@dataclass(frozen=True)
class Request:
    """A request. `headers`: their names in lower case. `parts`: of its path. `asked`: its query."""

    method: str
    target: str
    headers: Mapping[str, str]
    content: bytes

    @cached_property
    def parts(self) -> list[str]:
        return [unquote(part) for part in urlsplit(self.target).path.split("/") if part]

    @cached_property
    def asked(self) -> dict[str, str]:
        return {name: values[-1] for name, values in parse_qs(urlsplit(self.target).query, True).items()}

    @cached_property
    def json(self) -> Any:
        return json.loads(self.content or b"null")

    @cached_property
    def form(self) -> dict[str, str]:
        return dict(parse_qsl(self.content.decode(), keep_blank_values=True, strict_parsing=True))

    @property
    def key(self) -> str:
        return next((self.headers[name] for name in _KEYS if name in self.headers), "")


@dataclass
class Payment:
    """What one order became. `status` is the word of its API. `hidden`: look-ups do not find it yet."""

    number: int
    key: str
    account: str
    amount: Any
    currency: str
    status: str
    hidden: bool = False
    at_s: int = field(default_factory=lambda: int(time.time()))
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"p-{self.number}"


@dataclass
class Api:
    """`first`: the status of a new payment, for a test to choose. `orders`: how many requests were orders. `known`: the keys.

    `loses`: how many replies to orders are still to be lost. `hides`: look-ups do not find new payments yet.
    """

    first: str
    payments: dict[str, Payment] = field(default_factory=dict)
    known: dict[str, Payment] = field(default_factory=dict)
    orders: int = 0
    loses: int = 0
    hides: bool = False
    refuses: bool = False

    def file(self, url: str) -> str:
        """Return the gateway file for this API at an address."""
        return f"address: {url}{self.FILE}"  # type: ignore[attr-defined]

    def end(self, status: str) -> None:
        for payment in self.payments.values():
            payment.status = status

    def show(self) -> None:
        for payment in self.payments.values():
            payment.hidden = False

    def pay(self, key: str, account: str, amount: Any, currency: str) -> tuple[Payment, bool]:
        """Return the payment of a key, and whether it was there before: every API here is idempotent."""
        self.orders += 1
        if key in self.known:
            return self.known[key], True
        made = Payment(len(self.payments) + 1, key, account, amount, currency, self.first, self.hides)
        self.payments[made.id] = self.known[key] = made
        return made, False

    def found(self) -> list[Payment]:
        return [payment for payment in self.payments.values() if not payment.hidden]

    def answer(self, request: Request) -> Reply:
        raise NotImplementedError

    def loses_this(self, request: Request) -> bool:
        lost = request.method == "POST" and self.loses > 0
        self.loses -= lost
        return lost


@contextmanager
def serving(api: Api, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve an API; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self._do()

        def do_GET(self) -> None:
            self._do()

        def _do(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, headers, content)
            status, headers, data = api.answer(request)
            if api.loses_this(request):
                self.close_connection = True
                return
            self._reply(status, headers, json.dumps(data).encode())

        def _reply(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
