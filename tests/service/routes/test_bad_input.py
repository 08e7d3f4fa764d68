"""The table of bad input: what is sent, and which problem answers it. None is a 500, and none decides anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.host.clock import now_ms
from sds.service.callers import revoke_key
from tests.service.operations.exposition import scraped, value
from tests.service.testbed import EVENT, Bed, check, opened_bed

JSON = json.dumps(EVENT).encode()


def flows(bed: Bed) -> int:
    return int(bed.gate.store.value("SELECT count(*) FROM decision_flows"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with pytest.MonkeyPatch.context() as patched:
        home = tmp_path_factory.mktemp("home")
        patched.setenv("SDS_HOME", str(home))
        with opened_bed(home) as made:
            yield made


@pytest.fixture
def untouched(shared: Bed) -> Iterator[Bed]:
    """Nothing that is asked in the test leaves anything in the record, or under a key."""
    yield shared
    shared.clock = now_ms
    assert 0 == flows(shared)
    with shared.database.reading() as connection:
        assert 0 == connection.exec_driver_sql("SELECT count(*) FROM idempotency").scalar()


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer sds_{'k' * 43}",
        f"bearer sds_{'k' * 44}",
        "Basic abc",
        "Bearer sds_" + "é" * 43,
    ],
)
def test_no_key_or_a_wrong_one_is_401(untouched: Bed, authorization: str) -> None:
    refused = untouched.post(headers={"Authorization": authorization.encode()})
    check(refused, 401, "UNAUTHENTICATED")
    assert "Bearer" == refused.headers["www-authenticate"]


def test_a_revoked_key_is_401_within_a_second(untouched: Bed) -> None:
    key = untouched.key_for("shop", ("read",), ("toll",))
    asked = {"Authorization": f"Bearer {key}"}
    assert 200 == untouched.client.get("/v1/gates", headers=asked).status_code
    revoke_key(untouched.database, "shop", now_ms=now_ms())
    at_ms = now_ms()
    untouched.clock = lambda: at_ms + untouched.settings.key_cache_ms
    check(untouched.client.get("/v1/gates", headers=asked), 401, "UNAUTHENTICATED")


def test_a_role_or_a_gate_that_is_missing_is_403(untouched: Bed) -> None:
    reads = untouched.key_for("reads", ("read",), ("toll",))
    elsewhere = untouched.key_for("elsewhere", ("submit", "read"), ("refund",))
    check(untouched.post(headers={"Authorization": f"Bearer {reads}"}), 403, "ROLE_MISSING")
    check(untouched.post(headers={"Authorization": f"Bearer {elsewhere}"}), 403, "GATE_FORBIDDEN")
    asked = untouched.client.get("/v1/decisions?gate=toll", headers={"Authorization": f"Bearer {elsewhere}"})
    check(asked, 403, "GATE_FORBIDDEN")


def test_what_is_not_there_is_404(untouched: Bed) -> None:
    check(untouched.post(gate="tolls"), 404, "GATE_UNKNOWN")
    check(untouched.client.get("/v1/decisions?gate=tolls"), 404, "GATE_UNKNOWN")
    for dfid in ("b5dba02b-798e-821c-b0fe-efd5d3a8981f", "x", "%00", "'; --", "é"):
        check(untouched.client.get(f"/v1/decisions/{dfid}"), 404, "DFID_UNKNOWN")
    check(untouched.client.get("/v2"), 404, "NOT_FOUND")


def test_a_decision_of_a_gate_that_the_key_is_not_for_is_404(bed: Bed) -> None:
    dfid = bed.post().json()["dfid"]
    elsewhere = bed.key_for("elsewhere", ("read",), ("refund",))
    check(
        bed.client.get(f"/v1/decisions/{dfid}", headers={"Authorization": f"Bearer {elsewhere}"}), 404, "DFID_UNKNOWN"
    )


@pytest.mark.parametrize("cursor", ["", "%00", "W10", "WzEsMl0", "e30", "_", "A" * 300, "WzEsIngiXQ", "é"])
def test_a_cursor_that_is_none_of_ours_is_400(untouched: Bed, cursor: str) -> None:
    check(untouched.client.get(f"/v1/decisions?cursor={cursor}"), 400, "CURSOR_INVALID")


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=201", "limit=x", "since=-1", "since=1e3", "state=OPEN", "gate=" + "x" * 65]
)
def test_a_parameter_that_cannot_be_used_is_400(untouched: Bed, query: str) -> None:
    check(untouched.client.get(f"/v1/decisions?{query}"), 400, "USAGE")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/decisions?staet=ESCALATED", "no parameter `staet`"),
        ("/v1/decisions?gate=toll&gate=other", "`gate` is given twice"),
        ("/v1/decisions/x?texts=1", "no parameter `texts`"),
        ("/v1/escalations?gates=toll", "no parameter `gates`"),
        ("/v1/agents?gate=toll", "no parameter `gate`"),
        ("/v1/halt?gate=toll", "no parameter `gate`"),
        ("/v1/events?gates=toll", "no parameter `gates`"),
    ],
)
def test_a_parameter_that_is_not_known_is_400_for_it_would_have_been_ignored(
    untouched: Bed, path: str, why: str
) -> None:
    assert why in check(untouched.client.get(path), 400, "USAGE")["detail"]


def test_a_misspelt_deadline_in_the_query_is_400(untouched: Bed) -> None:
    refused = untouched.client.post("/v1/gates/toll/decisions?dealine_ms=100", json=EVENT)
    assert "`dealine_ms`" in check(refused, 400, "USAGE")["detail"]


@pytest.mark.parametrize("path", ["/livez?x=1", "/readyz?x=1", "/errors?x=1", "/openapi.json?x=1"])
def test_what_machines_look_at_may_be_asked_with_anything(untouched: Bed, path: str) -> None:
    assert 200 == untouched.client.get(path).status_code


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/gates/toll/decisions"), ("DELETE", "/v1/decisions"), ("PUT", "/livez")]
)
def test_another_method_is_405_and_says_which_there_are(untouched: Bed, method: str, path: str) -> None:
    refused = untouched.client.request(method, path)
    check(refused, 405, "METHOD_NOT_ALLOWED")
    assert refused.headers["allow"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": ""},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "br"},
    ],
)
def test_another_media_type_or_encoding_is_415(untouched: Bed, headers: dict[str, str]) -> None:
    check(untouched.post(JSON, headers=headers), 415, "MEDIA_TYPE")


def test_json_in_utf_8_may_say_so(bed: Bed) -> None:
    assert 200 == bed.post(JSON, headers={"Content-Type": 'Application/JSON; charset="UTF-8"'}).status_code


@pytest.mark.parametrize("length", ["²", "9" * 5000, "-1", "1e3", ""])
def test_a_length_that_cannot_be_read_is_413(untouched: Bed, length: str) -> None:
    check(untouched.post(headers={"Content-Length": length.encode("latin-1")}), 413, "BODY_TOO_LARGE")


def test_a_body_over_64_kib_is_413(untouched: Bed) -> None:
    refused = untouched.post({**EVENT, "text": "x" * 65_536})
    check(refused, 413, "BODY_TOO_LARGE")
    assert "close" == refused.headers["connection"]


BODIES = {
    "empty": b"",
    "not JSON": b"{",
    "a list": b"[]",
    "null": b"null",
    "not UTF-8": JSON.replace(b"Please", b"\xff\xfe"),
    "latin 1": JSON.replace(b"Please", b"caf\xe9"),
    "a byte order mark": b"\xef\xbb\xbf" + JSON,
    "UTF-16": json.dumps(EVENT).encode("utf-16"),
    "UTF-32": json.dumps(EVENT).encode("utf-32-le"),
    "a name twice": JSON.replace(b"{", b'{"trip_id": "T-2",', 1),
    "NaN": JSON.replace(b'"Please."', b"NaN"),
    "Infinity": JSON.replace(b'"Please."', b"-Infinity"),
    "a lone surrogate": JSON.replace(b"Please", rb"\ud800"),
    "a lone surrogate in a name": JSON.replace(b'"text"', rb'"te\udfffxt"'),
    "deep lists": b"[" * 60_000,
    "deep objects": b'{"a":' * 12_000,
    "an unknown field": json.dumps({**EVENT, "more": 1}).encode(),
    "a field missing": json.dumps({"trip_id": "T-1"}).encode(),
    "a number in place of a text": json.dumps({**EVENT, "text": 1}).encode(),
    "a long number": JSON.replace(b'"Please."', b"9" * 5_000),
    "an unseen character in the id": json.dumps({**EVENT, "trip_id": "T\u200b1"}).encode(),
    "NUL": b"\x00",
    "two events": JSON + JSON,
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_what_is_no_event_is_400_and_stores_nothing(untouched: Bed, body: bytes) -> None:
    check(untouched.post(body, headers={"Idempotency-Key": "k"}), 400, "EVENT_INVALID")


def test_depth_200_000_is_refused_as_too_large_and_no_stack_is_used_up(untouched: Bed) -> None:
    check(untouched.post(b"[" * 200_000), 413, "BODY_TOO_LARGE")


@pytest.mark.parametrize("deadline", ["0", "-1", "x", "", "1.5", "1e3", "NaN", "35001", "99999999999999999999", "٣"])
def test_a_deadline_that_is_no_number_or_out_of_range_is_400(untouched: Bed, deadline: str) -> None:
    check(untouched.post(headers={"Deadline-Ms": deadline.encode()}), 400, "DEADLINE_INVALID")
    check(
        untouched.client.post("/v1/gates/toll/decisions", params={"deadline_ms": deadline}, json=EVENT),
        400,
        "DEADLINE_INVALID",
    )


def test_a_deadline_that_is_given_twice_is_400(untouched: Bed) -> None:
    refused = untouched.client.post(
        "/v1/gates/toll/decisions?deadline_ms=1000", json=EVENT, headers={"Deadline-Ms": "1000"}
    )
    check(refused, 400, "DEADLINE_INVALID")


@pytest.mark.parametrize(
    "key", ["", '""', '"', '"a', 'a"' + "b" * 254, "x" * 256, "k\u00e9y", '"a"b"', '"\\a"', "a\tb"]
)
def test_an_idempotency_key_that_is_none_is_400(untouched: Bed, key: str) -> None:
    check(untouched.post(headers={"Idempotency-Key": key.encode()}), 400, "HEADER_INVALID")


def test_the_same_event_with_another_body_is_422_and_names_the_first(bed: Bed) -> None:
    first = bed.post()
    refused = check(bed.post({**EVENT, "text": "Please!"}, headers={"Idempotency-Key": "k"}), 422, "EVENT_CONFLICT")
    assert first.json()["dfid"] == refused["dfid"]
    assert "send what was sent first, or give the event an id of its own" == refused["hint"]
    assert 200 == bed.post(headers={"Idempotency-Key": "k"}).status_code  # the refusal kept nothing


def test_a_store_that_is_gone_is_503_for_now(bed: Bed) -> None:
    bed.gate.store.close()
    problem = check(bed.post(), 503, "STORE_UNAVAILABLE")
    assert problem["retryable"]


def test_the_services_own_database_that_refuses_is_503_and_nothing_is_decided(bed: Bed) -> None:
    with bed.database.transaction() as connection:
        connection.exec_driver_sql("DROP TABLE idempotency")
    problem = check(bed.post(headers={"Idempotency-Key": "k"}), 503, "STORE_UNAVAILABLE")
    assert "the service's database failed: SQLITE_ERROR" == problem["detail"]
    assert 0 == flows(bed)
    assert 200 == bed.post().status_code


def test_what_nobody_foresaw_is_500_without_a_word_of_it(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the secret of CAR-1")

    monkeypatch.setattr(type(bed.service.admission), "enter", fails)
    refused = bed.post()
    assert "its log names this `instance`" in check(refused, 500, "INTERNAL")["detail"]
    assert "CAR-1" not in refused.text + str(bed.logged)
    ((_, facts),) = [line for line in bed.logged if line[0] == "service.failed"]
    assert ("RuntimeError", refused.json()["instance"]) == (facts["kind"], facts["instance"])
    assert "nosniff" == refused.headers["x-content-type-options"]
    text = scraped(bed)
    assert 1 == value(text, "sds_refusals_total", code="INTERNAL")
    assert 1 == value(text, "sds_http_seconds_count", route="/v1/gates/{gate}/decisions", method="POST", status="500")


def test_a_key_that_asks_too_often_is_429_with_retry_after(home: Path) -> None:
    with opened_bed(home, rate_per_s=0.5, rate_burst=2) as bed:
        _ask_too_often(bed)


def _ask_too_often(bed: Bed) -> None:
    at_ms = now_ms()
    bed.clock = lambda: at_ms
    asked = [bed.client.get("/v1/gates") for _ in range(3)]
    assert [200, 200] == [each.status_code for each in asked[:2]]
    check(asked[2], 429, "RATE_LIMITED")
    assert "2" == asked[2].headers["retry-after"]
    bed.clock = lambda: at_ms + 2_000
    assert 200 == bed.client.get("/v1/gates").status_code
