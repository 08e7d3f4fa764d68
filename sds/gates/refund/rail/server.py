"""The demo's payment rail: a process with a file of its own, which misbehaves on request.

    python -m sds.gates.refund.rail.server --db FILE [--port 0]

HTTP on 127.0.0.1 only, one request a connection, bodies in JSON:

    POST /pay            {"key","kind","amount_minor","ticket_id","dfid"}: pay once for a key. The same key and order
                         again: the stored answer. The same key, another order: 409, nothing is paid.
    GET  /pay/KEY        settled | rejected | absent | pending. `absent`: nothing was done under this key, and no
                         request that arrived before this question can still do it.
    POST /void           {"key"}: never pay under this key: rejected; or its earlier outcome, or pending.
    POST /revert         {"key"}: take back, whole and once, what was paid under this key; rejected when nothing was.
    GET  /revert/KEY     settled: it was taken back | absent: it was not, nor by any request that arrived before | pending
    GET  /statement/SINCE/UNTIL/N
                         the next orders answered in this time span (milliseconds since 1970), after number N, each in its
                         current state: settled, rejected or reverted; an empty list after the last
    POST /faults         {"lose_reply","fail","drop_before": 0..1, "delay_ms", "seed"}: from now on, lose replies after
                         the work is done, decline, close the connection before any work, wait before the work

It prints one JSON line with its port when it is ready. It exits when its standard input closes, so an orphan cannot go
on paying.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from socket import socket
from socketserver import TCPServer
from threading import Condition, Thread
from typing import Any

from .store import Answer, PayoutStore, is_key, parse_order

BODY_BYTES_MAX = 4096
CONNECTIONS_MAX = 256
DELAY_MS_MAX = 60_000
NUMBER_DIGITS_MAX = 18
REQUEST_S = 5.0
SETTLING_S = 0.05
_DECLINED = Answer("rejected", detail="the rail declined to take it back")


@dataclass(frozen=True, slots=True)
class Faults:
    """How the rail misbehaves: probabilities between 0 and 1, a delay, and the seed of the draws."""

    lose_reply: float = 0.0
    fail: float = 0.0
    drop_before: float = 0.0
    delay_ms: int = 0
    seed: int = 0


def parse_faults(data: object) -> Faults | str:
    """Return the faults, or one line that says what is wrong with them. A fault that is not named is off."""
    names = {field.name for field in fields(Faults)}
    if not isinstance(data, dict) or not set(data) <= names:
        return f"choose faults from: {', '.join(sorted(names))}"
    for name in ("lose_reply", "fail", "drop_before"):
        value = data.get(name, 0.0)
        if type(value) not in {int, float} or not 0 <= value <= 1:
            return f"{name} is not between 0 and 1"
    if type(data.get("seed", 0)) is not int:
        return "seed is not an integer"
    delay_ms = data.get("delay_ms", 0)
    if type(delay_ms) is not int or not 0 <= delay_ms <= DELAY_MS_MAX:
        return f"delay_ms is not an integer between 0 and {DELAY_MS_MAX}"
    return Faults(**data)


class Arrivals:
    """The requests being served. They make `absent` a certain answer, and their number is limited.

    Connections are numbered in the order in which they arrive. A key is absent only when no request works on it and
    every earlier connection has been read, so that none of them can turn out to be an order for it.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._arrived = 0
        self._open: set[int] = set()
        self._unread: set[int] = set()
        self._working: Counter[str] = Counter()
        self._faults, self._rng = Faults(), Random(0)  # noqa: S311 - faults are to be repeatable, not secret

    def arrive(self) -> int:
        with self._changed:
            self._arrived += 1
            self._open.add(self._arrived)
            self._unread.add(self._arrived)
            return self._arrived

    def crowded(self) -> bool:
        with self._changed:
            return len(self._open) > CONNECTIONS_MAX

    def was_read(self, number: int, key: str = "") -> None:
        with self._changed:
            self._unread.discard(number)
            if key:
                self._working[key] += 1
            self._changed.notify_all()

    def done(self, key: str) -> None:
        with self._changed:
            self._working[key] -= 1
            self._working += Counter()  # drops keys with a count of 0

    def leave(self, number: int) -> None:
        with self._changed:
            self._open.discard(number)
            self._unread.discard(number)
            self._changed.notify_all()

    def working_on(self, key: str) -> bool:
        with self._changed:
            return self._working[key] > 0

    def certain(self, number: int, key: str) -> bool:
        """Return whether no request that arrived before `number` can still do anything under `key`."""
        with self._changed:
            self._changed.wait_for(lambda: min(self._unread, default=number) >= number, SETTLING_S)
            return min(self._unread, default=number) >= number and not self._working[key]

    def misbehave(self, faults: Faults) -> None:
        with self._changed:
            self._faults, self._rng = faults, Random(faults.seed)  # noqa: S311

    def draw(self) -> tuple[bool, bool, bool, int]:
        """Draw the faults of one order: (drop before, fail, lose the reply, delay in milliseconds)."""
        with self._changed:
            drop, fail, lose = (self._rng.random() for _ in range(3))
            faults = self._faults
        return drop < faults.drop_before, fail < faults.fail, lose < faults.lose_reply, faults.delay_ms


class RailServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = CONNECTIONS_MAX

    def __init__(self, port: int, store: PayoutStore) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.store, self.arrivals = store, Arrivals()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # not HTTPServer's, which asks the name service for a host name
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def get_request(self) -> tuple[socket, Any]:
        connection, address = super().get_request()
        return connection, (*address[:2], self.arrivals.arrive())

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the base class's form
        if not self.arrivals.crowded():
            return True
        self.arrivals.leave(client_address[2])
        return False

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        self.arrivals.leave(client_address[2])
        sys.stderr.write(f"rail: {type(sys.exception()).__name__} while answering\n")


class Handler(BaseHTTPRequestHandler):
    """Reads one request and answers it. A malformed request gets a 4xx and pays nothing."""

    server: RailServer
    timeout = REQUEST_S
    error_message_format = '{"status":"malformed","detail":"%(code)d"}'
    error_content_type = "application/json"

    def do_GET(self) -> None:
        self.server.arrivals.was_read(self.client_address[-1])
        what, _, name = self.path.removeprefix("/").partition("/")
        if what == "statement" and (asked := _numbers(name)) is not None:
            self._answer(200, {"lines": [asdict(line) for line in self.server.store.statement(*asked)]})
        elif what in {"pay", "revert"} and is_key(name):
            self._look_up(what, name)
        else:
            self._malformed("no such path")

    def do_POST(self) -> None:
        data = self._body()
        if self.path == "/pay":
            order = parse_order(data)
            if isinstance(order, str):
                self._malformed(order)
            else:
                self._carry_out(order.key, lambda fail: self.server.store.pay(order, refuse=fail))
        elif self.path in {"/void", "/revert"}:
            key = data.get("key") if isinstance(data, dict) and set(data) == {"key"} else None
            if not is_key(key):
                self._malformed(f"a {self.path[1:]} has exactly: key")
                return
            if self.path == "/void":
                self._void(str(key))
            else:
                self._carry_out(str(key), lambda fail: _DECLINED if fail else self.server.store.revert(str(key)))
        elif self.path == "/faults":
            faults = parse_faults(data)
            if isinstance(faults, str):
                self._malformed(faults)
                return
            self.server.arrivals.misbehave(faults)
            self._answer(200, asdict(faults))
        else:
            self._malformed("no such order")

    def finish(self) -> None:
        with suppress(OSError):  # the client may be gone
            super().finish()
        self.server.arrivals.leave(self.client_address[-1])

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Print nothing: the rail's record is its file."""

    def _look_up(self, what: str, key: str) -> None:
        # The file is read second: an order that commits in between is found there.
        certain = self.server.arrivals.certain(self.client_address[-1], key)
        answer = (self.server.store.find if what == "pay" else self.server.store.reverted)(key)
        status = "pending" if answer.status == "absent" and not certain else answer.status
        self._answer(200, {**asdict(answer), "status": status, "key": key})

    def _carry_out(self, key: str, work: Callable[[bool], Answer]) -> None:
        """Do work that moves money, with the faults drawn for it."""
        drop, fail, lose, delay_ms = self.server.arrivals.draw()
        if drop:
            return
        self.server.arrivals.was_read(self.client_address[-1], key)
        try:
            time.sleep(delay_ms / 1000)
            answer = work(fail)
        finally:
            self.server.arrivals.done(key)
        if not lose:
            self._answer(409 if answer.status == "conflict" else 200, {**asdict(answer), "key": key})

    def _void(self, key: str) -> None:
        # An order for this key that no thread works on yet will find it void, whenever it arrived.
        self.server.arrivals.was_read(self.client_address[-1])
        working = self.server.arrivals.working_on(key)
        answer = self.server.store.find(key) if working else self.server.store.void(key)
        status = "pending" if answer.status == "absent" else answer.status
        self._answer(200, {**asdict(answer), "status": status, "key": key})

    def _body(self) -> object:
        """Return the parsed body; None without a usable one."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json" or not length.isascii() or not length.isdigit():
            return None
        if len(length) > 9 or int(length) > BODY_BYTES_MAX:
            return None
        try:
            return json.loads(self.rfile.read(int(length)).decode())
        except (ValueError, RecursionError):
            return None

    def _malformed(self, detail: str) -> None:
        self._answer(400, {"status": "malformed", "detail": detail})

    def _answer(self, code: int, data: object) -> None:
        body = json.dumps(data).encode()
        with suppress(OSError):
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def _numbers(path: str) -> tuple[int, int, int] | None:
    """Return since, until, and the number after which to go on; None for anything else."""
    parts = path.split("/")
    if len(parts) != 3 or not all(p.isascii() and p.isdigit() and len(p) <= NUMBER_DIGITS_MAX for p in parts):
        return None
    since_ms, until_ms, after = map(int, parts)
    return since_ms, until_ms, after


def _stop_with_input(server: RailServer) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    server.shutdown()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sds.gates.refund.rail.server", description="The demo's payment rail.")
    parser.add_argument("--db", type=Path, required=True, help="the rail's own SQLite file")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1, 0: any free one")
    options = parser.parse_args(arguments)
    try:
        store = PayoutStore(options.db, lambda: time.time_ns() // 1_000_000)
        server = RailServer(options.port, store)
    except (sqlite3.Error, OSError, OverflowError) as error:
        return _cannot_start(options, error)
    with server, suppress(KeyboardInterrupt):
        try:
            Thread(target=_stop_with_input, args=(server,), daemon=True).start()
        except RuntimeError as error:  # the machine is out of threads
            return _cannot_start(options, error)
        sys.stdout.write(json.dumps({"ready": True, "port": server.server_port}) + "\n")
        sys.stdout.flush()
        server.serve_forever(poll_interval=0.05)
    return 0


def _cannot_start(options: argparse.Namespace, error: Exception) -> int:
    sys.stderr.write(f"rail: cannot start on `{options.db}`, port {options.port}: {error}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
