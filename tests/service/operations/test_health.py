"""`/livez` and `/readyz`: whether a process should be sent requests, and what keeps it from that."""

from __future__ import annotations

import re
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sds.definitions.registry import find
from sds.engines.breaker import FAILURES_MAX, PROBE_MS
from sds.gate import Gate
from sds.host import keys, paths
from sds.host.clock import now_ms
from sds.host.rotation import rotate
from sds.kernel.errors import ModelError, StoreError
from sds.kernel.executor.wholeness import RECORD_BEHIND, Doubt
from sds.kernel.registry import registry
from sds.kernel.storage.ledger import GENESIS, Head
from sds.kernel.storage.sqlite import SqliteStore
from sds.service.gates import OpenGate, OpenGates
from sds.service.operations import health
from sds.service.operations.health import Health
from tests.gates.own import GATE, written
from tests.kernel.durable import proposal
from tests.proposers import Greedy, Says, WithLanguageModel
from tests.service.operations.waiting import wait_until
from tests.service.testbed import EVENT, Bed, check, opened_bed
from tests.stores.records import tampering_with


def looked(bed: Bed) -> Any:
    """Return what `/readyz` answers once it has looked, after the look that each process begins with."""
    found = bed.app.state.operations.health
    wait_until(lambda: found.checks()["probe"] != "NOT_YET")
    found.look()
    return bed.client.get("/readyz", headers={"Authorization": ""})


def test_a_process_lives_and_is_ready_once_it_has_looked_and_needs_no_key_to_say_so(bed: Bed) -> None:
    assert {"status": "live"} == bed.client.get("/livez", headers={"Authorization": ""}).json()
    fresh = Health(bed.service)
    assert (False, "NOT_YET") == (fresh.ready(fresh.checks()), fresh.checks()["probe"])
    ready = looked(bed)
    assert (200, "ready") == (ready.status_code, ready.json()["status"])
    each = {"toll": "ok"}
    expected = {**dict.fromkeys(health.CHECKS, each), "draining": "ok", "probe": "ok"}
    assert expected == ready.json()["checks"]
    assert 0 == bed.gate.store.value("SELECT count(*) FROM decision_flows")


def test_it_looks_around_by_itself(bed: Bed) -> None:
    wait_until(lambda: bed.client.get("/readyz").status_code == 200)


def test_health_is_also_asked_by_head(bed: Bed) -> None:
    looked(bed)
    for path in ("/livez", "/readyz"):
        assert (
            bed.client.get(path).status_code == bed.client.head(path, headers={"Authorization": ""}).status_code == 200
        )
    bed.service.stopping = True
    assert 503 == bed.client.head("/readyz").status_code


def not_ready(bed: Bed, check: str, found: object) -> None:
    answer = looked(bed)
    assert (503, "NOT_READY", found) == (
        answer.status_code,
        answer.json()["reason_code"],
        answer.json()["checks"][check],
    )
    assert "application/problem+json" == answer.headers["content-type"]


def test_who_is_told_to_stop_is_not_ready(bed: Bed) -> None:
    bed.service.stopping = True
    not_ready(bed, "draining", "DRAINING")


def test_a_store_that_takes_no_write_is_not_ready(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refuses(*_first: Any) -> Any:
        raise StoreError("`postgresql://user:hunter2@host` refused")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(bed.gate.store, "transaction", refuses)
        not_ready(bed, "store", {"toll": "STORE_UNAVAILABLE"})
        assert "hunter2" not in looked(bed).text
    assert 200 == looked(bed).status_code


def test_a_file_on_a_disk_that_is_full_is_not_ready_although_it_takes_one_small_write(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(health, "disk_usage", lambda _: SimpleNamespace(free=health.ROOM_BYTES_MIN - 1))
        not_ready(bed, "store", {"toll": "DISK_FULL"})
    assert 200 == looked(bed).status_code


def test_a_file_that_was_moved_away_or_replaced_while_it_is_open_is_not_ready_and_takes_nothing(bed: Bed) -> None:
    """Nobody would find what is written: a case would be lost, and paid again once the record is restored."""
    assert isinstance(bed.gate.store, SqliteStore)
    path, aside = bed.gate.store.path, bed.gate.store.path.with_name("aside")
    path.rename(aside)
    not_ready(bed, "store", {"toll": "STORE_UNAVAILABLE"})
    check(bed.post(), 503, "STORE_UNAVAILABLE")
    path.write_bytes(aside.read_bytes())
    not_ready(bed, "store", {"toll": "STORE_UNAVAILABLE"})
    check(bed.post(), 503, "STORE_UNAVAILABLE")
    assert 0 == bed.gate.store.value("SELECT count(*) FROM decision_flows")
    aside.rename(path)
    assert 200 == looked(bed).status_code
    assert 200 == bed.post().status_code


def test_a_store_that_does_not_answer_is_told_before_everything_else_was_looked_at(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 200 == looked(bed).status_code
    look = Health(bed.service)
    look.look()
    asked, go = threading.Event(), threading.Event()

    def late(_: object) -> str:
        asked.set()
        assert go.wait(10)
        return "ok"

    @contextmanager
    def refuses(*_first: Any) -> Any:
        raise StoreError("it is away")
        yield

    monkeypatch.setattr(bed.gate.store, "transaction", refuses)
    monkeypatch.setattr(look, "_clock", late)
    thread = threading.Thread(target=look.look)
    thread.start()
    assert asked.wait(10)
    checks = look.checks()
    go.set()
    thread.join()
    assert ({"toll": "STORE_UNAVAILABLE"}, False) == (checks["store"], look.ready(checks))


def test_a_clock_that_is_behind_the_record_is_not_ready(bed: Bed) -> None:
    bed.clock = lambda: now_ms() - 3_000
    not_ready(bed, "clock", {"toll": "CLOCK_BEHIND"})
    bed.clock = lambda: now_ms() - 500
    assert 200 == looked(bed).status_code


@pytest.mark.parametrize(
    ("store_ms", "found"), [(0, "ok"), (5_000, "ok"), (-1_001, "CLOCK_APART"), (6_001, "CLOCK_APART")]
)
def test_a_store_that_takes_long_to_say_its_time_is_not_taken_for_one_whose_clock_is_apart(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, store_ms: int, found: str
) -> None:
    wait_until(lambda: bed.client.get("/readyz").status_code == 200)
    began_ms, gone_ms = now_ms(), 0

    def slow(_: object) -> int:
        nonlocal gone_ms
        gone_ms = 5_000
        return began_ms + store_ms

    bed.clock = lambda: began_ms + gone_ms
    monkeypatch.setattr(health, "clock_ms", slow)
    look = Health(bed.service)
    look.look()
    assert {"toll": found} == look.checks()["clock"]


def test_a_record_that_is_behind_the_outside_is_not_ready(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bed.gate.kernel.whole, "doubt", lambda: Doubt(RECORD_BEHIND, "3 orders"))
    not_ready(bed, "record", {"toll": RECORD_BEHIND})


def test_a_process_whose_contract_is_superseded_is_not_ready_and_begins_no_event(bed: Bed) -> None:
    decided = bed.post()
    assert 200 == looked(bed).status_code
    supersede(bed.gate)
    not_ready(bed, "contract", {"toll": "CONTRACT_SUPERSEDED"})
    refused = bed.post({**EVENT, "trip_id": "T-2"})
    assert (503, "NOT_READY", True) == (refused.status_code, refused.json()["reason_code"], refused.json()["retryable"])
    assert 1 == bed.gate.store.value("SELECT count(*) FROM decision_flows")
    again = bed.post()
    assert (200, decided.content) == (again.status_code, again.content)


def test_a_process_stays_ready_for_its_other_gates_where_the_contract_of_one_is_superseded(home: Path) -> None:
    """Else nobody decides for the others until the process with the newer contract is ready."""
    code = GATE.replace("gate: toll", "gate: ferry").replace('name="toll"', 'name="ferry"') + f"# {home}\n"
    definition, ferry_event = find(written(home / "ferry_gate", code)), {**EVENT, "trip_id": "F-1"}
    with opened_bed(home) as bed, Gate.load(definition, engine=Greedy("WAIVE")) as ferry:
        bed.service.gates = OpenGates({**bed.gates, "ferry": OpenGate(definition, ferry)})
        supersede(bed.gate)
        answer = looked(bed)
        assert (200, "ready") == (answer.status_code, answer.json()["status"])
        assert {"toll": "CONTRACT_SUPERSEDED", "ferry": "ok"} == answer.json()["checks"]["contract"]
        refused = bed.post()
        assert (503, "NOT_READY") == (refused.status_code, refused.json()["reason_code"])
        assert ("close", "1") == tuple(refused.headers[name] for name in ("connection", "retry-after"))
        assert 200 == bed.post(ferry_event, gate="ferry").status_code
        supersede(ferry)
        not_ready(bed, "contract", {"toll": "CONTRACT_SUPERSEDED", "ferry": "CONTRACT_SUPERSEDED"})


def supersede(gate: Gate) -> None:
    newer = gate.contract.model_copy(update={"version": gate.contract.version + "9"})
    registry.register(gate.store, newer, by="operator", now_ms=now_ms())


def test_of_the_events_that_come_before_the_probe_only_the_first_is_handed_to_a_human(home: Path) -> None:
    with opened_bed(home, Says(proposal("DENY", "NO_REASON")), probe_every_s=3_600.0) as bed:
        supersede(bed.gate)
        first = bed.post().json()
        assert ("ESCALATED", "CONTRACT_REVOKED") == (first["state"], first["reason_code"])
        assert "NOT_READY" == bed.post({**EVENT, "trip_id": "T-2"}).json()["reason_code"]
        assert 1 == bed.gate.store.value("SELECT count(DISTINCT event_id) FROM decision_flows")


def refused(bed: Bed, trip: str) -> None:
    """Assert that a new event is refused while nothing is written, and that a known one is answered."""
    flows = bed.gate.store.value("SELECT count(*) FROM decision_flows")
    answer = bed.post({**EVENT, "trip_id": trip})
    assert (503, "NOT_READY", True) == (answer.status_code, answer.json()["reason_code"], answer.json()["retryable"])
    assert flows == bed.gate.store.value("SELECT count(*) FROM decision_flows")
    assert 200 == bed.post().status_code


@pytest.mark.sqlite_alone("tests/kernel/audit/test_rolling.py alters both stores")
def test_a_ledger_that_was_altered_behind_its_back_makes_a_process_unready_and_begins_no_event(
    bed: Bed, home: Path
) -> None:
    assert 200 == bed.post().status_code
    assert 200 == looked(bed).status_code
    with tampering_with(home / "toll" / "decisions.db") as other:
        other.execute("UPDATE ledger SET body = body || ' ' WHERE kind = 'DECIDED'")
        other.hide()
        not_ready(bed, "ledger", {"toll": "LEDGER_ALTERED"})
        refused(bed, "T-2")
        looked(bed)
        said = [facts["fault"] for event, facts in bed.logged if event == "ledger.altered"]
        assert 1 == len(said)
        assert re.fullmatch("entry [0-9]+: content does not match its hash", said[0])
    assert 200 == looked(bed).status_code
    assert 200 == bed.post({**EVENT, "trip_id": "T-2"}).status_code


@pytest.mark.parametrize("how", ["gone", "damaged", "open to others", "another record's"])
def test_a_process_whose_key_is_lost_while_it_runs_is_not_ready_and_begins_no_event(
    bed: Bed, home: Path, tmp_path: Path, how: str
) -> None:
    assert 200 == bed.post().status_code
    assert 200 == looked(bed).status_code
    path = home / "toll" / "kernel.key"
    own = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "open to others":
        path.chmod(0o644)
    elif how == "damaged":
        path.write_bytes(own[:-9])
    else:
        keys.renew(tmp_path, Head(0, GENESIS), older=(), now_ms=1)
        path.write_bytes((tmp_path / "kernel.key").read_bytes())
    not_ready(bed, "key", {"toll": "KEY_LOST"})
    refused(bed, "T-2")
    assert {"check": "key", "gate": "toll", "was": "ok", "is": "KEY_LOST"} in [
        facts for event, facts in bed.logged if event == "service.check"
    ]
    path.write_bytes(own)
    path.chmod(0o600)
    assert 200 == looked(bed).status_code
    assert 200 == bed.post({**EVENT, "trip_id": "T-2"}).status_code


def test_a_process_whose_key_is_from_before_a_rotation_elsewhere_is_not_ready(bed: Bed, home: Path) -> None:
    bed.post()
    assert 200 == looked(bed).status_code
    path = home / "toll" / "kernel.key"
    before = path.read_bytes()
    with closing(paths.open_record(home / "toll")) as elsewhere:
        rotate(home / "toll", elsewhere, who="me", reason="a try", now_ms=now_ms())
    after = path.read_bytes()
    path.write_bytes(before)
    not_ready(bed, "key", {"toll": "KEY_OLDER"})
    assert "ok" == looked(bed).json()["checks"]["ledger"]["toll"]
    assert 200 == bed.post({**EVENT, "trip_id": "T-2"}).status_code
    path.write_bytes(after)
    assert 200 == looked(bed).status_code


def unless_down(down: list[bool]) -> Says:
    """Return an engine that denies, and fails while `down` holds True."""

    def say(packet: Any) -> bytes:
        if down[0]:
            raise ModelError("the server does not answer")
        return proposal("DENY", "NO_REASON")(packet)

    return Says(say)


def test_a_model_that_has_proposed_nothing_yet_is_not_ready(home: Path) -> None:
    down = [True]
    engine = unless_down(down)
    with opened_bed(home, engine, probe_every_s=3_600.0) as bed:
        not_ready(bed, "model", {"toll": "MODEL_UNAVAILABLE"})
        down[0] = False
        assert 200 == looked(bed).status_code
        asked = engine.asked
        assert 200 == looked(bed).status_code
        assert asked == engine.asked  # proved once


def test_a_look_that_is_old_says_nothing(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 200 == looked(bed).status_code
    later_s = time.monotonic() + 31
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    health = bed.app.state.operations.health
    assert ("LATE", False) == (health.checks()["probe"], health.ready(health.checks()))


def test_a_model_that_goes_down_later_is_not_ready_and_its_looks_are_the_probes(home: Path) -> None:
    down = [False]
    engine = unless_down(down)
    with opened_bed(home, engine, probe_every_s=3_600.0) as bed:
        assert 200 == looked(bed).status_code
        down[0] = True
        for number in range(FAILURES_MAX):
            answer = bed.post(EVENT | {"trip_id": f"T-{number}"}).json()
            assert ("ESCALATED", "MODEL_UNAVAILABLE") == (answer["state"], answer["reason_code"])
        asked, flows = engine.asked, bed.gate.store.value("SELECT count(*) FROM decision_flows")
        refused = bed.post(EVENT | {"trip_id": "T-new"}, headers={"Prefer": "respond-async", "Idempotency-Key": "k"})
        check(refused, 503, "MODEL_UNAVAILABLE")
        assert 1 <= int(refused.headers["Retry-After"]) <= PROBE_MS // 1_000
        assert (asked, flows) == (engine.asked, bed.gate.store.value("SELECT count(*) FROM decision_flows"))
        assert "ESCALATED" == bed.post(EVENT | {"trip_id": "T-0"}).json()["state"]  # what is known is answered
        not_ready(bed, "model", {"toll": "MODEL_UNAVAILABLE"})
        due(bed)
        not_ready(bed, "model", {"toll": "MODEL_UNAVAILABLE"})  # a probe, which failed
        assert asked + 1 == engine.asked
        due(bed)
        probe = check(bed.post(EVENT | {"trip_id": "T-new"}), 503, "MODEL_UNAVAILABLE")  # an event may be the probe
        assert ("ABORTED", "NOT_DECIDED") == bed.gate.store.row(
            "SELECT state, tag FROM decision_flows WHERE dfid = ?", (probe["dfid"],)
        )
        down[0] = False
        due(bed)
        assert 200 == looked(bed).status_code
        assert "DENY" == bed.post(EVENT | {"trip_id": "T-new"}).json()["action"]


def test_a_policys_language_model_that_is_down_is_shown_and_probed_while_the_process_stays_ready(home: Path) -> None:
    down = [False]
    policy = WithLanguageModel("DENY", beside=unless_down(down))
    model = policy.language_model
    with opened_bed(home, policy, probe_every_s=0.05) as bed:

        def shown() -> tuple[int, object, float]:
            answer, scraped = bed.client.get("/readyz"), bed.client.get("/metrics").text
            (gauge,) = re.findall(r'sds_check_ok\{check="language_model",gate="toll"\} (\S+)', scraped)
            return answer.status_code, answer.json()["checks"]["language_model"], float(gauge)

        assert 200 == looked(bed).status_code
        assert (200, {"toll": "ok"}, 1) == shown()
        down[0], packet = True, bed.gate.preview(EVENT)
        for _ in range(FAILURES_MAX):
            with pytest.raises(ModelError):
                model.propose(packet, tokens_max=100)
        assert (200, {"toll": "MODEL_UNAVAILABLE"}, 0) == shown()
        assert "DENY" == bed.post().json()["action"]
        asked = model.get().asked  # type: ignore[attr-defined]  # it is a Says
        model.breaker._probes.pause(0, 0)
        wait_until(lambda: model.get().asked == asked + 1)  # type: ignore[attr-defined]
        down[0] = False
        model.breaker._probes.pause(0, 0)
        wait_until(lambda: not model.breaker.is_open)
        assert (200, {"toll": "ok"}, 1) == shown()
        assert 0 == len([facts for event, facts in bed.logged if event == "service.background_failed"])


def due(bed: Bed) -> None:
    """Let the pause before the next probe pass."""
    bed.gate.breaker._probes.pause(0, 0)
