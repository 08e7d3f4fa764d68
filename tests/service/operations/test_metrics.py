"""What `/metrics` shows: the six golden signals of DIR 4.9 and the service's own, each counted where it happens."""

from __future__ import annotations

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

from sds.kernel.decision.packet import Decoding
from sds.service.gates import OpenGates
from sds.service.operations import metrics as metrics_of
from sds.service.operations.metrics import STAGES, Metrics, forget_process, shared_values
from sds.service.operations.observing import Observer
from tests.kernel.durable import proposal
from tests.proposers import Greedy, Says
from tests.service.operations.exposition import scraped, value
from tests.service.operations.waiting import wait_until
from tests.service.testbed import Bed, opened_bed

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
    for name in ("attacker.example:8080", "127.0.0.1.attacker.example"):
        assert 401 == here.get("/metrics", headers={"Host": name}).status_code


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


def test_every_metric_that_the_dashboard_names_is_there(home: Path) -> None:
    with opened_bed(home, Greedy("WAIVE")) as bed:
        bed.post()
        families = {line.split()[2] for line in scraped(bed).splitlines() if line.startswith("# TYPE")}
    names = {name + end for name in families for end in ("", "_bucket", "_sum", "_count")}
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    named = {word for expr in asked for word in re.findall(r"\b[a-z][a-z_]+(?=[{\[])", expr)}
    assert asked
    assert set() == named - names
    golden = {"validation_latency_ms_bucket", "stale_context_reject_rate_total", "escalation_count_total"}
    golden |= {"resource_lock_contention", "token_budget_burn_bucket", "idempotency_hit_rate_total"}
    assert golden <= named
