"""What a balancer before the service relies on: a process that stops says so before it refuses anything."""

from __future__ import annotations

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.service.engines import Held
from tests.service.operations.waiting import wait_until
from tests.service.server.test_connections import BODY, GET, LENGTH
from tests.service.server.test_serving import POST, OnSocket, answer, on_socket
from tests.service.testbed import EVENT

pytestmark = pytest.mark.timeout(90)


def stop(service: OnSocket) -> None:
    """Do what SIGTERM does, and wait until the server has seen it."""
    service.server.handle_exit(signal.SIGTERM, None)
    wait_until(lambda: service.bed.service.stopping)


def test_who_is_told_to_stop_is_unready_at_once_and_decides_until_the_delay_is_over(home: Path) -> None:
    with on_socket(home, shutdown_delay_s=600.0) as service:
        stop(service)
        ready = service.client.get("/readyz")
        assert (503, "DRAINING") == (ready.status_code, ready.json()["checks"]["draining"])
        assert 200 == service.client.get("/livez").status_code
        decided = service.client.post("/v1/gates/toll/decisions", json=EVENT)
        assert (200, "WAIVE") == (decided.status_code, decided.json()["action"])


def test_after_the_delay_it_drains(home: Path) -> None:
    with on_socket(home, shutdown_delay_s=0.1) as service:
        stop(service)
        wait_until(lambda: "service.drained" in dict(service.bed.logged))
        assert ["service.stopping", "service.draining", "service.drained"] == [event for event, _ in service.bed.logged]


def test_every_answer_of_a_process_that_stops_is_the_last_of_its_connection(home: Path) -> None:
    """Else a balancer sends the next request on a connection that is closed meanwhile, and answers it with 502."""
    engine = Held()
    asking = POST + LENGTH
    with (
        on_socket(home, engine, shutdown_delay_s=600.0) as service,
        service.connect() as idle,
        service.connect() as waiting,
        ThreadPoolExecutor(2) as pool,
    ):
        idle.sendall(GET + b"\r\n")
        assert b"connection: close" not in idle.recv(65_536)
        waiting.sendall(asking + service.authorization + b"\r\n" + BODY)
        assert engine.entered.acquire(timeout=20)
        stop(service)
        engine.let_go.set()
        idle.sendall(GET + b"\r\n")
        for answered in pool.map(answer, (idle, waiting)):  # all that comes until the service closes
            assert answered.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close\r\n" in answered


def test_pipelined_requests_are_all_answered_before_the_connection_ends(home: Path) -> None:
    with on_socket(home, shutdown_delay_s=600.0) as service, service.connect() as connection:
        stop(service)
        connection.sendall(3 * (GET + b"\r\n"))
        answered = answer(connection)
    assert (3, 1) == (answered.count(b"HTTP/1.1 200 "), answered.count(b"connection: close\r\n"))


def sent_whole(connection: socket.socket, head: bytes, length: int) -> bytes:
    """Send a request as nginx does: it reads no answer before all is sent. Return the answer."""
    connection.sendall(head)
    connection.recv(1, socket.MSG_PEEK)  # the answer is there
    for _ in range(length // 1_000):
        connection.sendall(1_000 * b"x")
        time.sleep(0.001)  # a reset has time to come
    found = b""
    while part := connection.recv(65_536):
        found += part
    return found


def test_a_body_that_is_too_long_is_answered_and_the_connection_is_not_reset(home: Path) -> None:
    """nginx answers a reset with 502 and takes the process out for ten seconds: two long bodies would take out two."""
    with on_socket(home) as service, service.connect() as connection:
        head = POST + service.authorization + b"Content-Length: 200000\r\n\r\n"
        answered = sent_whole(connection, head, 200_000)
    assert answered.startswith(b"HTTP/1.1 413 ")
    assert answered.endswith(b"}")


def test_a_body_that_is_no_chunks_is_answered_and_the_connection_is_not_reset(home: Path) -> None:
    with on_socket(home) as service, service.connect() as connection:
        answered = sent_whole(
            connection, POST + service.authorization + b"Transfer-Encoding: chunked\r\n\r\nno", 200_000
        )
    assert answered.startswith(b"HTTP/1.1 400 ")


def test_the_rest_of_a_body_is_not_dropped_for_ever(home: Path) -> None:
    with on_socket(home) as service, service.connect() as connection:
        connection.sendall(POST + service.authorization + b"Content-Length: 100000000\r\n\r\n")
        with pytest.raises(ConnectionError):  # noqa: PT012  it is reset at some byte
            for _ in range(100):
                connection.sendall(1_000_000 * b"x")
                time.sleep(0.001)


def test_a_client_that_leaves_an_answered_connection_open_is_closed_in_time(home: Path) -> None:
    with on_socket(home, head_within_s=0.3) as service, service.connect() as connection:
        connection.sendall(POST + service.authorization + b"Content-Length: 100000\r\n\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 413 ")
        wait_until(lambda: not service.connections)


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01\x02\x00\x01", b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n"], ids=["TLS", "PROXY"]
)
def test_who_speaks_tls_or_the_proxy_protocol_by_mistake_reads_what_is_spoken_here(home: Path, said: bytes) -> None:
    with on_socket(home) as service, service.connect() as connection:
        connection.sendall(said + GET + b"\r\n")
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert b"the service speaks plain HTTP, without TLS and without the PROXY protocol" in found
