"""The sandbox gateway over HTTP/1.1, on this machine only: it plays an executor's outside at its worst.

    POST /payments             header Idempotency-Key, body a JSON object, `amount` a whole number in minor units: 201, or
                               202 where it is only accepted, 402 where it is declined. The same key and body again:
                               the same answer, with the header Idempotent-Replayed. Another body: 422. The same still
                               under way: 409
    GET  /payments/KEY         200 settled, rejected, accepted or pending; 404 absent: nothing is known of this key
    POST /payments/KEY/void    200 rejected: it is void; or settled: it was done before; 409 while it is under way
    GET  /statement?since=MS&until=MS&after=N    the next orders answered in this time; `next`: the `after` of the next page
    GET  /payments             what was paid under each key, the total, and which keys were paid twice
    GET  /faults, POST /faults {"lose-replies": 0.1, ...}: the faults from now on; a fault that is not named is off

With a token, each request needs `Authorization: Bearer TOKEN`. Faults apply only to requests about single payments.
"""

from __future__ import annotations

import json
import ssl
import time
from dataclasses import asdict
from hmac import compare_digest
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from sds.executors.sandbox.books import Books
from sds.executors.sandbox.faults import Fate, GatewayFaults
from sds.executors.sandbox.keyed_book import Answer
from sds.executors.sandbox.loopback import JsonHandler, LoopbackServer

BODY_BYTES_MAX = 64 * 1024
KEY_CHARS_MAX = 255
IDLE_S = 30.0
BACKLOG = 512

_CODES = {"settled": 200, "rejected": 200, "accepted": 200, "absent": 404, "conflict": 422, "pending": 409}


class GatewayServer(LoopbackServer):
    """One gateway over its books. `tls`: the context for HTTPS; None: HTTP."""

    request_queue_size = BACKLOG

    def __init__(
        self, port: int, books: Books, faults: GatewayFaults, *, token: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(port, _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.books, self.token, self.scheme = books, token, "https" if tls else "http"
        self._at_work = set[str]()
        self.misbehave(faults)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a gateway must expect clients that go away or do not speak TLS."""

    def misbehave(self, faults: GatewayFaults) -> None:
        super().misbehave(faults)
        self.books.forget_ms, self.books.accept_ms = faults.forget_keys_ms, faults.accept_ms

    def begin(self, key: str) -> bool:
        """Return whether this is the only request at work on `key`; `end` ends it."""
        with self.lock:
            free = key not in self._at_work
            self._at_work.add(key)
        return free

    def end(self, key: str) -> None:
        with self.lock:
            self._at_work.discard(key)

    def is_at_work(self, key: str) -> bool:
        with self.lock:
            return key in self._at_work


class _Handler(JsonHandler):
    server: GatewayServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def do_GET(self) -> None:  # noqa: N802  the base class's name
        parts, asked = self._parts()
        if not self._is_authorized():
            return
        if parts == ["payments"]:
            self.answer(200, self.server.books.totals())
        elif parts == ["faults"]:
            self.answer(200, asdict(self.server.faults))
        elif parts == ["statement"]:
            self._statement(asked)
        elif len(parts) == 2 and parts[0] == "payments":
            self._look_up(parts[1])
        else:
            self.malformed(404, "there is no such address")

    def do_POST(self) -> None:  # noqa: N802  as above
        parts, _ = self._parts()
        body = self.body(BODY_BYTES_MAX)
        if not self._is_authorized():
            return
        if parts == ["payments"]:
            self._pay(body)
        elif parts == ["faults"]:
            self.misbehave(body)
        elif len(parts) == 3 and parts[0] == "payments" and parts[2] == "void":
            self._void(parts[1])
        else:
            self.malformed(404, "there is no such address")

    def _parts(self) -> tuple[list[str], dict[str, list[str]]]:
        url = urlsplit(self.path)
        return [unquote(part) for part in url.path.split("/") if part], parse_qs(url.query)

    def _is_authorized(self) -> bool:
        wanted = f"Bearer {self.server.token}".encode()
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not self.server.token or compare_digest(wanted, given):
            return True
        self.malformed(401, "the bearer token is missing or wrong")
        return False

    def _pay(self, order: object) -> None:
        key = self.headers.get("Idempotency-Key", "")
        if not 0 < len(key) <= KEY_CHARS_MAX or not isinstance(order, dict) or type(order.get("amount", 0)) is not int:
            self.malformed(400, "an order must be a JSON object with a whole `amount`, and needs an Idempotency-Key")
            return
        drawn = self.server.fate(key)
        if self.fails_before_work(drawn) or not self._begin_alone(key):
            return
        try:
            time.sleep(drawn.delay_ms / 1000)
            found = self.server.books.pay(key, order, refuse=drawn.refuse)
        finally:
            self.server.end(key)
        code = {"settled": 201, "accepted": 202, "rejected": 402}.get(found.status, _CODES[found.status])
        self._reply(drawn, code, found, key)

    def _void(self, key: str) -> None:
        drawn = self.server.fate(key)
        if self.fails_before_work(drawn) or not self._begin_alone(key):
            return
        try:
            found = self.server.books.void(key)
        finally:
            self.server.end(key)
        self._reply(drawn, 200, found, key)

    def _look_up(self, key: str) -> None:
        drawn = self.server.fate(key)
        if self.fails_before_work(drawn):
            return
        at_work = self.server.is_at_work(key)
        found = self.server.books.find(key)  # read second: an order that ended in between is in the books
        if at_work and found.status == "absent":
            self.answer(200, _as_data(Answer("pending"), key))
        else:
            self._reply(drawn, _CODES[found.status], found, key)

    def _begin_alone(self, key: str) -> bool:
        if self.server.begin(key):
            return True
        self.answer(
            _CODES["pending"], _as_data(Answer("pending", detail="another request with this key is under way"), key)
        )
        return False

    def _reply(self, drawn: Fate, code: int, found: Answer, key: str) -> None:
        self.reply(drawn, code, _as_data(found, key), replayed=found.replayed)

    def _statement(self, asked: dict[str, list[str]]) -> None:
        try:
            since_ms, until_ms = int(asked["since"][0]), int(asked["until"][0])
            after = int(asked.get("after", ["0"])[0] or 0)
            lines = self.server.books.statement(since_ms, until_ms, after)
        except (KeyError, ValueError, OverflowError):
            self.malformed(400, "`since`, `until` (milliseconds) and `after` must be whole numbers")
            return
        self.answer(200, {"lines": lines, "next": str(lines[-1]["number"]) if lines else None})


def _as_data(found: Answer, key: str) -> dict[str, object]:
    named = {"id": found.reference} if found.reference else {}
    order = json.loads(found.order[0]) if found.order else {}
    ordered = {name: order[name] for name in ("amount", "currency") if name in order}
    detail = {"detail": found.detail} if found.detail else {}
    return {"key": key, "status": found.status, **named, **ordered, **detail}
