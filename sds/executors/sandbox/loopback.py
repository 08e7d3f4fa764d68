"""What the sandbox gateway and the refund gate's payment rail share: HTTP on this machine only, JSON, and faults."""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Lock
from typing import Any

from sds.executors.sandbox.faults import Fate, GatewayFaults, fate, read_faults
from sds.kernel.errors import UsageError

AGAIN_S = 0.02  # before a reply is sent again: the client may have sent its next question by then


class LoopbackServer(ThreadingHTTPServer):
    """A server on 127.0.0.1 that misbehaves on request. Port 0 takes any free one."""

    daemon_threads = True

    def __init__(self, port: int, handler: type[JsonHandler]) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.faults, self.lock, self.turns = GatewayFaults(), Lock(), Counter[str]()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # not HTTPServer's, which asks the name service for a host name
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def misbehave(self, faults: GatewayFaults) -> None:
        self.faults = faults

    def fate(self, key: str) -> Fate:
        with self.lock:
            self.turns[key] += 1
            turn = self.turns[key]
        return fate(self.faults, key, turn)


class JsonHandler(BaseHTTPRequestHandler):
    """Reads and writes JSON, and gives a request the fate that was drawn for it."""

    server: LoopbackServer
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait 40 ms for an acknowledgement
    error_content_type = "application/json"
    error_message_format = '{"status":"malformed","detail":"%(code)d"}'

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Print nothing."""

    def body(self, bytes_max: int) -> object:
        """Return the parsed body; None without a usable one."""
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit()) or len(length) > 9 or int(length) > bytes_max:
            self.close_connection = True
            return None
        try:
            return json.loads(self.rfile.read(int(length)).decode() or "null")
        except (ValueError, RecursionError):
            return None

    def misbehave(self, body: object) -> None:
        """Set the faults from now on, and show them."""
        try:
            self.server.misbehave(read_faults(body if isinstance(body, dict) else {"": body}))
        except UsageError as error:
            self.malformed(400, str(error))
            return
        self.answer(200, asdict(self.server.faults))

    def fails_before_work(self, drawn: Fate) -> bool:
        if drawn.down:
            self.answer(503, {"status": "down"})
        elif drawn.fail_before:
            self.answer(500, {"status": "failed"})
        elif drawn.drop:
            self.close_connection = True
        return drawn.down or drawn.fail_before or drawn.drop

    def reply(self, drawn: Fate, code: int, data: object, *, replayed: bool = False) -> None:
        if drawn.lose:
            self.close_connection = True
        elif drawn.fail_after:
            self.answer(500, {"status": "failed"})
        else:
            self.answer(code, data, replayed=replayed, cut=drawn.cut)
            if drawn.twice:
                time.sleep(AGAIN_S)
                self.answer(code, data, replayed=replayed)

    def malformed(self, code: int, detail: str) -> None:
        self.answer(code, {"status": "malformed", "detail": detail})

    def answer(self, code: int, data: object, *, replayed: bool = False, cut: bool = False) -> None:
        body = json.dumps(data).encode()
        with suppress(OSError):
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if replayed:
                self.send_header("Idempotent-Replayed", "true")
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = self.close_connection or cut
