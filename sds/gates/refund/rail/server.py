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
    POST /faults         those of the sandbox gateway, but accept-ms and forget-keys-ms: from now on, for payments and reversals

It prints one JSON line with its port when it is ready. It exits when its standard input closes, so an orphan cannot go
on paying.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from socket import socket
from threading import Condition, Thread
from typing import Any

from sds.executors.sandbox.faults import GatewayFaults
from sds.executors.sandbox.keyed_book import Answer
from sds.executors.sandbox.loopback import JsonHandler, LoopbackServer

from .store import PayoutStore, is_key, parse_order

BODY_BYTES_MAX = 4096
CONNECTIONS_MAX = 256
REQUEST_S = 5.0
SETTLING_S = 0.05
_SPAN = re.compile(r"([0-9]{1,18})/([0-9]{1,18})/([0-9]{1,18})")  # since, until, and the number after which to go on
_DECLINED = Answer("rejected", detail="the rail declined to take it back")


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


class RailServer(LoopbackServer):
    request_queue_size = CONNECTIONS_MAX

    def __init__(self, port: int, store: PayoutStore) -> None:
        super().__init__(port, Handler)
        self.store, self.arrivals = store, Arrivals()

    def misbehave(self, faults: GatewayFaults) -> None:
        """Set the faults: an order's fate depends on their seed, and on how many orders came since."""
        with self.lock:
            self.faults = faults
            self.turns.clear()

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


class Handler(JsonHandler):
    """Reads one request and answers it. A malformed request gets a 4xx and pays nothing."""

    server: RailServer
    timeout = REQUEST_S

    def do_GET(self) -> None:  # noqa: N802  the base class's name
        self.server.arrivals.was_read(self.client_address[-1])
        what, _, name = self.path.removeprefix("/").partition("/")
        if what == "statement" and (asked := _SPAN.fullmatch(name)):
            lines = self.server.store.statement(*map(int, asked.groups()))
            self.answer(200, {"lines": [asdict(line) for line in lines]})
        elif what in {"pay", "revert"} and is_key(name):
            self._look_up(what, name)
        else:
            self.malformed(400, "no such path")

    def do_POST(self) -> None:  # noqa: N802  as above
        data = self.body(BODY_BYTES_MAX) if self.headers.get_content_type() == "application/json" else None
        if self.path == "/pay":
            order = parse_order(data)
            if isinstance(order, str):
                self.malformed(400, order)
            else:
                self._carry_out(order.key, lambda refuse: self.server.store.pay(order, refuse=refuse))
        elif self.path in {"/void", "/revert"}:
            key = data.get("key") if isinstance(data, dict) and set(data) == {"key"} else None
            if not is_key(key):
                self.malformed(400, f"a {self.path[1:]} has exactly: key")
                return
            if self.path == "/void":
                self._void(str(key))
            else:
                self._carry_out(str(key), lambda refuse: _DECLINED if refuse else self.server.store.revert(str(key)))
        elif self.path == "/faults":
            self.misbehave(data)
        else:
            self.malformed(400, "no such order")

    def finish(self) -> None:
        with suppress(OSError):  # the client may be gone
            super().finish()
        self.server.arrivals.leave(self.client_address[-1])

    def _look_up(self, what: str, key: str) -> None:
        # The file is read second: an order that commits in between is found there.
        certain = self.server.arrivals.certain(self.client_address[-1], key)
        answer = (self.server.store.find if what == "pay" else self.server.store.reverted)(key)
        status = "pending" if answer.status == "absent" and not certain else answer.status
        self.answer(200, _as_data(answer, key) | {"status": status})

    def _carry_out(self, key: str, work: Callable[[bool], Answer]) -> None:
        """Do work that moves money, with the faults drawn for it."""
        drawn = self.server.fate("")
        if self.fails_before_work(drawn):
            return
        self.server.arrivals.was_read(self.client_address[-1], key)
        try:
            time.sleep(drawn.delay_ms / 1000)
            answer = work(drawn.refuse)
        finally:
            self.server.arrivals.done(key)
        self.reply(drawn, 409 if answer.status == "conflict" else 200, _as_data(answer, key))

    def _void(self, key: str) -> None:
        # An order for this key that no thread works on yet will find it void, whenever it arrived.
        self.server.arrivals.was_read(self.client_address[-1])
        working = self.server.arrivals.working_on(key)
        answer = self.server.store.find(key) if working else self.server.store.void(key)
        status = "pending" if answer.status == "absent" else answer.status
        self.answer(200, _as_data(answer, key) | {"status": status})


def _as_data(answer: Answer, key: str) -> dict[str, str]:
    return {"key": key, "status": answer.status, "reference": answer.reference, "detail": answer.detail}


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
