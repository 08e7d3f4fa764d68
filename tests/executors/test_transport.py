"""How an order by HTTP travels: once, to the gateway alone, and certainly not where no connection stands."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from sds.executors.http import exchange
from sds.executors.sandbox.server import GatewayServer
from tests.executors.gateways import connected, order
from tests.executors.wires import GOOD, KEY, answering, http, keeping_connections, kept

DEADLINE_S = 20.0


def test_a_kept_connection_that_is_closed_under_an_order_has_it_sent_once(tmp_path: Path) -> None:
    """Whether the gateway read it before it hung up nobody knows, so no library may send it again."""
    answers = [kept(json.dumps(GOOD).encode()), b"", kept(json.dumps(GOOD).encode())]
    with keeping_connections(lambda n: answers[n]) as (url, asked), connected(tmp_path, url) as executor:
        assert "settled" == executor.dispatch(order(), KEY, DEADLINE_S).status
        assert "unknown" == executor.dispatch(order(), KEY, DEADLINE_S).status
        assert 2 == len(asked)


def test_a_cookie_is_not_kept_for_the_next_order(tmp_path: Path) -> None:
    marked = kept(json.dumps(GOOD).encode(), "Set-Cookie: who=me; Path=/")
    with keeping_connections(lambda _n: marked) as (url, asked), connected(tmp_path, url) as executor:
        for _ in range(2):
            assert "settled" == executor.dispatch(order(), KEY, DEADLINE_S).status
    assert [False, False] == [b"cookie" in request.lower() for request in asked]


def test_an_order_for_which_no_connection_is_free_in_time_was_certainly_not_sent(tmp_path: Path) -> None:
    """Neither where the wait for a connection and the making of one take the whole deadline together."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        held = [socket.create_connection(address)]
        while len(held) < 8:  # nobody accepts these
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].connect_ex(address)
        one = ("currency: EUR", "currency: EUR\nconnections_max: 1")
        with connected(tmp_path, f"http://127.0.0.1:{address[1]}", one) as executor, ThreadPoolExecutor(2) as pool:
            first = pool.submit(executor.dispatch, order(), KEY, 0.5)
            time.sleep(0.1)
            second = pool.submit(executor.dispatch, order(), KEY, 0.5)
            assert ["unsent", "unsent"] == [first.result().status, second.result().status]
        for each in held:
            each.close()


def test_once_a_byte_has_left_for_a_proxy_nothing_is_certainly_unsent(tmp_path: Path) -> None:
    with answering(b"HTTP/1.1 200 Connection established\r\n\r\n") as proxy:
        through = ("currency: EUR", f"currency: EUR\nproxy: {proxy}")
        with connected(tmp_path, "https://pay.example", through) as executor:
            assert "unknown" == executor.dispatch(order(), KEY, DEADLINE_S).status


def test_a_redirect_is_not_followed(gateway: GatewayServer, tmp_path: Path) -> None:
    elsewhere = http("307 Temporary Redirect", b"{}", f"Location: {gateway.url}/payments")
    with answering(elsewhere) as url, connected(tmp_path, url) as executor:
        assert "unknown" == executor.dispatch(order(), KEY, DEADLINE_S).status
    assert 0 == gateway.books.totals()["settled"]


def test_where_the_system_gives_no_thread_nothing_is_sent_and_the_next_order_is(
    gateway: GatewayServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with connected(tmp_path, gateway.url.replace("127.0.0.1", "localhost")) as executor:
        with monkeypatch.context() as full:
            full.setattr(exchange, "Thread", none_left)
            refused = executor.dispatch(order(), KEY, DEADLINE_S)
            assert ("unsent", True) == (refused.status, "can't start new thread" in refused.detail)
        assert "settled" == executor.dispatch(order(), KEY, DEADLINE_S).status
        with monkeypatch.context() as full:  # nor one that looks a name up
            full.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", none_left)
            executor.close()
            assert "unsent" == executor.dispatch(order("l" * 64), "l" * 64, DEADLINE_S).status
        assert "settled" == executor.dispatch(order("l" * 64), "l" * 64, DEADLINE_S).status


def test_where_the_thread_of_the_connections_ended_the_next_order_has_another(tmp_path: Path) -> None:
    paid = http("201 Created", json.dumps(GOOD).encode())
    with answering(paid) as url, connected(tmp_path, url) as executor:
        assert "settled" == executor.dispatch(order(), KEY, DEADLINE_S).status
        (thread,) = [each for each in threading.enumerate() if each.name == "sds-gateway" and each.is_alive()]
        loop = executor._client._exchange._loop
        assert loop is not None
        loop.call_soon_threadsafe(loop.stop)  # as an error in the loop itself ends it
        thread.join()
        assert "settled" == executor.dispatch(order(), KEY, DEADLINE_S).status
