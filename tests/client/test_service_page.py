"""docs/service.md says what the service does, and the Containerfile and the unit do as it says."""

from __future__ import annotations

import configparser
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sds.client import AsyncDecisionClient, DecisionClient
from sds.definitions.registry import find
from sds.service.reasons import REASONS
from tests.client.live import served
from tests.engines.servers import free_port
from tests.service.testbed import EVENT, Bed
from tests.test_readme import _environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
UNIT = (ROOT / "deploy" / "sds.service").read_text(encoding="utf-8")
IMAGE = (ROOT / "Containerfile").read_text(encoding="utf-8")


def _blocks(language: str, text: str = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def _section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _unit(name: str) -> str:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(UNIT)
    return parsed["Service"][name]


@pytest.mark.skipif(shutil.which("curl") is None, reason="the five lines ask with curl")
def test_the_five_lines_serve_a_decision(tmp_path: Path) -> None:
    lines = [line[2:] for line in _blocks("console")[0].splitlines()]
    assert 5 == len(lines)
    assert lines[0].startswith("pip install 'PATH_TO_THE_SOURCE_FOLDER[service]' ")
    environment = _environment(tmp_path / "home")
    claim = next(iter(find("refund").cases(tmp_path / "queue"))).event
    (tmp_path / "claim.json").write_text(json.dumps(claim), encoding="utf-8")
    begin = ["set -e", "trap 'kill $(jobs -p) || true' EXIT", f"KEY=$({lines[1].partition('#')[0]})"]
    script = "\n".join([*begin, *lines[2:], "", "kill $!", "wait $! || true"])
    assert "--retry 60 " in script
    done = subprocess.run(
        ["bash", "-c", script.replace("8080", str(free_port())).replace("--retry 60 ", "--retry 150 ")],  # a busy machine
        cwd=tmp_path, env={**environment, "no_proxy": "127.0.0.1"}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stdout + done.stderr
    assert '"status":"ready"' in done.stdout
    assert f'"event_id":"{claim["claim_id"]}"' in done.stdout, done.stdout + done.stderr


def test_the_example_of_the_client_runs(bed: Bed, tmp_path: Path) -> None:
    (code,) = _blocks("python", _section("Client"))
    (tmp_path / "claim.json").write_text(json.dumps(EVENT), encoding="utf-8")
    with served(bed) as address:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SDS_URL": address, "SDS_KEY": bed.key}
        command = [sys.executable, "-c", code.replace('"refund"', '"toll"')]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    assert 0 == done.returncode, done.stderr
    assert done.stdout.startswith("CLOSED WAIVE ")


def test_the_table_of_the_client_names_every_method() -> None:
    named = set(re.findall(r"`(\w+)\(", "".join(re.findall(r"^\| (`.*?) \|", _section("Client"), re.MULTILINE))))
    for client in (DecisionClient, AsyncDecisionClient):
        public = {name for name, _ in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")}
        assert public - {"close"} == named


def test_every_endpoint_of_the_table_exists(bed: Bed) -> None:
    paths = {re.sub(r"\{\w+\}", "{}", path) for path in bed.app.openapi()["paths"]}
    named = re.findall(r"(?:GET|POST|PUT) (/v1/[^`?]*)", _section("Endpoints"))
    assert len(named) > 10
    for path in named:
        assert re.sub(r"\{\w+\}", "{}", path.replace("{gate}", "toll").replace("/suspend", "/{}")) in paths


def test_every_reason_code_of_the_page_is_one() -> None:
    answered = set(re.findall(r"\b(?:503|504|422|409|429) `([A-Z_]+)`", PAGE)) | set(
        re.findall(r'code=~?"([A-Z_]+)', PAGE)
    )
    assert {"OVERLOADED", "NOT_DECIDED", "STORE_UNAVAILABLE", "INTERNAL"} <= answered <= REASONS.keys()


def test_every_alarm_is_on_a_metric_that_there_is(bed: Bed) -> None:
    bed.post()
    shown = bed.client.get("/metrics").text
    alarms = re.findall(r"^\| `(\w+)", _section("Alarms"), re.MULTILINE)
    assert len(alarms) > 8
    there = set(re.findall(r"^# TYPE (\w+)", shown, re.MULTILINE))
    webhook = {"sds_webhook_failing_seconds"}  # shown where there is an endpoint
    assert {"up"} >= {name for name in alarms if name not in there | webhook and f"{name}_seconds" not in there}


def test_the_unit_is_hardened_and_waits_longer_than_the_drain() -> None:
    drain_s = float(re.findall(r"--drain-s (\d+)", _unit("ExecStart"))[0])
    assert float(_unit("TimeoutStopSec")) > drain_s
    for name, value in {
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "StateDirectory": "sds",
        "UMask": "0077",
    }.items():
        assert value == _unit(name)


def test_the_image_runs_without_rights_and_asks_whether_it_lives() -> None:
    last = IMAGE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER sds$", last, re.MULTILINE)
    assert "/livez" in last.partition("HEALTHCHECK")[2]
    copied = re.findall(r"\bpip (?:install|wheel) .*?(constraints\.txt|data\.txt)", IMAGE)
    assert {"constraints.txt", "data.txt"} == set(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_the_sections_that_others_link_to_are_there() -> None:
    anchors = {
        re.sub("[`,.']", "", title.lower().replace(" ", "-")) for title in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    }
    assert set() == set(re.findall(r"\]\(#([^)]*)\)", PAGE)) - anchors
    for target in re.findall(r"\]\(([^)#h][^)#]*)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
