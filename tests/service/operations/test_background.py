"""What a process does beside answering: it recovers its gates, sweeps, and nothing that it meets ends that."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sds.kernel.errors import StoreError
from sds.kernel.operations.recovery import Recovered
from tests.service.operations.exposition import scraped, value
from tests.service.operations.waiting import wait_until
from tests.service.testbed import EVENT, opened_bed


def test_a_flow_whose_holder_is_gone_is_ended_without_anybody_typing(home: Path) -> None:
    with opened_bed(home, recover_every_s=0.05) as bed:
        store = bed.gate.store
        packet = bed.gate.kernel.open(bed.gate.read(EVENT))
        with store.transaction():
            past = "created_at_ms = created_at_ms - 600000, lease_until_ms = lease_until_ms - 600000"
            store.run(f"UPDATE decision_flows SET {past} WHERE dfid = ?", (packet.dfid,))
        wait_until(lambda: store.value("SELECT state FROM decision_flows WHERE dfid = ?", (packet.dfid,)) == "ABORTED")
        wait_until(lambda: value(scraped(bed), "sds_recovered_total", gate="toll", became="interrupted") == 1)
        assert 200 == bed.post().status_code


def test_what_recovery_meets_is_logged_and_counted_and_does_not_end_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def fails(*, at_once: bool) -> Recovered:
        assert not at_once
        calls.append(1)
        if len(calls) == 1:
            raise StoreError("`postgresql://user:hunter2@host` is gone")
        if len(calls) == 2:
            raise RuntimeError("4111 1111 1111 1111")
        return Recovered(errors=("one",))

    with opened_bed(home, recover_every_s=0.02) as bed:
        bed.service.stop_background()
        monkeypatch.setattr(bed.gate, "recover", fails)
        again = type(bed.app.state.operations)(bed.service)
        again.background.start()
        wait_until(lambda: len(calls) > 3)
        again.background.stop()
        text = again.metrics.render().decode()
        failed = [facts for event, facts in bed.logged if event == "service.background_failed"]
    assert len(calls) <= (value(text, "sds_recovery_errors_total", gate="toll") or 0)
    assert ["STORE_UNAVAILABLE", "RuntimeError"] == [facts["reason_code"] for facts in failed]
    assert 2 == value(text, "sds_store_errors_total", work="recover")
    assert "hunter2" not in str(bed.logged)
    assert "4111" not in str(bed.logged)


def test_where_even_to_tell_of_a_failure_fails_the_work_is_done_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory is out for a while."""
    calls = list[int]()

    def fails(*_: object, **__: object) -> Recovered:
        calls.append(1)
        raise MemoryError

    with opened_bed(home, recover_every_s=0.02) as bed:
        bed.service.stop_background()
        monkeypatch.setattr(bed.gate, "recover", fails)
        monkeypatch.setattr(bed.service, "log", fails)
        again = type(bed.app.state.operations)(bed.service)
        again.background.start()
        wait_until(lambda: len(calls) > 6)
        again.background.stop()


def test_of_several_processes_one_recovers_a_gate_at_a_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def counts(*, at_once: bool) -> Recovered:
        assert not at_once
        calls.append(1)
        return Recovered()

    with opened_bed(home, recover_every_s=0.02) as bed:
        bed.service.stop_background()
        monkeypatch.setattr(bed.gate, "recover", counts)
        again = type(bed.app.state.operations)(bed.service)
        with bed.gate.store.exclusively("recovery") as mine:
            assert mine
            again.background.start()
            time.sleep(0.2)
            assert [] == calls
        wait_until(lambda: calls)
        again.background.stop()


def test_a_process_that_drains_begins_nothing_more(home: Path) -> None:
    with opened_bed(home, recover_every_s=0.02, probe_every_s=0.02) as bed:
        bed.service.draining = True
        bed.service.stop_background()
        read_s = value(scraped(bed), "sds_recovery_seconds_count", gate="toll")
        time.sleep(0.1)
        assert read_s == value(scraped(bed), "sds_recovery_seconds_count", gate="toll")


def test_answers_that_were_kept_long_enough_are_forgotten(home: Path) -> None:
    with opened_bed(home, sweep_every_s=0.02, keys_kept_s=3_600) as bed:

        def kept() -> int:
            with bed.database.reading() as connection:
                return int(connection.exec_driver_sql("SELECT count(*) FROM idempotency").scalar() or 0)

        bed.post(headers={"Idempotency-Key": "k"})
        time.sleep(0.1)
        assert 1 == kept()
        with bed.database.transaction() as connection:
            connection.exec_driver_sql("UPDATE idempotency SET made_at_ms = made_at_ms - 3600001")
        wait_until(lambda: kept() == 0)
