"""What a client makes of a service's replies: an answer, another try with the same key, or one error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from sds.client import DecisionClient
from sds.client.calls import DEADLINE
from sds.client.replies import LINE_CHARS_MAX, REPLY_BYTES_MAX
from sds.client.steps import BACKOFF_S_MAX, TRIES_MAX
from sds.kernel.errors import EventError, UsageError, WorldError
from sds.kernel.flow.states import Answer
from tests.client.services import ANSWER, EVENT, KEY, Service, decided, problem

Decide = Callable[..., Answer]


def _in_thread(service: Service, *given: Any, **named: Any) -> Answer:
    with service.client() as client:
        return client.decide(*given, **named)


def _in_loop(service: Service, *given: Any, **named: Any) -> Answer:
    async def run() -> Answer:
        async with service.async_client() as client:
            return await client.decide(*given, **named)

    return asyncio.run(run())


@pytest.fixture(params=[_in_thread, _in_loop], ids=["sync", "async"])
def decide(request: pytest.FixtureRequest) -> Decide:
    found: Decide = request.param
    return found


def test_a_decision_is_the_answer_that_the_gate_itself_gives(decide: Decide) -> None:
    service = Service(decided())
    answer = decide(service, "toll", EVENT)
    assert ANSWER == json.loads(json.dumps(answer.as_data()))
    (request,) = service.requests
    assert ("POST", "/v1/gates/toll/decisions") == (request.method, request.url.path)
    assert EVENT == json.loads(request.content)
    assert [f"Bearer {KEY}"] == service.sent("authorization")


def test_json_text_goes_out_as_it_is(decide: Decide) -> None:
    service = Service(decided(), decided())
    for given in ('{"a": "ü",  "b":1}', '{"a": "ü",  "b":1}'.encode()):
        decide(service, "toll", given)
        assert '{"a": "ü",  "b":1}'.encode() == service.requests.pop().content


@pytest.mark.parametrize("given", [{"a": float("nan")}, {"a": {1, 2}}, {"a": "\ud800"}, 7])
def test_what_has_no_json_is_refused_before_anything_is_sent(given: Any, decide: Decide) -> None:
    service = Service()
    with pytest.raises(EventError, match="the event cannot be written as JSON"):
        decide(service, "toll", given)
    assert [] == service.requests


def test_what_a_newer_service_says_besides_is_left_out(decide: Decide) -> None:
    assert "019a" == decide(Service(decided(since="2027")), "toll", EVENT).dfid


AGAIN = {
    "full": problem(503, "QUEUE_FULL", retryable=True, after="1"),
    "too often": problem(429, "RATE_LIMITED", retryable=True),
    "in progress": problem(409, "FLOW_IN_PROGRESS", retryable=True, after="1"),
    "a balancer's page": httpx2.Response(502, html="<h1>Bad gateway</h1>"),
    "refused": httpx2.ConnectError("refused"),
    "cut off": httpx2.RemoteProtocolError("peer closed connection"),
    "silent": httpx2.ReadTimeout("silent"),
    "not decided": decided(state="ABORTED", tag="NOT_DECIDED", retryable=True),
}


@pytest.mark.parametrize("first", AGAIN.values(), ids=AGAIN.keys())
def test_what_may_succeed_later_is_sent_again_with_the_same_key_and_body(first: Any, decide: Decide) -> None:
    service = Service(first, first, decided())
    assert "WAIVE" == decide(service, "toll", EVENT).action
    keys, bodies = set(service.sent("idempotency-key")), {request.content for request in service.requests}
    assert (3, 1, 1) == (len(service.requests), len(keys), len(bodies))
    assert 2 == len(service.clock.waits)


def test_each_call_has_a_key_of_its_own_unless_one_is_given() -> None:
    service = Service(*(decided() for _ in range(3)))
    with service.client() as client:
        client.decide("toll", EVENT)
        client.decide("toll", EVENT)
        client.decide("toll", EVENT, idempotency_key='my "key"')
    first, second, third = service.sent("idempotency-key")
    assert first != second
    assert r'"my \"key\""' == third


FINAL = {
    "no key": problem(401, "UNAUTHENTICATED"),
    "no gate": problem(404, "GATE_UNKNOWN"),
    "malformed": problem(400, "EVENT_INVALID"),
    "other body": problem(422, "EVENT_CONFLICT", dfid="019b"),
    "too large": problem(413, "BODY_TOO_LARGE"),
}


@pytest.mark.parametrize("reply", FINAL.values(), ids=FINAL.keys())
def test_a_mistake_is_raised_at_once(reply: httpx2.Response, decide: Decide) -> None:
    service = Service(reply)
    with pytest.raises(UsageError) as caught:
        decide(service, "toll", EVENT)
    assert json.loads(reply.content)["reason_code"] == caught.value.reason_code
    assert not caught.value.retryable
    assert [] == service.clock.waits


def test_what_is_not_on_record_yet_is_said_at_once_for_it_may_never_be() -> None:
    service = Service(problem(404, "DFID_UNKNOWN", retryable=True, after="1"))
    with service.client() as client, pytest.raises(WorldError) as caught:
        client.get("019a")
    assert ("DFID_UNKNOWN", True, []) == (caught.value.reason_code, caught.value.retryable, service.clock.waits)


def test_an_error_tells_what_the_service_says_of_it(decide: Decide) -> None:
    reply = problem(
        422, "EVENT_CONFLICT", detail="event `T-1` came with\nanother body", hint="send the first", dfid="019b"
    )
    with pytest.raises(UsageError) as caught:
        decide(Service(reply), "toll", EVENT)
    error = caught.value
    assert ("event `T-1` came with another body", "send the first", "019b") == (str(error), error.hint, error.dfid)


def test_a_fault_of_the_service_is_the_worlds_and_is_not_repeated(decide: Decide) -> None:
    service = Service(problem(500, "INTERNAL"))
    with pytest.raises(WorldError) as caught:
        decide(service, "toll", EVENT)
    assert "INTERNAL" == caught.value.reason_code
    assert 1 == len(service.requests)


def test_an_answer_that_nobody_could_decide_in_time_is_returned_when_the_time_is_over(decide: Decide) -> None:
    waiting = {"state": "ABORTED", "tag": "NOT_DECIDED", "retryable": True}
    service = Service(*(decided(**waiting) for _ in range(50)), takes_s=0.5)
    answer = decide(service, "toll", EVENT, deadline_ms=3_000)
    assert ("NOT_DECIDED", True) == (answer.tag, answer.retryable)
    assert 1 < len(service.requests) <= 6


def test_an_answer_that_waits_for_the_outside_is_returned_as_it_is(decide: Decide) -> None:
    service = Service(decided(state="ABORTED", tag="EXECUTOR_DOWN", retryable=True))
    assert "EXECUTOR_DOWN" == decide(service, "toll", EVENT).tag
    assert [] == service.clock.waits


def test_no_try_begins_behind_the_deadline(decide: Decide) -> None:
    service = Service(*(problem(503, "QUEUE_FULL", retryable=True) for _ in range(100)), takes_s=0.2)
    with pytest.raises(WorldError) as caught:
        decide(service, "toll", EVENT, deadline_ms=2_000)
    assert ("QUEUE_FULL", True) == (caught.value.reason_code, caught.value.retryable)
    assert service.clock.s < 2.2
    left = [int(sent or 0) for sent in service.sent(DEADLINE)]
    assert [2_000, *sorted(left[1:], reverse=True)] == left
    assert min(left) >= 1


@pytest.mark.parametrize("given", [{}, {"deadline_ms": 60_000}])
def test_no_try_begins_after_a_wait_that_took_all_that_was_left(given: dict[str, int], decide: Decide) -> None:
    service = Service(problem(503, "OVERLOADED", retryable=True), decided())
    service.clock.late_s = 61.0
    with pytest.raises(WorldError) as refused:
        decide(service, "toll", EVENT, **given)
    assert ("OVERLOADED", 1) == (refused.value.reason_code, len(service.requests))


@pytest.mark.parametrize("given", ["3", None, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused_in_words(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^`timeout_s` must be "):
        DecisionClient("http://127.0.0.1:1", KEY, timeout_s=given)


def test_a_wait_longer_than_what_is_left_is_not_begun(decide: Decide) -> None:
    service = Service(problem(503, "OVERLOADED", retryable=True, after="10"))
    with pytest.raises(WorldError):
        decide(service, "toll", EVENT, deadline_ms=5_000)
    assert 0 == service.clock.s


def test_pauses_are_jittered_grow_and_have_a_limit() -> None:
    service = Service(*(problem(503, "QUEUE_FULL", retryable=True) for _ in range(TRIES_MAX + 1)))
    with pytest.raises(WorldError), service.client(timeout_s=3_000.0) as client:
        client.decide("toll", EVENT)
    waits = service.clock.waits
    assert TRIES_MAX == len(service.requests)
    assert len(set(waits)) == len(waits)
    assert max(waits[:3]) < 0.2 < max(waits[-20:]) <= BACKOFF_S_MAX


ODD = {
    "no answer": (httpx2.Response(200, json={"ok": True}), "the service's reply is not an answer"),
    "no object": (httpx2.Response(200, json=[1]), "the service's reply is not an answer"),
    "no JSON": (httpx2.Response(200, html="<h1>Welcome</h1>"), "the service's reply is not JSON"),
    "nested": (httpx2.Response(200, content=b"[" * 100_000), "the service's reply is not JSON"),
    "too long": (httpx2.Response(200, content=b" " * (REPLY_BYTES_MAX + 1)), "longer than 16777216 bytes"),
}


@pytest.mark.parametrize(("reply", "said"), ODD.values(), ids=ODD.keys())
def test_a_reply_that_is_none_is_the_worlds_error(reply: httpx2.Response, said: str, decide: Decide) -> None:
    with pytest.raises(WorldError, match=said) as caught:
        decide(Service(reply), "toll", EVENT)
    assert "SERVICE_REPLY_INVALID" == caught.value.reason_code


def test_a_problem_of_foreign_words_is_one_short_line(decide: Decide) -> None:
    reply = problem(400, "EVENT_INVALID", detail="a\x1b[31m\n" * 1_000, hint=["no text"], dfid=7)
    with pytest.raises(UsageError) as caught:
        decide(Service(reply), "toll", EVENT)
    assert str(caught.value).isprintable()
    assert LINE_CHARS_MAX >= len(str(caught.value))


def test_a_service_that_moved_is_not_followed_with_the_key(decide: Decide) -> None:
    service = Service(httpx2.Response(307, headers={"Location": "https://elsewhere.example/"}))
    with pytest.raises(UsageError, match=r"the service redirects to `https://elsewhere.example/`"):
        decide(service, "toll", EVENT)
    assert 1 == len(service.requests)


def test_a_service_that_cannot_be_reached_is_told_with_its_reason() -> None:
    with DecisionClient("http://127.0.0.1:1", KEY, timeout_s=0.2) as client, pytest.raises(WorldError) as caught:
        client.decide("toll", EVENT)
    assert ("SERVICE_UNREACHABLE", True) == (caught.value.reason_code, caught.value.retryable)


@pytest.mark.parametrize("given", ["", "a" * 256, "ä", "a\nb"])
def test_an_idempotency_key_that_is_none_is_refused(given: str, decide: Decide) -> None:
    with pytest.raises(UsageError, match=r"^`idempotency_key` must have 1 to 255 printable ASCII characters$"):
        decide(Service(), "toll", EVENT, idempotency_key=given)


@pytest.mark.parametrize("given", [0, -1, "3", float("nan")])
def test_a_deadline_that_is_none_is_refused(given: Any, decide: Decide) -> None:
    with pytest.raises(UsageError, match=f"^`deadline_ms` must be above 0, got {given}: "):
        decide(Service(), "toll", EVENT, deadline_ms=given)


def test_a_client_that_is_closed_says_so() -> None:
    service = Service(decided())
    with service.client() as client:
        pass
    with pytest.raises(UsageError, match=r"^the client is closed$"):
        client.decide("toll", EVENT)
    with pytest.raises(UsageError, match=r"^the client is closed$"):
        next(iter(client.events()))

    async def ask() -> None:
        async with service.async_client() as later:
            pass
        await later.decide("toll", EVENT)

    with pytest.raises(UsageError, match=r"^the client is closed$"):
        asyncio.run(ask())
    assert [] == service.requests


@pytest.mark.parametrize("key", ["", None, 5, "a b", "ä"])
def test_a_key_that_is_none_is_refused(key: Any) -> None:
    with pytest.raises(UsageError, match=r"^`key` is not a key$"):
        DecisionClient("http://127.0.0.1:1", key)


def test_the_name_of_a_gate_is_one_part_of_the_path(decide: Decide) -> None:
    service = Service(decided())
    decide(service, "a/../b?c", EVENT)
    assert b"/v1/gates/a%2F..%2Fb%3Fc/decisions" == service.requests[0].url.raw_path
    for none in ("", ".", ".."):
        with pytest.raises(UsageError, match="is not a valid gate"):
            decide(Service(), none, EVENT)


def test_a_service_below_a_path_is_asked_there() -> None:
    service = Service(decided())
    with service.client("https://example.com/decisions/") as client:
        client.decide("toll", EVENT)
    assert "/decisions/v1/gates/toll/decisions" == service.requests[0].url.path


@pytest.mark.parametrize(
    "url",
    [
        "",
        None,
        5,
        b"http://a",
        "service.example",
        "ftp://a",
        "http://",
        "http://u:p@a",
        "http://u:1/p@a",
        "http://a?b",
        "http://[::1",
    ],
)
def test_an_address_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(UsageError, match=r"^`url` must be an address such as https://decisions\.example, "):
        Service().client(url)


@pytest.mark.parametrize(
    "url", ["http://service.example", "http://10.0.0.5:8080", "http://[2001:db8::1]", "http://127.0.0.1.a"]
)
def test_another_machine_is_asked_unencrypted_only_if_that_is_asked_for(url: str) -> None:
    with pytest.raises(UsageError, match=r"^http:// would send the key and every event unencrypted") as caught:
        Service().client(url)
    assert "plain_http" in (caught.value.hint or "")
    service = Service(decided())
    with service.client(url, plain_http=True) as client:
        assert "CLOSED" == client.decide("toll", EVENT).state


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "http://localhost", "http://[::1]:1"])
def test_this_machine_may_be_asked_unencrypted(url: str) -> None:
    service = Service(decided())
    with service.client(url) as client:
        assert "CLOSED" == client.decide("toll", EVENT).state


@pytest.mark.parametrize("key", ["", "a b", "a\n", "ä"])
def test_a_key_that_is_none_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(UsageError, match=r"^`key` is not a key$"):
        DecisionClient("https://a", key)


def test_the_key_is_never_shown() -> None:
    for client in (Service().client(), Service().async_client()):
        assert "https://service.example" in repr(client)
        assert KEY not in repr(client)
