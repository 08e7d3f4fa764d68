"""An act of a person that may have been done is not sent again by itself."""

from __future__ import annotations

import httpx2
import pytest

from sds.kernel.errors import SdsError, WorldError
from tests.client.services import Service, decided, problem


def test_what_may_have_been_done_is_not_asked_for_twice() -> None:
    for lost, tries in ((httpx2.ReadError("reset"), 1), (httpx2.ConnectError("refused"), 2)):
        service = Service(lost, decided())
        with service.client() as client:
            if tries == 1:
                with pytest.raises(WorldError, match="the service may have done this, or not: reset"):
                    client.resolve("019a", "ABORT", reason="withdrawn")
            else:
                client.resolve("019a", "ABORT", reason="withdrawn")
        assert tries == len(service.requests)


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504])
def test_an_act_that_a_proxy_or_a_fault_answers_is_not_repeated_and_the_error_says_to_look_first(status: int) -> None:
    for reply in (
        httpx2.Response(status, text="a balancer's page"),
        problem(status, "STORE_UNAVAILABLE", retryable=True),
    ):
        service = Service(reply, decided())
        with (
            service.client() as client,
            pytest.raises(WorldError, match="the service may have done this, or not") as caught,
        ):
            client.resolve("019a", "OVERRIDE", reason="seen the papers")
        assert (1, False) == (len(service.requests), caught.value.retryable)
        assert "read the present state first; ask again only if it was not done" == caught.value.hint


@pytest.mark.parametrize(
    "reply", [httpx2.Response(429), httpx2.Response(425), problem(409, "CONFLICT", retryable=True)]
)
def test_an_act_that_was_refused_by_others_is_not_repeated(reply: httpx2.Response) -> None:
    service = Service(reply, decided())
    with service.client() as client, pytest.raises(SdsError) as caught:
        client.resolve("019a", "OVERRIDE", reason="seen the papers")
    assert (1, False) == (len(service.requests), caught.value.retryable)


@pytest.mark.parametrize(
    ("status", "code"), [(429, "RATE_LIMITED"), (503, "DRAINING"), (503, "QUEUE_FULL"), (503, "OVERLOADED")]
)
def test_an_act_that_the_service_refused_before_anything_was_done_is_sent_again(status: int, code: str) -> None:
    service = Service(problem(status, code, retryable=True), decided())
    with service.client() as client:
        assert "019a" == client.resolve("019a", "OVERRIDE", reason="seen the papers").dfid
    assert 2 == len(service.requests)
