"""The sandbox gateway of these tests: in a thread of this process, or as the process that the command starts."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import httpx2

from sds.executors import http
from sds.executors.sandbox.books import Books
from sds.executors.sandbox.faults import parse_faults
from sds.executors.sandbox.keyed_book import Answer
from sds.executors.sandbox.server import GatewayServer
from sds.kernel.executor.protocol import ExecutionIntent

READY_S = 30.0


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@contextmanager
def in_thread(
    folder: Path, faults: str = "", *, token: str = "", tls: ssl.SSLContext | None = None, port: int = 0
) -> Iterator[GatewayServer]:
    books = Books(folder / "gateway.db", now_ms)
    server = GatewayServer(port, books, parse_faults(faults), token=token, tls=tls)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    with closing(books), server:
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def held(gateway: GatewayServer) -> Iterator[None]:
    """Let a gateway take orders and carry none out, until the block ends."""
    let_go, pay = Event(), gateway.books.pay

    def later(*order: Any, **how: Any) -> Answer:
        let_go.wait(READY_S)
        return pay(*order, **how)

    with patch.object(gateway.books, "pay", later):
        try:
            yield
        finally:
            let_go.set()


@contextmanager
def in_process(folder: Path, faults: str = "", *more: str, port: int = 0) -> Iterator[str]:
    """Run `sds sandbox-gateway`; yield its address."""
    command = [sys.executable, "-m", "sds.cli.app", "sandbox-gateway", "--file", str(folder / "gateway.db")]
    if faults:
        command += ["--faults", faults]
    child = subprocess.Popen([*command, "--port", str(port), *more], stdout=subprocess.PIPE, env=dict(os.environ))
    assert child.stdout is not None
    try:
        yield str(json.loads(child.stdout.readline())["url"])
    finally:
        child.terminate()
        child.wait(READY_S)
        child.stdout.close()


def asked(url: str, method: str, path: str, body: object = None, key: str = "") -> tuple[int, dict[str, Any]]:
    headers: Mapping[str, str] = {"Idempotency-Key": key} if key else {}
    with httpx2.Client(trust_env=False) as client:
        reply = client.request(method, f"{url}{path}", json=body, headers=headers)
    return reply.status_code, reply.json()


EXAMPLE = Path(http.__file__).with_name("sandbox.yaml")


def written(folder: Path, url: str, *edits: tuple[str, str]) -> Path:
    """Write the example file for another address, each (old, new) text exchanged."""
    text = EXAMPLE.read_text(encoding="utf-8")
    for old, new in (("http://127.0.0.1:8099", url), *edits):
        assert old in text, f"`{old}` is not in the example"
        text = text.replace(old, new)
    (folder / "gateway.yaml").write_text(text, encoding="utf-8")
    return folder / "gateway.yaml"


@contextmanager
def connected(folder: Path, url: str, *edits: tuple[str, str]) -> Iterator[http.HttpExecutor]:
    with closing(http.load_executor(written(folder, url, *edits))) as made:
        yield made


def order(key: str = "k" * 64, amount: int = 120) -> ExecutionIntent:
    return ExecutionIntent("flow-1", key, "PAY", (("amount", amount),), "A/1 ü", "7")
