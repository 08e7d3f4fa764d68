"""The server on a socket: what is too long or too slow is cut off, and SIGTERM ends what is under way in order."""

from __future__ import annotations

import errno
import json
import resource
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest

from sds.engines.protocol import Engine
from sds.kernel.errors import SdsError
from sds.service.server import serving
from sds.service.server.serving import Server, bound, listen, serve, server_over
from sds.service.settings import ServiceSettings
from tests.service.operations.waiting import wait_until
from tests.service.server.driver import asked, driven
from tests.service.testbed import EVENT, Bed, opened_bed

pytestmark = pytest.mark.timeout(90)

POST = b"POST /v1/gates/toll/decisions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


class OnSocket:
    """A service on a socket of this machine, in a thread."""

    def __init__(self, bed: Bed, server: Server, port: int) -> None:
        self.bed, self.server, self.port = bed, server, port
        self.authorization = f"Authorization: Bearer {bed.key}\r\n".encode()
        headers = {"Authorization": f"Bearer {bed.key}"}
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=20)

    @property
    def connections(self) -> Collection[object]:
        return self.server.server_state.connections

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made


@contextmanager
def on_socket(home: Path, engine: Engine | None = None, **settings: float) -> Iterator[OnSocket]:
    with ExitStack() as opened:
        bed = opened.enter_context(opened_bed(home, engine, **settings))
        listener = opened.enter_context(bound("127.0.0.1", 0))
        ready = threading.Event()
        server = server_over(bed.app, ready.set)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        assert ready.wait(10)
        made = OnSocket(bed, server, listener.getsockname()[1])
        opened.callback(thread.join, 10)
        opened.callback(setattr, server, "should_exit", True)
        opened.callback(made.client.close)
        yield made


def answer(connection: socket.socket) -> bytes:
    """Return all that comes until the other side closes."""
    found = b""
    try:
        while part := connection.recv(65_536):
            found += part
    except ConnectionResetError:
        pass
    return found


def closed_after_s(connection: socket.socket) -> float:
    began_s = time.monotonic()
    answer(connection)
    return time.monotonic() - began_s


def test_a_chunked_body_over_the_limit_is_413_and_the_rest_is_not_read(home: Path) -> None:
    with on_socket(home) as service, service.connect() as connection:
        connection.sendall(POST + service.authorization + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
        for _ in range(5):
            connection.sendall(chunk)
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 413 ")
    assert b"BODY_TOO_LARGE" in found
    assert b"connection: close" in found.lower()


def test_a_length_over_the_limit_is_413_before_a_byte_of_the_body_is_asked_for(home: Path) -> None:
    with on_socket(home) as service, service.connect() as connection:
        connection.sendall(POST + service.authorization + b"Content-Length: 65537\r\nExpect: 100-continue\r\n\r\n")
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_comes_too_slowly_is_408_and_its_connection_closed(home: Path) -> None:
    with on_socket(home, body_within_s=0.3) as service, service.connect() as connection:
        connection.sendall(POST + service.authorization + b"Content-Length: 100\r\n\r\n{")
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 408 ")
    assert b"TOO_SLOW" in found


def test_a_form_that_comes_too_slowly_is_408_and_its_connection_closed(home: Path) -> None:
    head = b"POST /console/login HTTP/1.1\r\nHost: here\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    with on_socket(home, body_within_s=0.3) as service, service.connect() as connection:
        connection.sendall(head + b"Content-Length: 100\r\n\r\nkey=")
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in found.lower()


def test_what_is_no_http_is_a_problem_too(home: Path) -> None:
    with on_socket(home) as service, service.connect() as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in found


def test_a_head_over_the_limit_is_refused(home: Path) -> None:
    with on_socket(home) as service, service.connect() as connection:
        connection.sendall(POST + b"X: " + b"x" * 20_000)
        assert answer(connection).startswith(b"HTTP/1.1 400 ")


def test_answers_do_not_wait_for_more_to_be_sent_with_them() -> None:
    """Nagle's algorithm and delayed acknowledgements made each answer 40 ms late."""
    with bound("127.0.0.1", 0) as listener:
        listen(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as made:
            assert socket.IPPROTO_TCP == made.proto  # what asyncio looks at before it sets TCP_NODELAY


def test_nothing_says_what_serves(home: Path) -> None:
    with on_socket(home) as service:
        assert "server" not in service.client.get("/livez").headers


@pytest.mark.parametrize("said", [b"", b"POST /v1", POST], ids=["nothing", "half a line", "half a head"])
def test_a_client_that_does_not_finish_its_head_is_closed_in_time(home: Path, said: bytes) -> None:
    with on_socket(home, head_within_s=0.3) as service, service.connect() as connection:
        connection.sendall(said)
        assert closed_after_s(connection) < 3


def test_a_client_that_drips_its_next_request_is_closed_in_time(home: Path) -> None:
    with on_socket(home, head_within_s=0.3) as service, service.connect() as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
        began_s = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012  it is closed at some byte
            while time.monotonic() - began_s < 5:
                connection.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - began_s < 3


def test_a_client_that_is_answered_before_its_body_came_and_says_nothing_more_is_closed_in_time(home: Path) -> None:
    with on_socket(home, head_within_s=0.3, idle_s=0.6) as service, service.connect() as connection:
        connection.sendall(POST + b"Content-Length: 2\r\n\r\n")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 401 ")
        connection.sendall(b"{}")
        assert closed_after_s(connection) < 3


def test_a_client_that_says_nothing_between_two_requests_is_closed_in_time(home: Path) -> None:
    with on_socket(home, idle_s=0.3) as service, service.connect() as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert closed_after_s(connection) < 3


@pytest.fixture
def many_files() -> Iterator[None]:
    """Both ends of a connection are this process's here."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(4_096, before[1])), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
def test_a_thousand_silent_clients_hurt_nobody_and_beyond_the_limit_the_longest_silent_makes_place(home: Path) -> None:
    with on_socket(home, connections_max=300, head_within_s=60) as service, ExitStack() as opened:
        silent = [opened.enter_context(service.connect()) for _ in range(1_000)]
        decided = service.client.post("/v1/gates/toll/decisions", json=EVENT)
        assert 200 == decided.status_code
        assert b"" == answer(silent[0])
        silent[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)


def test_sigterm_lets_what_is_under_way_end_refuses_what_is_new_and_exits_with_0(home: Path) -> None:
    with driven(home, drain_s=60) as (process, address), ThreadPoolExecutor(1) as pool:
        first = pool.submit(asked, address, EVENT)
        wait_until((home / "entered").exists)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx2.get(f"{address}/readyz").status_code == 503)
        assert (503, "DRAINING") == (
            (new := asked(address, {**EVENT, "trip_id": "T-2"})).status_code,
            new.json()["reason_code"],
        )
        ready = httpx2.get(f"{address}/readyz")
        assert (503, "DRAINING") == (ready.status_code, ready.json()["checks"]["draining"])
        (home / "let-go").touch()
        assert (200, "WAIVE") == (first.result(20).status_code, first.result().json()["action"])
        assert 0 == process.wait(20)


def test_what_does_not_end_within_the_drain_is_not_decided_and_the_exit_is_0(home: Path) -> None:
    with driven(home, drain_s=0.2) as (process, address), ThreadPoolExecutor(1) as pool:
        first = pool.submit(asked, address, EVENT)
        wait_until((home / "entered").exists)
        process.send_signal(signal.SIGTERM)
        problem = first.result(20)
        assert (503, "DRAINING") == (problem.status_code, problem.json()["reason_code"])
        assert 0 == process.wait(20)
        _, said = process.communicate()
    assert {"service.draining", "service.drained"} <= {json.loads(line)["event"] for line in said.splitlines()}


def test_connections_are_refused_until_the_gates_are_open(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a balancer that does not ask `/readyz` sends requests to a process that only starts."""
    errors = list[int]()
    with bound("127.0.0.1", 0) as listener:

        def opens(*_: object, **__: object) -> None:
            with socket.socket() as early:
                errors.append(early.connect_ex(listener.getsockname()))
            raise SdsError("the gates are opened here")

        monkeypatch.setattr(serving, "open_gates", opens)
        with pytest.raises(SdsError, match="the gates are opened here"):
            serve(ServiceSettings(gates=(str(home),)), listener, lambda: None)
    assert [errno.ECONNREFUSED] == errors


def test_of_two_that_start_on_one_port_the_second_is_refused_before_anything_is_opened() -> None:
    with (
        bound("127.0.0.1", 0) as first,
        pytest.raises(SdsError, match=r"^the service cannot listen on `.*`: ") as refused,
    ):
        bound(*first.getsockname())
    assert "choose another port with --port" == refused.value.hint


def test_the_port_of_a_service_that_has_ended_is_free_at_once_and_held_again() -> None:
    with bound("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        listen(listener)
        with socket.create_connection(address) as client:
            listener.accept()[0].close()  # the service's end of the connection waits for late packets from now on
            assert b"" == client.recv(1)
    with bound(*address), pytest.raises(SdsError, match="cannot listen"):
        bound(*address)


@pytest.mark.parametrize("host", ["300.1.1.1", "192.0.2.1"])
def test_an_address_that_this_machine_does_not_have_is_refused_with_the_option_to_mend(host: str) -> None:
    with pytest.raises(SdsError, match=r"^the service cannot listen on `.*:8095`: ") as refused:
        bound(host, 8095)
    assert "give --host an address of this machine" == refused.value.hint
