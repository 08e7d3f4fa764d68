"""What `/metrics` shows: the six golden signals of DIR 4.9 and the service's own, each counted where it happens."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from sds.host.clock import now_ms
from sds.kernel.decision.packet import Decoding
from sds.kernel.errors import SdsError
from sds.kernel.executor import breaker
from sds.service.gates import OpenGates
from sds.service.operations import metrics as metrics_of
from sds.service.operations.background import Background
from sds.service.operations.measuring import _OF_RECORD
from sds.service.operations.metrics import STAGES, Metrics, forget_process, shared_values
from sds.service.operations.observing import Observer
from tests.kernel.durable import proposal
from tests.proposers import Greedy, Says
from tests.service.operations.exposition import samples, scraped, selectors, value
from tests.service.operations.waiting import wait_until
from tests.service.testbed import NO_HOSTS, Bed, opened_bed

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"


@pytest.fixture
def asking(home: Path) -> Iterator[Bed]:
    with opened_bed(home, Says(proposal("ESCALATE", "HUMAN_REVIEW"), Decoding("says", tokens=77))) as made:
        yield made


def test_a_decision_is_measured_in_every_stage_and_its_stages_are_its_whole_time(bed: Bed) -> None:
    assert 200 == bed.post().status_code
    text = scraped(bed)
    for stage in STAGES:
        assert 1 == value(text, "sds_stage_seconds_count", gate="toll", stage=stage)
    whole = value(text, "sds_decision_seconds_sum", gate="toll")
    parts = value(text, "sds_stage_seconds_sum", gate="toll")
    assert whole is not None
    assert parts is not None
    assert 0 < parts <= whole < parts + 0.1
    assert 1 == value(text, "validation_latency_ms_count", gate="toll", type="hard")
    assert 1 == value(text, "validation_latency_ms_count", gate="toll", type="soft")
    assert 1 == value(text, "sds_decisions_total", gate="toll", state="CLOSED")
    assert 1 == value(text, "sds_http_seconds_count", route="/v1/gates/{gate}/decisions", method="POST", status="200")
    assert 0 == value(text, "resource_lock_contention", gate="toll")


def test_an_event_that_was_decided_before_is_an_idempotency_hit(bed: Bed) -> None:
    bed.post()
    assert 0 == value(scraped(bed), "idempotency_hit_rate_total", gate="toll")
    bed.post()
    bed.post(headers={"Idempotency-Key": "k"})
    bed.post(headers={"Idempotency-Key": "k"})
    hits = value(scraped(bed), "idempotency_hit_rate_total", gate="toll")
    assert hits is not None
    assert 3 <= hits
    assert 1 == value(scraped(bed), "sds_decision_seconds_count", gate="toll")


def test_an_escalation_is_counted_by_agent_and_reason_with_the_tokens_it_took(asking: Bed) -> None:
    asking.post()
    text = scraped(asking)
    assert 1 == value(text, "escalation_count_total", agent_id="toll-agent", reason="ESCALATED_BY_AGENT")
    assert (1, 77) == (
        value(text, "token_budget_burn_count", gate="toll"),
        value(text, "token_budget_burn_sum", gate="toll"),
    )
    assert 1 == value(text, "sds_escalations_waiting", gate="toll")


def test_a_proposal_on_state_that_moved_is_counted_as_stale() -> None:
    metrics = Metrics()
    listen = Observer("toll", "toll-agent", metrics)
    listen("stage.begun", {"event_id": "T-1"})
    listen("flow.opened", {"dfid": "d", "kinds": ()})
    decided = {"dfid": "d", "action": None, "execution": None, "reason_code": None}
    listen("flow.decided", {**decided, "state": "ABORTED", "tag": "STATE_DRIFT_DETECTED"})
    assert 1 == value(metrics.render().decode(), "stale_context_reject_rate_total", gate="toll")


def test_what_is_refused_is_counted_by_its_reason_code(bed: Bed) -> None:
    bed.post(b"{")
    bed.post(headers={"Authorization": ""})
    text = scraped(bed)
    assert 1 == value(text, "sds_refusals_total", code="EVENT_INVALID")
    assert 1 == value(text, "sds_refusals_total", code="UNAUTHENTICATED")


def test_it_is_for_the_role_read_or_where_it_was_opened_so_for_this_machine(bed: Bed, home: Path) -> None:
    submits = {"Authorization": f"Bearer {bed.key_for('shop', ('submit',), ('*',))}"}
    assert 403 == bed.client.get("/metrics", headers=submits).status_code
    assert 401 == bed.client.get("/metrics", headers={"Authorization": ""}).status_code
    here, there = (TestClient(bed.app, "http://127.0.0.1", client=(host, 5)) for host in ("127.0.0.1", "192.0.2.7"))
    assert 401 == here.get("/metrics").status_code
    bed.service.settings = type(bed.settings)(gates=("toll",), metrics_open=True)
    assert (200, 401) == (here.get("/metrics").status_code, there.get("/metrics").status_code)
    for name in ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"):  # a proxy on this machine asks for somebody else
        assert 401 == here.get("/metrics", headers={name: "192.0.2.7"}).status_code
    for name in ("localhost:8080", "[::1]:8080"):
        assert 200 == here.get("/metrics", headers={"Host": name}).status_code
    # a page of another site whose name was made to mean this machine; a proxy that passes on the name it was asked for
    for name in ("attacker.example:8080", "127.0.0.1.attacker.example", *NO_HOSTS):
        assert 401 == here.get("/metrics", headers={"Host": name.encode("latin-1")}).status_code
    twice = [("Host", "localhost"), ("Host", "attacker.example")]
    assert 401 == here.get("/metrics", headers=twice).status_code


def test_it_is_of_every_gate_so_the_key_must_be_for_every_gate(bed: Bed) -> None:
    def status(name: str, *gates: str) -> int:
        headers = {"Authorization": f"Bearer {bed.key_for(name, ('read',), gates)}"}
        return int(bed.client.get("/metrics", headers=headers).status_code)

    assert [403, 200, 200] == [status("other", "refund"), status("whole", "toll"), status("all", "*")]
    bed.service.gates = OpenGates({**bed.gates, "refund": replace(bed.gates["toll"])})
    assert [403, 200] == [status("toll-alone", "toll"), status("both", "toll", "refund")]


def test_what_a_process_has_in_hand_is_there_for_whoever_is_scraped_without_asking_it(bed: Bed) -> None:
    metrics = bed.app.state.operations.metrics
    wait_until(lambda: value(metrics.render().decode(), "sds_queue_decisions", gate="toll", of="waiting") == 0)


def test_a_record_that_cannot_be_read_shows_as_down_and_does_not_fail_the_scrape(bed: Bed) -> None:
    assert 1 == value(scraped(bed), "sds_store_up", gate="toll")
    bed.service.stop_background()
    bed.gate.store.close()
    bed.app.state.operations.standing._read_s = float("-inf")  # or it would be given what was read last
    text = scraped(bed)
    assert 0 == value(text, "sds_store_up", gate="toll")
    assert value(text, "sds_ledger_entries", gate="toll") is None


def test_who_waits_for_an_answer_does_not_wait_until_its_decision_is_counted() -> None:
    metrics, counted = Metrics(), list[str]()
    listen = Observer("toll", "toll-agent", metrics, ended=lambda flow: counted.append(flow.dfid))
    metrics.put_off(lambda: counted.append("counted"))
    listen("flow.opened", {"dfid": "d"})
    listen("flow.decided", {"dfid": "d", "state": "CLOSED", "tag": None, "reason_code": None})
    assert ["d"] == counted
    assert 1 == value(metrics.render().decode(), "sds_decision_seconds_count", gate="toll")
    metrics.settle()
    assert ["d", "counted"] == counted


COUNTS = """
import runpy, sys
metrics = runpy.run_path(sys.argv[2])["Metrics"]()
metrics.refused.labels("QUEUE_FULL").inc()
metrics.in_hand.set(3)
print(metrics.render().decode() if sys.argv[1] == "scrape" else "")
"""


def test_of_several_workers_any_scrape_shows_the_sum() -> None:
    def run(how: str) -> tuple[int, str]:
        process = subprocess.Popen(
            [sys.executable, "-c", COUNTS, how, str(metrics_of.__file__)], stdout=subprocess.PIPE, text=True
        )
        return process.pid, process.communicate(timeout=60)[0]

    with shared_values():
        first, _ = run("count")
        _, text = run("scrape")
        assert (2, 6) == (value(text, "sds_refusals_total", code="QUEUE_FULL"), value(text, "sds_admission_in_hand"))
        forget_process(first)
        _, text = run("scrape")
        assert 3 == value(text, "sds_refusals_total", code="QUEUE_FULL")
        folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
    assert not Path(folder).exists()


def of_one_process(work: str) -> str:
    """Run code with `metrics`, the metrics of a process of several; return what it prints."""
    code = f"from sds.service.operations.metrics import *\nmetrics = Metrics()\n{work}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_a_check_is_ok_where_it_is_so_in_every_process_that_lives() -> None:
    def check_of_two(second: str) -> float | None:
        work = "metrics.check_ok.labels('store', 'toll').set({}); print(metrics.render().decode())"
        return value(of_one_process(work.format(second)), "sds_check_ok", check="store", gate="toll")

    with shared_values():
        first = of_one_process("metrics.check_ok.labels('store', 'toll').set(0); import os; print(os.getpid())")
        assert 0 == check_of_two("1")
        forget_process(int(first))
        assert 1 == check_of_two("1")


def test_a_process_that_hangs_shows_by_when_it_last_set_its_gauges() -> None:
    with shared_values():
        hangs = of_one_process("metrics.sampled_s.set(100); import os; print(os.getpid())")
        set_now = "metrics.sampled_s.set(200); print(metrics.render().decode())"
        assert 100 == value(of_one_process(set_now), "sds_sampled_timestamp_seconds")
        forget_process(int(hangs))
        assert 200 == value(of_one_process(set_now), "sds_sampled_timestamp_seconds")


def test_a_folder_that_a_cleaner_of_temporary_files_removed_keeps_no_process_from_starting_and_no_scrape() -> None:
    with shared_values():
        folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        folder.rmdir()
        text = of_one_process("metrics.processes.set(1); print(metrics.render().decode())")
        assert 1 == value(text, "sds_processes")
        work = "import shutil, os; shutil.rmtree(os.environ[SHARED]); print(metrics.render().decode())"
        assert None is value(of_one_process(work), "sds_processes")


def test_the_shared_files_have_their_room_on_the_disk_from_the_start_and_keep_what_they_use_at_the_end() -> None:
    with shared_values():
        folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        pid = int(of_one_process("import os; metrics.refused.labels('INTERNAL').inc(); print(os.getpid())"))
        sizes = {file.name.partition(f"_{pid}")[0]: file.stat() for file in folder.iterdir()}
        assert metrics_of.RESERVED_BYTES == {kind: size.st_size for kind, size in sizes.items()}
        for size in sizes.values():  # a page without room would end the process, once the disk is full
            assert size.st_size <= 512 * size.st_blocks
        forget_process(pid)
        left = {file.name: file.stat().st_size for file in folder.iterdir()}
        assert {f"counter_ended-{pid}.db", f"histogram_ended-{pid}.db"} == left.keys()
        assert all(size < metrics_of.RESERVED_BYTES["counter"] for size in left.values())
        text = of_one_process("print(metrics.render().decode())")
    assert 1 == value(text, "sds_refusals_total", code="INTERNAL")


def test_a_process_goes_on_counting_where_an_ended_one_stopped_so_that_no_files_are_left_over() -> None:
    with shared_values():
        folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        counts = "import os; metrics.refused.labels('INTERNAL').inc(); metrics.in_hand.set(5); print(os.getpid())"
        for _ in range(3):
            forget_process(int(of_one_process(counts)))
            assert ["counter", "histogram"] == sorted(file.name.partition("_")[0] for file in folder.iterdir())
        text = of_one_process("print(metrics.render().decode())")
    assert (3, 0) == (value(text, "sds_refusals_total", code="INTERNAL"), value(text, "sds_admission_in_hand"))


def test_a_scrape_that_meets_a_file_that_just_got_another_name_reads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = list[int]()

    def renamed(registry: object) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise FileNotFoundError

    with shared_values():
        monkeypatch.setattr(metrics_of, "MultiProcessCollector", renamed)
        Metrics().render()
    assert 2 == len(tries)


def test_no_scrape_meets_a_shared_file_without_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, sizes = os.posix_fallocate, list[int]()

    def looked(file: int, offset: int, size: int) -> None:
        sizes.extend(each.stat().st_size for each in folder.iterdir() if each.suffix == ".db")
        reserve(file, offset, size)

    with shared_values():
        folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        monkeypatch.setattr(os, "posix_fallocate", looked)
        metrics_of._reserve(folder)
        assert {".db"} == {each.suffix for each in folder.iterdir()}
    assert sizes
    assert min(sizes) > 0


def test_shared_files_are_reserved_with_zeros_where_the_system_cannot_allocate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with shared_values():
        folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        metrics_of._reserve(folder)
        made = {file.name.partition(f"_{os.getpid()}")[0]: file for file in folder.iterdir()}
        assert {kind: bytes(size) for kind, size in metrics_of.RESERVED_BYTES.items()} == {
            kind: file.read_bytes() for kind, file in made.items()
        }
        for file in made.values():  # it exists where an ended process had this id
            assert file.stat().st_size <= 512 * file.stat().st_blocks
        made["counter"].write_bytes(b"kept")
        metrics_of._reserve(folder)
        again = made["counter"].read_bytes()
        assert (b"kept", metrics_of.RESERVED_BYTES["counter"]) == (again[:4], len(again))


def test_a_disk_without_room_for_the_shared_files_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with shared_values():
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(SdsError, match=r"the metrics cannot be kept in .*: no space left on device"):
            Metrics()


def test_what_an_alarm_waits_for_is_counted_from_nought(bed: Bed) -> None:
    text = scraped(bed)
    for code in ("INTERNAL", "OVERLOADED", "QUEUE_FULL"):
        assert 0 == value(text, "sds_refusals_total", code=code)
    assert 0 == value(text, "escalation_count_total", agent_id="toll-agent", reason="MODEL_UNAVAILABLE")
    for work in ("look", "sample", "sweep", "recover", "webhooks", "follow"):
        assert 0 == value(text, "sds_store_errors_total", work=work)
    fresh = Metrics()
    Background(bed.service, fresh, bed.app.state.operations.health, bool)
    assert 0 == value(fresh.render().decode(), "sds_recovery_errors_total", gate="toll")


def test_what_stands_in_the_record_is_shown_before_a_human_has_looked(asking: Bed) -> None:
    def now(name: str) -> float | None:
        asking.app.state.operations.standing._read_s = float("-inf")
        return value(scraped(asking), name, gate="toll")

    assert (0, 0, 1) == (now("sds_escalations_oldest_seconds"), now("sds_orders_unknown"), now("sds_executor_up"))
    dfid, later_ms = asking.post().json()["dfid"], now_ms() + 60_000
    asking.clock = lambda: later_ms
    store, gate = asking.gate.store, "toll"
    age_ms = later_ms - store.value("SELECT created_at_ms FROM decision_flows WHERE dfid = ?", (dfid,))
    assert age_ms / 1_000 == now("sds_escalations_oldest_seconds")
    with store.transaction():
        for _ in range(breaker.FAILURES_MAX):
            breaker.unanswered(store, gate, later_ms)
    assert 0 == now("sds_executor_up")
    with store.transaction():
        breaker.answered(store, gate)
        store.run("UPDATE decision_flows SET state = 'EXECUTING' WHERE dfid = ?", (dfid,))
        order = (dfid, f"{dfid}#0", "0", "WAIVE", "{}", "CAR-1", "1", "", later_ms, "UNKNOWN")
        store.run(f"INSERT INTO execution_log VALUES ({', '.join('?' * len(order))}, NULL, NULL)", order)
    assert (1, 1) == (now("sds_executor_up"), now("sds_orders_unknown"))
    assert (0, 1) == (now("sds_escalations_oldest_seconds"), now("sds_escalations_waiting"))
    with store.transaction():  # a saga that waits for a reversal: no human sees it otherwise
        store.run("UPDATE decision_flows SET state = 'ACTIVE' WHERE dfid = ?", (dfid,))
        store.run("UPDATE execution_log SET status = 'SUCCESS' WHERE dfid = ?", (dfid,))
        store.insert("sagas", dfid=dfid, name="X", steps="[]", menu="[]", phase="DIRTY")
        store.insert("saga_reversals", dfid=dfid, saga=dfid, idempotency_key=f"{dfid}#0", status="PENDING")
    assert (1, 0) == (now("sds_orders_unknown"), now("sds_escalations_waiting"))


def test_a_check_that_fails_is_in_the_metrics_as_it_is_in_readyz(bed: Bed) -> None:
    wait_until(lambda: bed.client.get("/readyz").status_code == 200)
    assert (1, 1) == (value(scraped(bed), "sds_processes"), value(scraped(bed), "sds_processes_wanted"))
    bed.service.stopping = True
    text = scraped(bed)
    assert (0, 1, 1) == tuple(value(text, "sds_check_ok", check=check) for check in ("draining", "clock", "store"))


def test_the_limit_of_resources_is_that_of_all_processes(home: Path) -> None:
    with opened_bed(home, workers=2) as bed:
        assert 2 * bed.gates.parallel == value(scraped(bed), "resource_lock_limit", gate="toll")


def test_every_metric_that_the_dashboard_names_is_there_with_its_labels(home: Path) -> None:
    with opened_bed(home, Greedy("WAIVE")) as bed:
        bed.post()
        bed.post(b"{")
        text = scraped(bed)
    labels = dict[str, set[str]]()
    for name, has in samples(text):
        labels.setdefault(name, set()).update(label for label, _ in has)
    later = {"sds_webhook_behind_entries", "sds_webhook_failing_seconds", "sds_webhook_deliveries_total"}
    later |= {"sds_batch_rows_bucket"}  # without a sample until there is a webhook, or a shared pass of the model
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    named = {each.name for expr in asked for each in selectors(expr)}
    assert len(asked) == len([expr for expr in asked if selectors(expr)])
    assert later == named - labels.keys()
    of_target = {"job", "instance"}
    for each in (each for expr in asked for each in selectors(expr) if each.name not in later):
        assert {label for label, _, _ in each.matchers} <= labels[each.name] | of_target
    for name in _OF_RECORD:  # several machines over one record show the same
        assert not [expr for expr in asked if name in expr and expr.startswith("sum")]
    for expr in asked:
        (name,) = {each.name for each in selectors(expr)}
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", expr) for label in group.split(", ")}
        assert name in later or grouped <= labels[name]
