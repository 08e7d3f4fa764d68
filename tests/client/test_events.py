"""Following what changes: every change once in its order, and a connection that ends is opened anew behind the last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice

import httpx2
import pytest

from sds.client import Changed
from sds.client.steps import TRIES_MAX
from sds.kernel.errors import UsageError, WorldError
from tests.client.services import Service, problem

Follow = Callable[..., list[Changed]]


def _in_thread(service: Service, n: int, last: str = "") -> list[Changed]:
    with service.client() as client:
        return list(islice(client.events(last), n))


def _in_loop(service: Service, n: int, last: str = "") -> list[Changed]:
    async def run() -> list[Changed]:
        found = list[Changed]()
        async with service.async_client() as client:
            changes = client.events(last)
            async for change in changes:
                found.append(change)
                if len(found) == n:
                    break
            await changes.aclose()
        return found

    return asyncio.run(run())


@pytest.fixture(params=[_in_thread, _in_loop], ids=["sync", "async"])
def follow(request: pytest.FixtureRequest) -> Follow:
    found: Follow = request.param
    return found


def _stream(*numbers: int, end: str = "") -> httpx2.Response:
    text = ": ping\r\n\r\n" + "".join(
        f'id: toll:{n}\r\nevent: decided\r\ndata: {{"dfid": "d{n}"}}\r\n\r\n' for n in numbers
    )
    return httpx2.Response(200, content=text + end, headers={"Content-Type": "text/event-stream"})


def test_changes_come_in_order_with_what_the_service_says_of_them(follow: Follow) -> None:
    service = Service(_stream(1, 2))
    assert [Changed(f"toll:{n}", "decided", {"dfid": f"d{n}"}) for n in (1, 2)] == follow(service, 2)
    assert ["text/event-stream"] == service.sent("accept")
    assert [None] == service.sent("last-event-id")


def test_a_stream_that_ends_goes_on_behind_the_last_change(follow: Follow) -> None:
    cut_off = _stream(3, end='id: toll:4\r\ndata: {"dfid"')
    service = Service(
        _stream(1, 2), cut_off, httpx2.ConnectError("refused"), problem(503, "DRAINING", retryable=True), _stream(4)
    )
    assert ["toll:1", "toll:2", "toll:3", "toll:4"] == [change.id for change in follow(service, 4, "toll:0")]
    assert ["toll:0", "toll:2", "toll:3", "toll:3", "toll:3"] == service.sent("last-event-id")
    assert 4 == len(service.clock.waits)


def test_a_mistake_ends_it(follow: Follow) -> None:
    with pytest.raises(UsageError) as caught:
        follow(Service(problem(403, "ROLE_MISSING")), 1)
    assert "ROLE_MISSING" == caught.value.reason_code


def test_a_service_that_stays_away_ends_it(follow: Follow) -> None:
    service = Service(*[httpx2.ConnectError("refused")] * (TRIES_MAX + 1))
    with pytest.raises(WorldError, match="the service did not answer: refused"):
        follow(service, 1)
    assert TRIES_MAX == len(service.requests)


@pytest.mark.parametrize("data", ["{", "[1]", "1", "[" * 100_000])
def test_a_change_that_cannot_be_read_is_the_worlds_error(data: str, follow: Follow) -> None:
    reply = httpx2.Response(200, content=f"id: 1\ndata: {data}\n\n", headers={"Content-Type": "text/event-stream"})
    with pytest.raises(WorldError, match="the service's reply is a change that is no"):
        follow(Service(reply), 1)


def test_a_page_in_the_place_of_a_stream_is_no_stream(follow: Follow) -> None:
    service = Service(*[httpx2.Response(200, html="<h1>Welcome</h1>")] * (TRIES_MAX + 1))
    with pytest.raises(WorldError, match="text/event-stream"):
        follow(service, 1)
