"""Orders to pay, as the kernel would send them, and raw bytes, as it never would."""

from __future__ import annotations

import hashlib
import socket
import time
from types import SimpleNamespace

from sds.gates.refund.rail.client import RailExecutor
from sds.kernel.executor.protocol import ExecutionIntent, Receipt

SOON_S = 20.0  # nobody waits for so long, unless on a busy machine


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def intent_for(name: str, amount: int = 25_000, kind: str = "COMPENSATE") -> ExecutionIntent:
    return ExecutionIntent(f"dfid-{name}", key_of(name), kind, (("amount", amount),), f"TKT-{name}", "1")


def pay(executor: RailExecutor, name: str, amount: int = 25_000, deadline_s: float = SOON_S) -> Receipt:
    return executor.dispatch(intent_for(name, amount), key_of(name), deadline_s)


def elsewhere(port: int) -> RailExecutor:
    """Return an executor of what listens on a port, and was not started here."""
    process = SimpleNamespace(running_port=lambda _: port, was_late=bool, stop=bool)
    return RailExecutor(process)  # type: ignore[arg-type]  # all that it asks of one


def wait_until_at_work(executor: RailExecutor, name: str) -> None:
    """Return once the rail works on an order for this key."""
    until_s = time.monotonic() + SOON_S
    while executor.lookup(key_of(name), SOON_S).status != "unknown":
        assert time.monotonic() < until_s


def raw(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=SOON_S) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def post(port: int, path: str, body: bytes, *, kind: str = "application/json", length: str = "") -> int:
    head = f"POST {path} HTTP/1.0\r\nContent-Type: {kind}\r\nContent-Length: {length or len(body)}\r\n\r\n"
    return int(raw(port, head.encode() + body).split()[1])
