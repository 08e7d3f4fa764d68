"""What `POST /v1/gates/{gate}/decisions` answers."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from sds.gate import Gate
from sds.host.clock import now_ms
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import StoreError
from sds.kernel.storage.sqlite import SqliteStore
from sds.opening import decisions_at_once
from tests.kernel.durable import proposal
from tests.service.engines import Held
from tests.service.operations.waiting import wait_until
from tests.service.testbed import EVENT, Bed, check, opened_bed


def test_an_event_is_decided_once_and_the_same_again_gives_the_stored_answer(bed: Bed) -> None:
    first, second = bed.post(), bed.post()
    assert (200, 200) == (first.status_code, second.status_code)
    assert "WAIVE" == first.json()["action"]
    assert first.json() == second.json() == bed.gate.decide(EVENT).as_data() | {"reasons": []}
    assert 1 == bed.gate.store.value("SELECT count(*) FROM decision_flows")


def test_what_is_known_is_answered_although_a_new_event_would_not_be_there_in_time(home: Path) -> None:
    with opened_bed(home) as bed:
        first, admission = bed.post(), bed.service.admission
        leave = admission.enter("toll", 1e9)
        admission.took("toll", 1e9)
        assert admission.idle
        assert first.content == bed.post().content
        check(bed.post({**EVENT, "trip_id": "T-9"}), 503, "OVERLOADED")
        leave()


def test_an_escalation_is_an_answer_too(bed: Bed) -> None:
    answer = bed.post({**EVENT, "car_id": "CAR-2"})
    assert (200, "ESCALATED") == (answer.status_code, answer.json()["state"])


def test_every_answer_has_the_headers_that_a_browser_should_be_given(bed: Bed) -> None:
    for answer in (bed.post(), bed.client.get("/v2"), bed.client.get("/livez")):
        assert ("nosniff", "DENY") == (answer.headers["x-content-type-options"], answer.headers["x-frame-options"])
        assert "no-store" == answer.headers["cache-control"]
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.timeout(30)
def test_who_prefers_not_to_wait_gets_202_and_where_to_look_once_the_event_is_on_record(home: Path) -> None:
    engine = Held()
    with opened_bed(home, engine) as bed:
        accepted = bed.post(headers={"Prefer": "respond-async, wait=10", "Idempotency-Key": "k"})
        assert (202, "respond-async") == (accepted.status_code, accepted.headers["preference-applied"])
        assert accepted.json()["pending"]
        where = accepted.headers["location"]
        assert "ACTIVE" == bed.client.get(where).json()["decision"]["state"]
        engine.let_go.set()
        wait_until(lambda: not bed.client.get(where).json()["decision"]["pending"])
        assert "WAIVE" == bed.client.get(where).json()["decision"]["action"]
        again = bed.post(headers={"Idempotency-Key": "k"})
        assert (202, accepted.content, where) == (again.status_code, again.content, again.headers["location"])


@pytest.mark.timeout(30)
def test_what_may_be_lost_with_the_power_is_not_answered_with_202(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a flow's first commit is on the disk: nothing but `flush` waits for that."""
    engine, flushed = Held(), list[bool]()

    def flush(store: SqliteStore) -> None:
        flushed.append(True)
        if len(flushed) == 1:
            raise StoreError("the disk is gone")

    monkeypatch.setattr(SqliteStore, "flush", flush)
    with opened_bed(home, engine) as bed:
        check(bed.post(headers={"Prefer": "respond-async"}), 503, "STORE_UNAVAILABLE")
        assert 202 == bed.post(headers={"Prefer": "respond-async"}).status_code
        assert 2 == len(flushed)
        engine.let_go.set()


@pytest.mark.timeout(30)
def test_a_flow_that_a_crash_undid_before_it_was_flushed_is_not_answered_with_202(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, flushed, lost, known = Held(), list[bool](), list[bool](), Gate.known

    def flush(store: SqliteStore) -> None:
        flushed.append(True)
        lost.extend([True] if len(flushed) == 1 else [])

    monkeypatch.setattr(SqliteStore, "flush", flush)
    monkeypatch.setattr(Gate, "known", lambda gate, event: None if lost and lost.pop() else known(gate, event))
    with opened_bed(home, engine) as bed:
        assert 202 == bed.post(headers={"Prefer": "respond-async"}).status_code
        assert 2 == len(flushed)
        engine.let_go.set()


@pytest.mark.timeout(30)
def test_what_is_decided_elsewhere_beyond_the_deadline_is_409_with_where_to_look(home: Path) -> None:
    engine = Held()
    with opened_bed(home, engine) as bed, ThreadPoolExecutor(1) as pool:
        with opened_bed(home, Held()) as elsewhere:
            first = pool.submit(bed.post)
            assert engine.entered.acquire(timeout=10)
            refused = elsewhere.post(headers={"Idempotency-Key": "k", "Deadline-Ms": "100"})
            problem = check(refused, 409, "FLOW_IN_PROGRESS")
            assert problem["retryable"]
            assert f"/v1/decisions/{problem['dfid']}" == refused.headers["location"]
            assert refused.headers["retry-after"]
            engine.let_go.set()
        assert (200, problem["dfid"]) == ((answer := first.result(10)).status_code, answer.json()["dfid"])


@pytest.mark.timeout(30)
def test_what_waits_for_its_turn_beyond_a_deadline_is_409_and_names_where_it_will_be(home: Path) -> None:
    engine = Held()
    second = {**EVENT, "trip_id": "T-2"}
    with opened_bed(home, engine) as bed:
        for number in range(decisions_at_once(engine)):  # a thread each, though but one has the car
            bed.gate.submit({**EVENT, "trip_id": f"R-{number}"})
        assert engine.entered.acquire(timeout=10)
        waiting = bed.gate.submit(second)
        wait_until(lambda: bed.gate.queued == 1)
        refused = bed.post_late(second)
        problem = check(refused, 409, "FLOW_IN_PROGRESS")
        where = refused.headers["location"]
        assert f"/v1/decisions/{problem['dfid']}" == where
        not_yet = bed.client.get(where)
        assert check(not_yet, 404, "DFID_UNKNOWN")["retryable"]
        assert "1" == not_yet.headers["retry-after"]
        engine.let_go.set()
        assert problem["dfid"] == waiting.result(10).dfid
        assert not bed.client.get(where).json()["decision"]["pending"]


@pytest.mark.timeout(30)
def test_what_other_processes_decide_keeps_no_thread_from_deciding_something_else(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sds.service.routes.submitting.GRACE_MS", 10_000)  # on a busy machine a gate is late to give up
    events = [{**EVENT, "trip_id": f"E-{number}"} for number in range(8)]
    with opened_bed(home) as bed, opened_bed(home, Held()) as elsewhere, ThreadPoolExecutor(8) as pool:
        for event in events:
            elsewhere.gate.kernel.open(elsewhere.gate.read(event))
        assert len(events) > decisions_at_once(bed.gate.engine)
        waiting = [pool.submit(bed.post, event, headers={"Deadline-Ms": "4000"}) for event in events]
        wait_until(lambda: bed.service.admission.elsewhere >= len(events) - bed.service.admission.parallel)
        fresh = bed.post(headers={"Deadline-Ms": "3000"})
        assert (200, "WAIVE") == (fresh.status_code, fresh.json().get("action")), fresh.text
        for event, each in zip(events, waiting, strict=True):
            problem = check(each.result(10), 409, "FLOW_IN_PROGRESS")
            assert problem["dfid"] == elsewhere.gate.known(event).dfid  # type: ignore[union-attr]  # it is on record
        assert 0 == bed.service.admission.elsewhere


@pytest.mark.timeout(30)
def test_what_another_process_decides_is_answered_as_soon_as_it_has(home: Path) -> None:
    engine = Held()
    with opened_bed(home, engine) as elsewhere, opened_bed(home) as bed, ThreadPoolExecutor(2) as pool:
        first = pool.submit(elsewhere.post)
        assert engine.entered.acquire(timeout=10)
        second = pool.submit(bed.post, headers={"Idempotency-Key": "k"})
        wait_until(lambda: bed.service.admission.elsewhere == 1)
        assert 0 == bed.gate.deciding + bed.gate.queued
        engine.let_go.set()
        assert first.result(10).content == second.result(10).content
        assert second.result().content == bed.post(headers={"Idempotency-Key": "k"}).content


@pytest.mark.parametrize("headers", [{"Prefer": "respond-async"}, {"Prefer": "respond-async", "Idempotency-Key": "k"}])
def test_what_another_process_decides_is_409_also_where_its_deadline_passed_before_it_was_looked_up(
    home: Path, headers: dict[str, str]
) -> None:
    with opened_bed(home) as bed, opened_bed(home, Held()) as elsewhere:
        dfid = elsewhere.gate.kernel.open(elsewhere.gate.read(EVENT)).dfid
        with patch("sds.service.routes.submitting.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 60.0)):
            refused = bed.post(headers=headers)
        problem = check(refused, 409, "FLOW_IN_PROGRESS")
        assert (dfid, f"/v1/decisions/{dfid}") == (problem["dfid"], refused.headers["location"])
        assert problem["retryable"]


@pytest.mark.timeout(30)
def test_what_is_given_up_while_another_process_decides_it_is_409_or_the_answer_of_that_process(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep, wake = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        asleep.set()
        wake.wait(20)

    monkeypatch.setattr("sds.gate.time", SimpleNamespace(sleep=sleep))
    with opened_bed(home) as bed, opened_bed(home, Held()) as elsewhere, ThreadPoolExecutor(1) as pool:
        kernel = elsewhere.gate.kernel
        for ended in (False, True):
            event = {**EVENT, "trip_id": f"T-{ended}"}
            packet = kernel.open(elsewhere.gate.read(event))
            assert isinstance(packet, DecisionPacket)
            sent = pool.submit(bed.post, event, headers={"Deadline-Ms": "300"})
            assert asleep.wait(10)
            if ended:
                kernel.decide(packet, proposal("DENY", "NO_REASON")(packet))
            refused = sent.result(10)
            wake.set()
            if ended:
                assert (200, packet.dfid) == (refused.status_code, refused.json()["dfid"])
            else:
                problem = check(refused, 409, "FLOW_IN_PROGRESS")
                assert (packet.dfid, True) == (problem["dfid"], problem["retryable"])
                assert f"/v1/decisions/{packet.dfid}" == refused.headers["location"]
            wait_until(lambda: not bed.gate.deciding)
            asleep.clear()
            wake.clear()


def test_no_more_than_a_queue_waits_for_other_processes(home: Path) -> None:
    with opened_bed(home, queue_max=1) as bed, opened_bed(home, Held()) as elsewhere:
        elsewhere.gate.kernel.open(elsewhere.gate.read(EVENT))
        with bed.service.admission.waiting_elsewhere():
            refused = bed.post(headers={"Idempotency-Key": "k", "Deadline-Ms": "1500"})
        assert "another process" in check(refused, 503, "QUEUE_FULL")["detail"]


@pytest.mark.timeout(30)
def test_who_prefers_not_to_wait_waits_no_longer_than_the_deadline_for_the_event_to_be_on_record(home: Path) -> None:
    engine = Held()
    with opened_bed(home, engine) as bed:
        for number in range(decisions_at_once(engine)):
            bed.gate.submit({**EVENT, "trip_id": f"R-{number}"})
        assert engine.entered.acquire(timeout=10)
        asked = bed.post(headers={"Prefer": "respond-async", "Deadline-Ms": "300"})
        check(asked, 504, "NOT_DECIDED")
        assert (0, False) == (bed.gate.queued, engine.let_go.is_set())
        engine.let_go.set()


@pytest.mark.timeout(30)
def test_a_deadline_that_passes_ends_the_flow_undecided_and_says_504(home: Path) -> None:
    engine = Held()
    with opened_bed(home, engine) as bed:
        for number in range(5):  # until it has begun in time
            refused = bed.client.post(f"/v1/gates/toll/decisions?deadline_ms={80 * 4**number}", json=EVENT)
            if engine.entered.acquire(blocking=False):
                break
        assert "in time (CANCELLED): the event's flow" in check(refused, 504, "NOT_DECIDED")["detail"]
        engine.let_go.set()
        time.sleep(0.1)
        assert 0 == bed.gate.store.value("SELECT count(*) FROM execution_log")


@pytest.mark.timeout(30)
def test_who_waits_for_a_decision_that_anothers_deadline_ends_has_it_made_afresh(home: Path) -> None:
    engine, later_ms = Held(), 0
    with opened_bed(home, engine, clock=lambda: now_ms() + later_ms) as bed, ThreadPoolExecutor(1) as pool:
        assert 202 == bed.post(headers={"Prefer": "respond-async", "Deadline-Ms": "20000"}).status_code
        second = pool.submit(bed.post)
        wait_until(lambda: 2 == bed.service.admission.in_hand)
        later_ms = 20_000 + bed.gate.contract.budget.dispatch_ms_max
        assert bed.gate.known(EVENT) is None  # the deadline has passed
        engine.let_go.set()
        assert (200, "WAIVE") == ((answer := second.result(10)).status_code, answer.json()["action"])
        assert 2 == bed.gate.store.value("SELECT count(*) FROM decision_flows")
