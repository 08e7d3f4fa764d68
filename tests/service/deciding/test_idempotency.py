"""`Idempotency-Key`: the same key and event give the first answer, byte for byte; what was not decided is not kept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import orjson
import psycopg
import pytest

from sds.host.backup import back_up
from sds.host.clock import now_ms
from sds.host.paths import open_record, store_url
from sds.host.restoring import restore
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.flow.intake import PREVIEW
from sds.kernel.operations.recovery import recover
from sds.service.database import idempotency
from sds.service.deciding.idempotency import KeptAnswer, claim_of
from tests.kernel.durable import proposal
from tests.proposers import Greedy, Says
from tests.service.engines import Held
from tests.service.operations.waiting import wait_until
from tests.service.testbed import EVENT, Bed, check, opened_bed

KEY = {"Idempotency-Key": '"one"'}


def kept(bed: Bed) -> int:
    with bed.database.reading() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM idempotency").scalar() or 0)


def test_the_same_key_and_event_give_the_first_answer_byte_for_byte(bed: Bed) -> None:
    first = bed.post(headers=KEY)
    bed.gate.label(first.json()["dfid"], right=True, who="somebody")
    for key in ('"one"', "one"):
        again = bed.post(headers={"Idempotency-Key": key})
        assert (200, first.content) == (again.status_code, again.content)
        assert "true" == again.headers["idempotent-replayed"]
    assert "idempotent-replayed" not in first.headers


def test_the_same_key_with_another_event_is_422_and_names_what_was_made_of_the_first(bed: Bed) -> None:
    dfid = bed.post(headers=KEY).json()["dfid"]
    for changed in ({**EVENT, "trip_id": "T-2"}, {**EVENT, "text": "Please!"}):
        assert dfid == check(bed.post(changed, headers=KEY), 422, "KEY_CONFLICT")["dfid"]
    assert 1 == bed.gate.store.value("SELECT count(*) FROM decision_flows")


def test_the_same_event_may_be_written_in_another_way(bed: Bed) -> None:
    first = bed.post(headers=KEY)
    again = bed.post(b' {"text": "Please.", "car_id": "CAR-1",\n"trip_id": "T-1"}', headers=KEY)
    assert (200, first.content) == (again.status_code, again.content)


def test_a_key_is_one_callers_at_one_gate(bed: Bed) -> None:
    bed.post(headers=KEY)
    other = bed.key_for("other", ("submit",), ("toll",))
    answered = bed.post({**EVENT, "trip_id": "T-2"}, headers={**KEY, "Authorization": f"Bearer {other}"})
    assert 200 == answered.status_code
    assert 2 == kept(bed)


def test_a_key_given_to_an_event_that_was_decided_before_keeps_that_answer(bed: Bed) -> None:
    first = bed.post()
    assert first.content == bed.post(headers=KEY).content
    assert "true" == bed.post(headers=KEY).headers["idempotent-replayed"]


@pytest.mark.timeout(30)
def test_a_duplicate_waits_for_the_first_and_a_changed_one_is_refused_meanwhile(home: Path) -> None:
    engine = Held()
    with opened_bed(home, engine) as bed, ThreadPoolExecutor(3) as pool:
        first = pool.submit(bed.post, headers=KEY)
        assert engine.entered.acquire(timeout=10)
        second = pool.submit(bed.post, headers=KEY)
        refused = check(bed.post({**EVENT, "trip_id": "T-2"}, headers=KEY), 422, "KEY_CONFLICT")
        assert not first.done() | second.done()
        engine.let_go.set()
        answers = [first.result(10), second.result(10)]
        assert [200, 200] == [each.status_code for each in answers]
        assert answers[0].content == answers[1].content
        assert answers[0].json()["dfid"] == refused["dfid"]
        assert 1 == bed.gate.store.value("SELECT count(*) FROM decision_flows")


def test_what_was_not_decided_is_not_kept(home: Path) -> None:
    engine = Held()
    with opened_bed(home, engine) as bed:
        late = bed.post(headers={**KEY, "Deadline-Ms": "50"})
        problem = check(late, 504, "NOT_DECIDED")
        assert problem["retryable"]
        assert late.headers["retry-after"]
        assert 0 == kept(bed)
        engine.let_go.set()
        assert 200 == bed.post(headers=KEY).status_code


@pytest.mark.timeout(30)
def test_an_answer_of_one_event_is_never_given_to_another_although_its_key_was_let_go_of(home: Path) -> None:
    engine, other = Held(), {**EVENT, "trip_id": "T-2"}
    with opened_bed(home, engine) as bed, ThreadPoolExecutor(3) as pool:
        first = pool.submit(bed.post, headers=KEY)
        assert engine.entered.acquire(timeout=10)
        check(bed.post_late(**KEY), 409, "FLOW_IN_PROGRESS")
        second = pool.submit(bed.post, other, headers=KEY)
        wait_until(lambda: 2 <= bed.gate.deciding + bed.gate.queued)
        engine.let_go.set()
        assert 200 == first.result(10).status_code
        assert (200, "T-2") == (second.result(10).status_code, second.result().json()["event_id"])
        assert second.result().content == bed.post(other, headers=KEY).content
        assert second.result().json()["dfid"] == check(bed.post(headers=KEY), 422, "KEY_CONFLICT")["dfid"]


def test_what_another_version_answered_is_replayed_although_it_said_less(bed: Bed) -> None:
    bed.post(headers=KEY)
    with bed.database.transaction() as connection:
        (body,) = connection.exec_driver_sql("SELECT body FROM idempotency").one()
        said = {name: value for name, value in orjson.loads(body).items() if name not in ("confidence", "resolution")}
        older = orjson.dumps(said)
        connection.execute(idempotency.update().values(body=older))
    bed.client.event_hooks = {}  # the older version's description fits this answer
    again = bed.post(headers=KEY)
    assert (200, older, "true") == (again.status_code, again.content, again.headers["idempotent-replayed"])


def test_a_key_is_released_and_kept_for_its_own_event_alone(bed: Bed) -> None:
    own, other = (
        claim_of("everything", bed.gate, "one", bed.gate.read({**EVENT, "trip_id": name})) for name in ("T-1", "T-2")
    )
    assert bed.service.kept.claim(own, bed.gate, bed.gate.read(EVENT)) is None
    bed.service.kept.release(other)
    assert 1 == kept(bed)
    answer = KeptAnswer(200, "019a", b"of the other")
    assert answer == bed.service.kept.keep(other, answer)
    assert bed.service.kept.find(own, bed.gate, bed.gate.read(EVENT)) is None
    bed.service.kept.release(own)
    assert 0 == kept(bed)


@pytest.mark.timeout(30)
def test_what_was_taken_and_ended_undecided_is_decided_afresh_under_its_key(home: Path) -> None:
    engine, taken, later_ms = Held(), {**KEY, "Prefer": "respond-async"}, 0
    with opened_bed(home, engine, clock=lambda: now_ms() + later_ms) as bed:
        first = bed.post(headers={**taken, "Deadline-Ms": "20000"})
        assert 202 == first.status_code
        later_ms = 20_000 + bed.gate.contract.budget.dispatch_ms_max
        assert bed.gate.known(EVENT) is None
        engine.let_go.set()
        again = bed.post(headers=KEY)
        assert (200, "WAIVE") == (again.status_code, again.json()["action"])
        assert "idempotent-replayed" not in again.headers
        assert again.content == bed.post(headers=KEY).content


@pytest.mark.timeout(30)
def test_what_was_taken_and_is_decided_is_answered_as_at_first(home: Path) -> None:
    engine, taken = Held(), {**KEY, "Prefer": "respond-async"}
    with opened_bed(home, engine) as bed:
        first = bed.post(headers=taken)
        while_open = bed.post(headers=taken)
        engine.let_go.set()
        wait_until(lambda: bed.gate.deciding == 0)
        for again in (while_open, bed.post(headers=taken)):
            assert (202, first.content) == (again.status_code, again.content)
            assert "true" == again.headers["idempotent-replayed"]


def test_keys_are_kept_for_a_day_and_then_removed(bed: Bed) -> None:
    bed.post(headers=KEY)
    start_ms = now_ms()
    bed.clock = lambda: start_ms + 23 * 3_600_000
    assert "true" == bed.post(headers=KEY).headers["idempotent-replayed"]
    bed.clock = lambda: start_ms + 25 * 3_600_000
    assert 1 == bed.service.kept.sweep()
    assert 0 == kept(bed)


def test_the_day_begins_with_the_answer_not_with_the_question(bed: Bed) -> None:
    answers, event, start_ms = bed.service.kept, bed.gate.read(EVENT), now_ms()
    claim = claim_of("shop", bed.gate, "k", event)
    bed.clock = lambda: start_ms
    assert answers.claim(claim, bed.gate, event) is None
    bed.clock = lambda: start_ms + 30_000
    answers.keep(claim, KeptAnswer(202, "", b"{}"))
    bed.clock = lambda: start_ms + 24 * 3_600_000 + 20_000
    assert (0, 1) == (answers.sweep(), kept(bed))


def test_a_sweep_is_bounded(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sds.service.deciding.idempotency.SWEPT_MAX", 2)
    for number in range(3):
        bed.post({**EVENT, "trip_id": f"T-{number}"}, headers={"Idempotency-Key": f"k{number}"})
    later_ms = now_ms() + 25 * 3_600_000
    bed.clock = lambda: later_ms
    assert [2, 1, 0] == [bed.service.kept.sweep() for _ in range(3)]


@pytest.mark.sqlite_alone("its file, read as bytes")
def test_no_text_of_an_event_is_in_the_services_database(bed: Bed, home: Path) -> None:
    bed.post({**EVENT, "text": "the secret of my car"}, headers=KEY)
    raw = b"".join(path.read_bytes() for path in home.glob("service.db*"))
    assert b"the secret" not in raw
    assert bed.key.encode() not in raw
    assert 0o600 == (home / "service.db").stat().st_mode & 0o777


def test_an_answer_about_an_event_whose_texts_are_erased_is_forgotten(bed: Bed) -> None:
    first = bed.post(headers=KEY)
    bed.gate.erase(EVENT["trip_id"], who="ada", reason="asked for it")
    again = bed.post(headers=KEY)
    assert (first.json()["dfid"], 200) == (again.json()["dfid"], again.status_code)
    assert "idempotent-replayed" not in again.headers
    assert 1 == kept(bed)
    assert (1, 0) == (bed.service.kept.forget_erased(bed.gate), kept(bed))


@pytest.mark.sqlite_alone("it looks into the file of the database and its write-ahead log")
def test_an_answer_that_is_forgotten_for_an_erasure_is_in_no_file_while_the_service_runs(home: Path) -> None:
    def files_with_answer() -> list[str]:
        return [path.name for path in home.glob("service.db*") if b'"event_id":"T-1"' in path.read_bytes()]

    with opened_bed(home, sweep_every_s=3_600.0) as bed:
        bed.post(headers=KEY)
        assert [] != files_with_answer()
        bed.gate.erase(EVENT["trip_id"], who="ada", reason="asked for it")
        with bed.database.reading() as connection:  # somebody reads meanwhile: it is done the next time
            connection.exec_driver_sql("SELECT * FROM idempotency").all()
            assert 1 == bed.service.kept.forget_erased(bed.gate)
        assert 0 == bed.service.kept.forget_erased(bed.gate)
        assert [] == files_with_answer()


@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_that_a_restored_record_did_not_give_is_forgotten(home: Path, begun: bool) -> None:
    """Whether it knows nothing of the event, or knows it as it was before it was decided."""
    folder, copy = home / "toll", home / "copies" / "toll"

    def backed_up() -> None:
        with closing(open_record(folder)) as record:
            back_up(record, folder, copy, gate="toll", with_key=False, now_ms=now_ms())

    def denies(packet: DecisionPacket) -> bytes:
        if begun and packet.dfid != PREVIEW:
            backed_up()
        return proposal("DENY", "NO_REASON")(packet)

    with opened_bed(home, Says(denies)) as bed:
        if not begun:
            backed_up()
        asked = {**KEY, "Authorization": f"Bearer {bed.key}"}
        assert ("DENY", 1) == (bed.post(headers=asked).json()["action"], kept(bed))
    if url := store_url():
        with psycopg.connect(url, autocommit=True) as server:
            server.execute("ALTER SCHEMA sds_toll RENAME TO given_up")
    else:
        (folder / "decisions.db").rename(folder / "given-up.db")
    restore(copy, folder, gate="toll")
    with opened_bed(home, Greedy("WAIVE")) as bed:
        recover(bed.gate.kernel, now_ms=now_ms() + 600_000)
        answered = bed.post(headers=asked)
        assert "idempotent-replayed" not in answered.headers
        assert ("CLOSED", "WAIVE") == (answered.json()["state"], answered.json()["action"])
        again = bed.post(headers=asked)
        assert ("true", answered.content) == (again.headers["idempotent-replayed"], again.content)


def test_a_key_that_cannot_be_looked_up_decides_nothing(bed: Bed) -> None:
    with bed.database.transaction() as connection:
        connection.exec_driver_sql("DROP TABLE idempotency")
    assert check(bed.post(headers=KEY), 503, "STORE_UNAVAILABLE")["retryable"]
    assert 0 == bed.gate.store.value("SELECT count(*) FROM decision_flows")
