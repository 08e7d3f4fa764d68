"""`GET /v1/events`: what changes, from the ledger, with no loss and nothing twice; no texts; only to who may read it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from sds.host.clock import now_ms
from sds.kernel.storage.store import Reader
from sds.service.callers import revoke_key
from sds.service.operations.changes import parse_positions, read_changes
from sds.service.routes import events
from tests.proposers import Greedy
from tests.service.operations.exposition import scraped, value
from tests.service.operations.waiting import wait_until
from tests.service.routes.served import served
from tests.service.testbed import EVENT, Bed, opened_bed

Sent = httpx2.ServerSentEvent


@pytest.fixture
def streaming(home: Path) -> Iterator[tuple[Bed, str]]:
    limits = {"follow_every_s": 0.02, "stream_check_s": 0.1, "key_cache_ms": 0, "streams_of_key_max": 2}
    with opened_bed(home, Greedy("WAIVE"), heartbeat_s=0.2, **limits) as bed, served(bed.app) as url:
        yield bed, url


@contextmanager
def stream(url: str, key: str, last: str = "", query: str = "") -> Iterator[Iterator[Sent]]:
    headers = {"Authorization": f"Bearer {key}"} | ({"Last-Event-ID": last} if last else {})
    with (
        httpx2.Client(timeout=20) as client,
        client.stream("GET", f"{url}/v1/events{query}", headers=headers) as response,
    ):
        assert (200, "text/event-stream") == (response.status_code, response.headers["content-type"].partition(";")[0])
        yield iter(httpx2.EventSource(response))


def refused(url: str, key: str, last: str = "", query: str = "") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}"} | ({"Last-Event-ID": last} if last else {})
    answer = httpx2.get(f"{url}/v1/events{query}", headers=headers, timeout=20)
    return answer.status_code, answer.json()["reason_code"]


def decided(bed: Bed, *numbers: int) -> list[str]:
    return [bed.post({**EVENT, "trip_id": f"T-{n}", "text": f"secret word {n}"}).json()["dfid"] for n in numbers]


def take(sent: Iterator[Sent], enough: Callable[[list[Sent]], bool]) -> list[Sent]:
    """Read events until there are enough."""
    found, until_s = list[Sent](), time.monotonic() + 20
    for each in sent:
        found.append(each)
        if enough(found):
            return found
        assert time.monotonic() < until_s
    raise AssertionError("the stream has ended")


def with_data(found: list[Sent]) -> list[dict[str, Any]]:
    return [json.loads(each.data) for each in found if each.data]


def settled(count: int) -> Callable[[list[Sent]], bool]:
    return lambda found: sum(each.event == "settled" for each in found) == count


def test_a_stream_ends_when_the_ledger_ends_before_what_it_has_sent(
    streaming: tuple[Bed, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby took over that had not heard of the last entries: what it writes next would have been seen already."""
    bed, url = streaming
    decided(bed, 1)
    with stream(url, bed.key) as sent:
        (first,) = take(sent, lambda found: len(found) == 1)
        monkeypatch.setattr("sds.service.routes.events.head", lambda _record: 1)
        assert [] == list(sent)
    assert parse_positions(first.id)["toll"] > 1
    assert (400, "CURSOR_INVALID") == refused(url, bed.key, first.id)


def test_changes_are_sent_as_they_happen_and_say_codes_and_ids_but_no_text(streaming: tuple[Bed, str]) -> None:
    bed, url = streaming
    bed.client.put("/v1/halt", json={"halted": True, "reason": "before"})
    bed.client.put("/v1/halt", json={"halted": False, "reason": "before"})
    with stream(url, bed.key) as sent:
        first = next(sent)
        assert ("", {"toll": entries(bed)}) == (first.data, parse_positions(first.id))
        (dfid,) = decided(bed, 1)
        found = take(sent, settled(1))
    kinds = [each["kind"] for each in with_data(found) if each.get("dfid") == dfid]
    assert ["DECIDED", "RESERVED", "SETTLED"] == sorted(kinds)
    last = with_data(found)[-1]
    assert ("toll", dfid, "CLOSED", "SUCCESS") == (last["gate"], last["dfid"], last["state"], last["status"])
    assert "secret" not in str([each.data for each in found])


def test_whoever_comes_back_goes_on_where_they_were_with_no_loss_and_nothing_twice(streaming: tuple[Bed, str]) -> None:
    bed, url = streaming
    seen, last = list[int](), "toll:0"
    for number in range(4):
        decided(bed, 2 * number, 2 * number + 1)
        with stream(url, bed.key, last) as sent:  # cut off in the middle of what there is
            found = take(sent, lambda got: len([each for each in got if each.data]) == 3)
        seen += [each["entry"] for each in with_data(found)]
        last = found[-1].id
    with stream(url, bed.key, query=f"?after={last}") as sent:
        found = take(sent, lambda got: got[-1].id == f"toll:{entries(bed)}")
    seen += [each["entry"] for each in with_data(found)]
    assert list(range(1, entries(bed) + 1)) == seen


def entries(bed: Bed) -> int:
    return int(bed.gate.store.value("SELECT MAX(idx) FROM ledger"))


def test_the_first_event_has_a_data_line_so_that_every_reader_keeps_its_id(streaming: tuple[Bed, str]) -> None:
    """The parser of npm's `eventsource` drops an event without data, with its id: a reader whose stream broke before its
    first change would come back without an id, and miss what happened meanwhile.
    """
    bed, url = streaming
    headers = {"Authorization": f"Bearer {bed.key}"}
    with httpx2.Client(timeout=20) as client, client.stream("GET", f"{url}/v1/events", headers=headers) as response:
        first = list(takewhile(bool, response.iter_lines()))
    assert [f"id: toll:{entries(bed)}", "event: position", "data: ", "retry: 2000"] == first


def test_events_changes_and_heartbeats_end_with_an_empty_line_of_newlines_alone(streaming: tuple[Bed, str]) -> None:
    """Readers that split at two newlines find no event in a stream with carriage returns."""
    bed, url = streaming
    headers, sent = {"Authorization": f"Bearer {bed.key}"}, ""
    with httpx2.Client(timeout=20) as client, client.stream("GET", f"{url}/v1/events", headers=headers) as response:
        decided(bed, 1)
        for text in response.iter_text():
            sent += text
            if all(part in sent for part in ("event: position", "event: settled", ": ping")):
                break
    assert "\n\n" in sent
    assert "\r" not in sent


def test_a_stream_that_has_nothing_to_say_says_that_it_lives(streaming: tuple[Bed, str]) -> None:
    bed, url = streaming
    headers = {"Authorization": f"Bearer {bed.key}"}
    with httpx2.Client(timeout=20) as client, client.stream("GET", f"{url}/v1/events", headers=headers) as response:
        lines = response.iter_lines()
        assert any(line.startswith(": ping") for line in lines)
        assert 1 == value(scraped(bed), "sds_streams")


def test_a_key_that_is_revoked_ends_its_stream_and_so_does_draining(streaming: tuple[Bed, str]) -> None:
    bed, url = streaming
    key = bed.key_for("reader", ("read",), ("toll",))
    with stream(url, key) as sent, stream(url, bed.key) as other:
        next(sent)
        next(other)
        revoke_key(bed.database, "reader", now_ms=now_ms())
        assert [] == with_data(list(sent))
        bed.service.draining = True
        assert [] == with_data(list(other))
    assert (401, "UNAUTHENTICATED") == refused(url, key)
    assert (503, "DRAINING") == refused(url, bed.key)


def test_it_is_for_gates_that_the_key_may_read_and_for_so_many_streams(streaming: tuple[Bed, str]) -> None:
    bed, url = streaming
    elsewhere = bed.key_for("elsewhere", ("read",), ("fraud",))
    assert (403, "GATE_FORBIDDEN") == refused(url, elsewhere, query="?gate=toll")
    assert (403, "ROLE_MISSING") == refused(url, bed.key_for("shop", ("submit",), ("toll",)))
    assert (404, "GATE_UNKNOWN") == refused(url, bed.key, query="?gate=none")
    for last in ("toll", "toll:-1", "toll:x", "toll:1,toll:2", "toll:999", "toll:9999999999999999999999"):
        assert (400, "CURSOR_INVALID") == refused(url, bed.key, last)
    with stream(url, bed.key) as one, stream(url, bed.key) as two:
        next(one)
        next(two)
        assert (429, "RATE_LIMITED") == refused(url, bed.key)
    wait_until(lambda: not bed.app.state.operations.streams)
    with stream(url, bed.key) as again:
        next(again)


def test_of_streams_that_are_asked_for_together_no_more_begin_than_may_be(
    streaming: tuple[Bed, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, url = streaming
    real, all_refused = events.head, threading.Event()

    def slow(record: Reader) -> int:
        all_refused.wait(30)
        return real(record)

    monkeypatch.setattr(events, "head", slow)
    headers = {"Authorization": f"Bearer {bed.key}"}

    def asked(_: int) -> int:
        with httpx2.Client(timeout=40) as client, client.stream("GET", f"{url}/v1/events", headers=headers) as answer:
            return int(answer.status_code)

    with ThreadPoolExecutor(5) as pool:
        coming = [pool.submit(asked, number) for number in range(5)]
        wait_until(lambda: sum(each.done() for each in coming) == 3)
        all_refused.set()
        assert [200, 200, 429, 429, 429] == sorted(each.result() for each in coming)
    wait_until(lambda: not bed.app.state.operations.streams)


def test_a_place_is_given_back_when_a_stream_fails_to_begin_and_when_its_reader_goes_before(
    streaming: tuple[Bed, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, url = streaming
    streams, real, let_go = bed.app.state.operations.streams, events.head, threading.Event()

    def fails(_: Reader) -> int:
        raise RuntimeError

    def slow(record: Reader) -> int:
        let_go.wait(30)
        return real(record)

    monkeypatch.setattr(events, "head", fails)
    assert [(500, "INTERNAL")] * 3 == [refused(url, bed.key) for _ in range(3)]
    wait_until(lambda: not streams)
    monkeypatch.setattr(events, "head", slow)
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), 20) as reader:
        reader.sendall(f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {bed.key}\r\n\r\n".encode())
        wait_until(lambda: 1 == streams.total())
    let_go.set()
    wait_until(lambda: not streams)


def test_of_an_entry_only_words_without_spaces_come_through(bed: Bed) -> None:
    bed.client.put("/v1/halt", json={"halted": True, "reason": "the card 4111 of Jane"})
    bed.client.post("/v1/agents/toll-agent/suspend", json={"reason": "Jane said so"})
    found = read_changes(bed.gate.store, "toll", 0)
    assert ["HALT", "AGENT"] == [each.kind for each in found[-2:]]
    assert "Jane" not in str([each.as_data() for each in found])
    assert {"agent_id": "toll-agent", "was": "ACTIVE", "status": "SUSPENDED"} == found[-1].facts
