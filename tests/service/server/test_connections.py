"""What the reader of requests lets through and HTTP/1.1 does not, and what a request may not grow to."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from sds.service.server import connections
from tests.service.engines import Held
from tests.service.operations.waiting import wait_until
from tests.service.server.test_serving import POST, OnSocket, answer, on_socket
from tests.service.testbed import EVENT

BODY = json.dumps(EVENT).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n"


def one_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Return status and body of one answer, which comes in one piece; the connection stays open."""
    head, _, body = connection.recv(65_536).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head.split(b"\r\n")
    return int(head[9:12]), body


def test_head_is_answered_without_a_body(home: Path) -> None:
    with on_socket(home) as service, service.connect() as connection:
        connection.sendall(GET.replace(b"GET", b"HEAD") + b"\r\n")
        assert connection.recv(65_536).endswith(b"\r\n\r\n")
        connection.sendall(GET + b"\r\n")
        assert 200 == one_answer(connection)[0]


@pytest.mark.parametrize("cut", [None, 60, -5], ids=["at once", "in its head", "in its body"])
def test_who_asks_for_another_protocol_is_answered_in_this_one_and_with_its_body(home: Path, cut: int | None) -> None:
    asking = POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    with on_socket(home) as service, service.connect() as connection:
        whole = asking + service.authorization + LENGTH + b"\r\n" + BODY
        for part in (whole[:cut], whole[cut:] if cut else b""):
            connection.sendall(part)
        status, body = one_answer(connection)
        assert (200, "WAIVE") == (status, json.loads(body)["action"])
        connection.sendall(GET + b"\r\n")
        assert 200 == one_answer(connection)[0]


def test_a_request_for_which_there_is_no_memory_is_not_called_wrong(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller would give up; without an answer it asks again."""

    def none_left(_: object) -> bool:
        raise MemoryError

    with on_socket(home) as service, service.connect() as connection:
        with monkeypatch.context() as full:
            full.setattr(connections.BoundedConnection, "_sheds", none_left)
            connection.sendall(POST + service.authorization + LENGTH + b"\r\n" + BODY)
            assert b"" == answer(connection)
        with service.connect() as again:
            again.sendall(POST + service.authorization + LENGTH + b"\r\n" + BODY)
            assert 200 == one_answer(again)[0]


def test_a_trailer_adds_nothing_to_what_was_asked(home: Path) -> None:
    """Else whoever stands before the service, and takes headers away, could be walked around."""
    chunk = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    with on_socket(home) as service, service.connect() as connection:
        connection.sendall(POST + CHUNKED + b"\r\n")
        connection.sendall(chunk + service.authorization + b"\r\n")
        assert 401 == one_answer(connection)[0]


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\n",
        GET + b"Host: y\r\n",
        b"GET /livez HTTP/2.0\r\nHost: x\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n",
        b"GET file:///livez HTTP/1.1\r\nHost: x\r\n",
        b"GET http:///livez HTTP/1.1\r\nHost: x\r\n",
        POST + LENGTH + CHUNKED,
        POST + LENGTH + b"Content-Length: 1\r\n",
        POST + b"Content-Length: +1\r\n",
        POST + b"Transfer-Encoding: xchunked\r\n",
        POST + b"Transfer-Encoding: gzip, chunked\r\n",
        POST + CHUNKED + CHUNKED,
        GET + b"A : b\r\n",
        GET + b"A: b\x00\r\n",
        GET + b"A: b\r\n c\r\n",
        GET + b"".join(b"A%d: b\r\n" % n for n in range(4_000)),
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n",
    ],
    ids=lambda head: repr(head[-24:]),
)
def test_what_can_be_read_in_two_ways_or_is_too_long_is_refused_and_its_connection_closed(
    home: Path, head: bytes
) -> None:
    with on_socket(home) as service, service.connect() as connection:
        connection.sendall(head + b"\r\n" + BODY + GET + b"\r\n")
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert 1 == found.count(b"HTTP/1.1 ")


@pytest.mark.parametrize(
    "size", [b"-1\r\n", b"0x1\r\n", b"1 \r\n", b"1\n", b"1;a\nb\r\n", b"f" * 20 + b"\r\n", b"1\r\nXX0\r\n\r\n"]
)
def test_a_body_that_can_be_read_in_two_ways_is_refused_and_its_connection_closed(home: Path, size: bytes) -> None:
    with on_socket(home) as service, service.connect() as connection:
        connection.sendall(POST + service.authorization + CHUNKED + b"\r\n")
        connection.sendall(size + BODY + b"\r\n0\r\n\r\n" + GET + b"\r\n")
        found = answer(connection)
        assert 0 == service.bed.gate.store.value("SELECT count(*) FROM decision_flows")
        assert [] == [event for event, _ in service.bed.logged if event == "service.failed"]
    assert found.startswith(b"HTTP/1.1 400 ")
    assert 1 == found.count(b"HTTP/1.1 ")


def test_http_1_0_needs_no_host(home: Path) -> None:
    with on_socket(home) as service, service.connect() as connection:
        connection.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 200 ")


def endless(service: OnSocket, begin: bytes, more: bytes) -> int:
    """Send a request that never ends, until its connection is closed; return how many bytes went."""
    sent = 0
    with service.connect() as connection:
        connection.sendall(begin)
        with pytest.raises(OSError):  # noqa: PT012  it is closed at some byte
            while sent < 64 << 20:
                connection.sendall(more)
                sent += len(more)
    return sent


def test_a_request_that_never_ends_is_cut_off_wherever_it_does_not_end(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_BYTES_MAX", 1 << 20)
    with on_socket(home) as service:
        begin = POST + service.authorization + CHUNKED + b"\r\n"
        for more in (b"x" * 65_536, b"1;" + b"x" * 65_534):
            assert endless(service, begin + b"0\r\nA: ", more) < 32 << 20
            assert endless(service, begin + b"1;", more) < 32 << 20
            assert endless(service, POST + b"A: ", more) < 32 << 20


def test_who_goes_while_a_stream_is_sent_to_them_is_no_fault_whatever_they_have_asked_for_behind_it(home: Path) -> None:
    with on_socket(home, heartbeat_s=0.2) as service:
        streams = service.bed.app.state.operations.streams
        with service.connect() as connection:
            connection.sendall(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n" + service.authorization + b"\r\n")
            wait_until(lambda: 1 == streams.total())
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
            connection.sendall(GET + b"\r\n")
            time.sleep(0.3)  # until it is read
        wait_until(lambda: 0 == streams.total())
        assert [] == [event for event, _ in service.bed.logged if event == "service.failed"]


def test_requests_that_come_at_once_are_answered_in_their_order(home: Path) -> None:
    with on_socket(home) as service, service.connect() as connection:
        asking = POST + service.authorization + LENGTH + b"\r\n" + BODY
        connection.sendall(asking + GET + b"\r\n" + GET + b"Connection: close\r\n\r\n")
        found = answer(connection)
    assert [b"200 OK"] * 3 == [head.partition(b"\r\n")[0] for head in found.split(b"HTTP/1.1 ")[1:]]
    assert found.index(b"WAIVE") < found.index(b'"live"')


def test_what_is_no_http_behind_a_request_takes_no_answer_from_it(home: Path) -> None:
    engine = Held()
    with on_socket(home, engine) as service, service.connect() as connection:
        connection.sendall(POST + service.authorization + LENGTH + b"\r\n" + BODY)
        wait_until(lambda: 1 == service.bed.service.admission.in_hand)
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        time.sleep(0.3)
        engine.let_go.set()
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert 1 == found.count(b"HTTP/1.1 ")


@pytest.mark.parametrize("asked", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_no_more_requests_than_a_few_wait_behind_one_that_is_answered(home: Path, asked: bytes) -> None:
    """Nor where they ask for another protocol: they are answered as any."""
    with on_socket(home) as service, service.connect() as connection:
        connection.sendall((GET + asked + b"\r\n") * 2_000)
        found = answer(connection)
    assert connections.WAITING_MAX + 1 == found.count(b"HTTP/1.1 200 ")


def test_http_1_0_stays_it_whatever_else_is_asked_for(home: Path) -> None:
    """It knows neither another protocol, nor that it is told to go on."""
    with on_socket(home) as service, service.connect() as connection:
        head = POST.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Host: x\r\n", b"") + service.authorization + LENGTH
        connection.sendall(head + b"Expect: 100-continue\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + BODY)
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in found


def test_http_1_0_is_sent_a_stream_as_it_is_read_by_it(home: Path) -> None:
    """Chunks are of HTTP/1.1: what has no length ends with its connection."""
    with on_socket(home, heartbeat_s=0.2) as service, service.connect() as connection:
        connection.sendall(b"GET /v1/events HTTP/1.0\r\n" + service.authorization + b"\r\n")
        found = b""
        while b": ping" not in found:
            found += connection.recv(65_536)
    head, _, body = found.partition(b"\r\n\r\n")
    assert (True, False) == (b"connection: close" in head.lower(), b"transfer-encoding" in head.lower())
    assert body.startswith(b"id: ")
