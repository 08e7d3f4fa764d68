"""A request for a decision that a full service sheds is answered by its connection, which goes on as after any answer."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sds.service.operations import shedding
from tests.service.server.test_balancers import stop
from tests.service.server.test_connections import BODY, GET, LENGTH, one_answer
from tests.service.server.test_serving import POST, OnSocket, answer, on_socket

ASKED = POST + LENGTH + b"\r\n" + BODY  # without a key: none is looked at
HEAD, REST = ASKED.split(b"\r\n\r\n")[0] + b"\r\n\r\n", ASKED.split(b"\r\n\r\n")[1]


@contextmanager
def full(home: Path, **settings: float) -> Iterator[OnSocket]:
    """A service that has one decision in hand, room for no other, and no look to spare."""
    with on_socket(home, queue_max=1, **settings) as service:
        leave = service.bed.service.admission.enter("toll", 1e9)
        yield service
        leave()


@pytest.fixture(autouse=True)
def _no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shedding, "LOOKS_PER_S", 0.0)


def code_of(found: tuple[int, bytes]) -> tuple[int, str]:
    return found[0], json.loads(found[1])["reason_code"]


def statuses(found: bytes) -> list[bytes]:
    return [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]]


def test_it_is_answered_before_its_body_is_there_and_the_next_is_answered_too(home: Path) -> None:
    with full(home) as service, service.connect() as connection:
        for part in (REST[:3], REST[3:]), (REST, b""):
            connection.sendall(HEAD)
            assert (503, "QUEUE_FULL") == code_of(one_answer(connection))
            for each in part:
                connection.sendall(each)
        connection.sendall(GET + b"\r\n")
        assert 200 == one_answer(connection)[0]
        assert 'sds_refusals_total{code="QUEUE_FULL"} 2.0' in service.client.get("/metrics").text


def test_what_comes_at_once_is_answered_in_its_order(home: Path) -> None:
    last = GET + b"Connection: close\r\n\r\n"
    with full(home) as service, service.connect() as connection:
        connection.sendall(ASKED + ASKED + GET + b"\r\n" + ASKED + last)
        assert [b"503", b"503", b"200", b"401", b"200"] == statuses(answer(connection))


def test_one_that_ends_its_connection_or_asks_whether_to_go_on_takes_the_way_of_all(home: Path) -> None:
    with full(home) as service:
        for line in (b"Connection: close\r\n", b"Connection: close\r\nExpect: 100-continue\r\n"):
            with service.connect() as connection:
                connection.sendall(POST + service.authorization + LENGTH + line + b"\r\n" + BODY)
                found = answer(connection)
            assert b"503" == statuses(found)[-1]
            assert b"connection: close" in found.lower()


def test_one_that_a_process_refuses_while_it_stops_ends_its_connection(home: Path) -> None:
    with full(home, shutdown_delay_s=600.0) as service, service.connect() as connection:
        stop(service)
        connection.sendall(POST + service.authorization + LENGTH + b"\r\n" + BODY)
        found = answer(connection)
    assert [b"503"] == statuses(found)
    assert b"QUEUE_FULL" in found
    assert b"connection: close\r\n" in found


def test_http_1_0_is_answered_with_the_end_of_its_connection(home: Path) -> None:
    asked = ASKED.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\nConnection: keep-alive\r\n")
    with full(home) as service, service.connect() as connection:
        connection.sendall(asked)
        found = answer(connection)
    assert [b"401"] == statuses(found)
    assert b"connection: close" in found


def silent(connection: socket.socket, sent: bytes) -> float:
    began_s = time.monotonic()
    connection.sendall(sent)
    assert 503 == one_answer(connection)[0]
    answer(connection)
    return time.monotonic() - began_s


def test_who_does_not_send_its_body_or_nothing_more_is_closed(home: Path) -> None:
    with full(home, head_within_s=0.3, idle_s=0.6) as service:
        with service.connect() as connection:
            assert silent(connection, HEAD + REST[:3]) < 5
        with service.connect() as connection:
            assert 0.5 < silent(connection, ASKED) < 5
        with service.connect() as connection:
            assert silent(connection, ASKED + GET) < 5


def test_whoever_waits_for_a_decision_behind_it_is_not_taken_for_idle(home: Path) -> None:
    with full(home, idle_s=0.3, heartbeat_s=1.0) as service, service.connect() as connection:
        connection.sendall(ASKED + GET.replace(b"/livez", b"/v1/events") + service.authorization + b"\r\n")
        found = b""
        while b": ping" not in found:
            found += (part := connection.recv(65_536))
            assert part, "it was closed"


def test_what_is_wrong_with_a_body_that_nobody_reads_is_not_answered_again(home: Path) -> None:
    with full(home) as service, service.connect() as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + GET + b"\r\n")
        assert [b"503"] == statuses(answer(connection))
