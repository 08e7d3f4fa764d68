"""The rail's client: whatever is not known for certain is unknown, whoever answers."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from sds.gates.refund.rail.client import RailProcess
from sds.kernel.errors import StateError
from sds.kernel.executor.protocol import ExecutionIntent
from tests.gates.refund.rail.orders import SOON_S, elsewhere, key_of, pay


class TestClient:
    """What the client makes of a server that is not the rail."""

    @staticmethod
    def served(answer: bytes, *, pause_s: float = 0.0) -> tuple[int, threading.Thread]:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            with listener:
                connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                try:
                    for at in range(len(answer)) if pause_s else (0,):
                        connection.sendall(answer[at : at + 1] if pause_s else answer)
                        time.sleep(pause_s)
                except OSError:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        return int(listener.getsockname()[1]), thread

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"hello",
            b"HTTP/1.0 200 OK\r\n\r\n",
            b"HTTP/1.0 200 OK\r\n\r\n[]",
            b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 60_000,
            b"HTTP/1.0 200 OK\r\nContent-Length: 900\r\n\r\n{}",
            b'HTTP/1.0 200 OK\r\n\r\n{"status":"settled","reference":"PAY-1"}',
            b'HTTP/1.0 200 OK\r\n\r\n{"status":"settled","key":"KEY"}',
            b'HTTP/1.0 200 OK\r\n\r\n{"status":"absent","key":"KEY"}',
            b'HTTP/1.0 200 OK\r\n\r\n{"status":"pending","key":"KEY"}',
            b'HTTP/1.0 200 OK\r\n\r\n{"status":["settled"],"key":"KEY","reference":"PAY-1"}',
            b'HTTP/1.0 500 Oops\r\n\r\n{"status":"rejected","key":"KEY"}',
            b'HTTP/1.0 404 No\r\n\r\n{"status":"settled","reference":"PAY-1","key":"KEY"}',
            b"HTTP/1.0 200 OK\r\n\r\n" + b" " * 100_000,
            b"\x00" * 1000,
        ],
    )
    def test_an_unreadable_answer_is_unknown(self, answer: bytes) -> None:
        port, thread = self.served(answer.replace(b"KEY", key_of("x").encode()))
        receipt = pay(elsewhere(port), "x")
        thread.join()

        assert "unknown" == receipt.status
        assert "\n" not in receipt.detail

    def test_an_answer_that_drips_does_not_outlast_the_deadline(self) -> None:
        port, thread = self.served(b"HTTP/1.0 200 OK\r\n" + b"x" * 1_000, pause_s=0.05)
        began = time.monotonic()
        receipt = pay(elsewhere(port), "x", deadline_s=0.3)
        waited_s = time.monotonic() - began
        thread.join()

        assert "unknown" == receipt.status
        assert waited_s < 20  # it drips for 50

    @pytest.mark.parametrize("deadline_s", [0.0, -1.0])
    def test_a_deadline_already_passed_sends_nothing(self, rail: RailProcess, deadline_s: float) -> None:
        assert "unknown" == pay(rail.executor(), "passed", deadline_s=deadline_s).status
        assert "absent" == rail.executor().lookup(key_of("passed"), SOON_S).status

    @pytest.mark.parametrize("params", [(), (("sum", 5),), (("amount", 5), ("fee", 1))])
    def test_an_intent_without_exactly_one_amount_is_not_sent(
        self, rail: RailProcess, params: tuple[tuple[str, int], ...]
    ) -> None:
        intent = ExecutionIntent("dfid-x", key_of("params"), "DENY", params, "TKT-x", "1")

        assert "rejected" == rail.executor().dispatch(intent, key_of("params"), SOON_S).status
        assert "absent" == rail.executor().lookup(key_of("params"), SOON_S).status

    def test_an_intent_on_a_moved_ticket_is_not_sent(self, rail: RailProcess) -> None:
        def unreadable(key: str) -> str:
            raise StateError("the tickets cannot be read")

        for version_of in (lambda _: "2", lambda _: None, unreadable):
            assert "rejected" == pay(rail.executor(version_of), "moved").status
        assert "absent" == rail.executor().lookup(key_of("moved"), SOON_S).status
        assert "settled" == pay(rail.executor(lambda _: "1"), "moved").status
