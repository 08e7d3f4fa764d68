"""`deploy/alerts.yml`: its alarms are on metrics that there are before anything goes wrong, and each fires in its time, alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from sds.host.clock import now_ms
from sds.service.operations.endpoints import add_endpoint
from sds.service.operations.health import CHECKS
from tests.proposers import Greedy, WithLanguageModel
from tests.service.operations.exposition import samples, scraped, selectors
from tests.service.operations.waiting import wait_until
from tests.service.testbed import Bed, opened_bed

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "alerts.yml"
PAGE = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
TARGET = {"job": "sds", "instance": "10.0.0.5:8080"}
GATE = {"gate": "toll"}
DAY, WEEK = 1_440, 10_080  # minutes

Values = tuple[str, Mapping[str, str], str]  # a metric, labels, and its values at each minute as promtool writes them

# alarm: (minutes at which it has not fired yet, minutes at which it has, the values that are not those of a healthy service)
FIRES: dict[str, tuple[int, int, list[Values]]] = {
    "SdsDown": (1, 3, [("up", {}, "0x60")]),
    "SdsNotScraped": (4, 6, [("up", {}, "_x60")]),
    "SdsNotReady": (1, 3, [("sds_check_ok", {"check": "record", **GATE}, "0x60")]),
    "SdsStoreDown": (0, 2, [("sds_store_up", GATE, "0x60")]),
    "SdsEntriesLost": (9, 11, [("sds_ledger_entries", GATE, "500x9 498x2 498+10x50")]),
    "SdsProcessesMissing": (4, 6, [("sds_processes_wanted", {}, "2x60")]),
    "SdsProcessesMissing, one hangs": (6, 8, [("sds_sampled_timestamp_seconds", {}, "0x60")]),
    "SdsRestarts": (11, 13, [("sds_processes", {}, "1x3 0 1x2 0 1x2 0 1x50")]),
    "SdsFull": (4, 7, [("sds_refusals_total", {"code": "QUEUE_FULL"}, "0+2x60")]),
    "SdsFault": (9, 11, [("sds_refusals_total", {"code": "INTERNAL"}, "0x9 1x50")]),
    "SdsFault, a limit of the machine": (9, 11, [("sds_refusals_total", {"code": "UNAVAILABLE"}, "0x9 1x50")]),
    "SdsBackgroundWorkFails": (12, 16, [("sds_store_errors_total", {"work": "webhooks"}, "0+1x60")]),
    "SdsUndecided": (9, 13, [("sds_decisions_total", {"tag": "NOT_DECIDED"}, "0+1x60")]),
    "SdsEscalates": (9, 13, [("sds_decisions_total", {"state": "ESCALATED"}, "0+6x60")]),
    "SdsModelDown": (9, 11, [("escalation_count_total", {"reason": "MODEL_UNAVAILABLE"}, "0x9 1x50")]),
    "SdsLanguageModelDown": (1, 3, [("sds_check_ok", {"check": "language_model", **GATE}, "0x60")]),
    "SdsExecutorDown": (0, 2, [("sds_executor_up", GATE, "0x60")]),
    "SdsOrdersUnknown": (14, 16, [("sds_orders_unknown", GATE, "3x60")]),
    "SdsRecoveryFails": (9, 11, [("sds_recovery_errors_total", GATE, "0x9 1x50")]),
    "SdsAgentStopped": (0, 2, [("sds_agent_active", GATE, "0x60")]),
    "SdsHalted": (14, 16, [("sds_halted", GATE, "1x60")]),
    "SdsCasesGrow": (130, 145, [("sds_escalations_waiting", GATE, "0+1x250")]),
    "SdsCaseWaitsLong": (239, 242, [("sds_escalations_oldest_seconds", GATE, "0+60x250")]),
    "SdsWebhookFails": (10, 12, [("sds_webhook_failing_seconds", {"webhook": "shop"}, "0+60x60")]),
    "SdsWebhookLate": (20, 22, [("sds_webhook_oldest_seconds", {"webhook": "shop"}, "0+60x60")]),
    "SdsStateDrifts": (14, 17, [("stale_context_reject_rate_total", GATE, "0+10x60")]),
}


@pytest.fixture
def bed(home: Path) -> Iterator[Bed]:
    """A service whose gate has every series: a policy decides, with a language model beside it."""
    with opened_bed(home, WithLanguageModel("WAIVE", beside=Greedy("WAIVE"))) as opened:
        yield opened


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def watched(bed: Bed) -> str:
    """Return what a scrape shows of a healthy service with a webhook that has decided nothing yet."""
    add_endpoint(bed.database, "https://a.example/", {"toll": bed.gate.store}, name="shop", secret="", now_ms=now_ms())
    bed.app.state.operations.standing._read_s = float("-inf")
    wait_until(lambda: 200 == bed.client.get("/readyz").status_code)
    return scraped(bed)


def test_every_alarm_is_on_series_that_there_are_before_anything_has_happened(bed: Bed) -> None:
    there = samples(watched(bed))
    for rule in rules():
        selected = selectors(rule["expr"])
        assert selected or "up{" in rule["expr"], rule["alert"]
        for each in selected:
            assert any(each.takes(sample) for sample in there), (rule["alert"], each)


def test_every_alarm_is_in_the_table_of_the_page_with_what_it_is_on_and_leads_to_a_section() -> None:
    table = PAGE.partition("\n## Alarms\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)[^`]*` \| [^|]+ \| ([^|]+) \|", table.replace("\\|", "/"), re.MULTILINE)
    said = {alarm: metric for metric, alarms in rows for alarm in re.findall(r"`(\w+)`", alarms)}
    assert said.keys() == {rule["alert"] for rule in rules()}
    for rule in rules():
        assert said[rule["alert"]] in rule["expr"]
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        titles = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub("[`,.']", "", title.lower().replace(" ", "-")) for title in titles}


def test_every_check_that_fails_is_in_the_runbook() -> None:
    entry = PAGE.partition("\n### Down, or not ready\n")[2].partition("\n### ")[0]
    assert {*CHECKS, "probe"} == set(re.findall(r"^\| `(\w+)`", entry, re.MULTILINE))


def test_the_table_of_metrics_has_every_metric_with_its_labels(bed: Bed) -> None:
    bed.post()
    shown = dict[str, set[str]]()
    for name, labels in samples(watched(bed)):
        shown.setdefault(re.sub("_(bucket|sum|count)$", "", name), set()).update(
            key for key, _ in labels if key != "le"
        )
    table = PAGE.partition("\n### Metrics\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = {
        name: set(labels[1:-1].split(",")) if labels else set()
        for name, labels in re.findall(r"`(\w+)(\{[\w,]+\})?`", " ".join(rows))
    }
    assert "sds_decisions_total" in shown
    assert shown == {name: named.get(name) for name in shown}
    assert {"sds_batch_rows", "sds_webhook_deliveries_total"} == named.keys() - shown.keys()  # appear with the first


def healthy(text: str, minutes: int) -> list[dict[str, str]]:
    """Return promtool's series of a service that has been healthy for so long, and decides ten events a minute: those that
    a rule selects.
    """
    series = [{"series": _series("up", {}), "values": f"1x{minutes}"}]
    wanted = {each.name for rule in rules() for each in selectors(rule["expr"])}
    for (name, labels), number in samples(text).items():
        if name not in wanted:
            continue
        has = dict(labels)
        grows = name.startswith(("sds_decision_seconds", "sds_http_seconds")) and float(has.get("le", "inf")) >= 0.05
        values = f"0+10x{minutes}" if grows and not name.endswith("_sum") else f"{number}x{minutes}"
        series.append({"series": _series(name, has), "values": values})
    return series


def overlaid(series: list[dict[str, str]], bad: list[Values]) -> list[dict[str, str]]:
    """Return series with other values for those of a metric that have some labels."""
    for name, labels, values in bad:
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        chosen = [
            each for each in series if each["series"].startswith(name + "{") and wanted <= _labels(each["series"])
        ]
        assert chosen, (name, labels)
        for each in chosen:
            each["values"] = values
    return series


def _series(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}{{{','.join(f'{label}={json.dumps(value)}' for label, value in ({**labels, **TARGET}).items())}}}"


def _labels(series: str) -> set[str]:
    return set(re.findall(r'\w+="[^"]*"', series))


def firing(minute: int, *alarms: str) -> dict[str, Any]:
    expr = 'count by (alertname) (ALERTS{alertstate="firing"})'
    found = [{"labels": f'{{alertname="{alarm}"}}', "value": 1} for alarm in alarms]
    return {"expr": expr, "eval_time": f"{minute}m", "exp_samples": found}


def promtool(tmp_path: Path, tests: list[dict[str, Any]], *, every: str = "1m") -> None:
    """Have `promtool test rules` run tests of the rules, one sample a minute. `every`: the time between two evaluations."""
    if (program := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    subprocess.run([program, "check", "rules", str(RULES)], check=True, capture_output=True, timeout=60)
    each = [{"interval": "1m", **test} for test in tests]
    file = tmp_path / "rules.test.yml"
    file.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": every, "tests": each}), encoding="utf-8"
    )
    done = subprocess.run(
        [program, "test", "rules", str(file)], capture_output=True, text=True, timeout=300, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr


def test_each_alarm_fires_in_its_time_and_no_other_does(bed: Bed, tmp_path: Path) -> None:
    text = watched(bed)
    assert {each.partition(",")[0] for each in FIRES} | {"SdsSlow"} == {rule["alert"] for rule in rules()}
    tests = [
        {
            "input_series": overlaid(healthy(text, 250), bad),
            "promql_expr_test": [firing(before), firing(after, alarm.partition(",")[0])],
        }
        for alarm, (before, after, bad) in FIRES.items()
    ]
    promtool(tmp_path, tests)


def test_a_healthy_service_has_no_alarm_in_eight_days_and_one_that_became_slow_has_one(
    bed: Bed, tmp_path: Path
) -> None:
    text, last = watched(bed), WEEK + 240
    buckets = samples(text)
    slow: list[Values] = [
        ("sds_decision_seconds_bucket", dict(labels), f"0+10x{WEEK} {10 * WEEK}x240")
        for name, labels in buckets
        if name == "sds_decision_seconds_bucket" and 0.05 <= float(dict(labels)["le"]) < 1
    ]
    at = (*range(0, last, DAY // 2), last)
    well = {"input_series": healthy(text, last), "promql_expr_test": [firing(minute) for minute in at]}
    ill = overlaid(healthy(text, last), slow)
    promtool(
        tmp_path,
        [well, {"input_series": ill, "promql_expr_test": [firing(WEEK + 20), firing(WEEK + 120, "SdsSlow")]}],
        every="10m",
    )


def test_the_time_of_the_few_decisions_of_a_holiday_is_no_measure(bed: Bed, tmp_path: Path) -> None:
    text, few = watched(bed), f"0+0.05x{WEEK - 1} {WEEK // 20}"
    days: list[Values] = [("sds_decision_seconds_count", {}, f"{few}+10x240")]
    for name, labels in samples(text):
        if name == "sds_decision_seconds_bucket":
            le = float(dict(labels)["le"])
            days.append(
                (name, dict(labels), f"{few}+10x240" if le >= 1 else f"{few}x240" if le >= 0.05 else f"0x{WEEK}")
            )
    at = [firing(minute) for minute in range(WEEK, WEEK + 240, 5)]
    promtool(
        tmp_path, [{"input_series": overlaid(healthy(text, WEEK + 240), days), "promql_expr_test": at}], every="5m"
    )


def test_a_service_that_ends_again_and_again_has_an_alarm_and_one_that_is_restarted_has_none(
    bed: Bed, tmp_path: Path
) -> None:
    text = watched(bed)

    def test(up: str, *at: dict[str, Any]) -> dict[str, Any]:
        return {"input_series": overlaid(healthy(text, 60), [("up", {}, up)]), "promql_expr_test": list(at)}

    often = test("1x3 0 1x2 0 1x2 0 1x50", firing(11), firing(13, "SdsRestarts"), firing(40))
    once = test("1x3 0 1x9 0 1x50", *(firing(minute) for minute in range(60)))  # twice in ten minutes
    promtool(tmp_path, [often, once])


def test_cases_that_come_in_a_burst_and_are_worked_off_have_no_alarm_and_slow_growth_has_one(
    bed: Bed, tmp_path: Path
) -> None:
    text = watched(bed)

    def test(waiting: list[int], *at: dict[str, Any], last: int = 400) -> dict[str, Any]:
        lasts = [waiting[-1]] * (last - len(waiting))
        values: list[Values] = [("sds_escalations_waiting", GATE, " ".join(map(str, [*waiting, *lasts])))]
        return {"input_series": overlaid(healthy(text, last), values), "promql_expr_test": list(at)}

    never = [firing(minute) for minute in range(0, 400, 5)]
    in_an_hour = [0] * 60 + [5 * i // 2 for i in range(40)] + list(range(100, 0, -1)) + [0]
    at_once = [0] * 60 + [100 - i // 2 for i in range(200)] + [0]
    hourly = [minute // 60 for minute in range(400)]
    two_steps_up_one_back = [4 * (minute // 60) + minute % 60 // 5 for minute in range(12 * 60)]
    a_day = [minute // DAY for minute in range(3 * DAY + 300)]
    grows = "SdsCasesGrow"
    promtool(
        tmp_path,
        [
            test(in_an_hour, *never),
            test(at_once, *never),
            test(hourly, firing(100), firing(240, grows)),
            test(two_steps_up_one_back, firing(100), firing(600, grows), last=12 * 60),
        ],
    )
    slowly = test(a_day, firing(2 * DAY), firing(3 * DAY + 60, grows), last=len(a_day))
    promtool(tmp_path, [slowly], every="5m")


def test_a_process_that_was_told_to_stop_and_drains_for_long_has_no_alarm(bed: Bed, tmp_path: Path) -> None:
    text = watched(bed)
    late: list[Values] = [("sds_check_ok", {"check": "probe"}, "0x60")]
    drains = [*late, ("sds_sampled_timestamp_seconds", {}, "0x60"), ("sds_check_ok", {"check": "draining"}, "0x60")]
    promtool(
        tmp_path,
        [
            {"input_series": overlaid(healthy(text, 60), late), "promql_expr_test": [firing(5, "SdsNotReady")]},
            {"input_series": overlaid(healthy(text, 60), drains), "promql_expr_test": [firing(5), firing(50)]},
        ],
    )


def test_a_store_that_was_down_leaves_no_alarm_when_it_is_back_and_a_rare_work_that_always_fails_has_one(
    bed: Bed, tmp_path: Path
) -> None:
    text, fails = watched(bed), "sds_store_errors_total"
    tests = []
    for minutes in (2, 4, 6, 30):  # a scrape with a key gets 503 meanwhile
        back: list[Values] = [
            ("up", {}, f"1x9 0x{minutes - 1} 1x90"),
            (fails, {"work": "recover"}, f"0x9 _x{minutes} {12 * minutes}x90"),
        ]
        at = range(10 + minutes, 60 + minutes)
        tests.append(
            {"input_series": overlaid(healthy(text, 150), back), "promql_expr_test": [firing(each) for each in at]}
        )
    rare: list[Values] = [(fails, {"work": "sweep"}, "0x9 " + " ".join(f"{each}x9" for each in range(1, 9)))]
    found = [firing(19), firing(45, "SdsBackgroundWorkFails"), firing(85, "SdsBackgroundWorkFails")]
    promtool(tmp_path, [*tests, {"input_series": overlaid(healthy(text, 90), rare), "promql_expr_test": found}])
