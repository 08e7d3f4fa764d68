"""The alarms' causes, made to happen in a real `sds serve` that a real Prometheus scrapes: each fires, and clears."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sds.benchmarks.service import served
from tests.gates.own import GATE, written
from tests.stores.records import SqliteStranger

RULES = Path(__file__).parents[3] / "deploy" / "alerts.yml"
FIRES_S = 60.0
# what the rules wait for, in seconds here
SHORT = {
    "1w": "10s",
    "1d": "30s",
    "1h": "8s",
    "2d": "60s",
    "2h": "16s",
    "30m": "8s",
    "15m": "8s",
    "10m": "2s",
    "5m": "8s",
}
pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus"),
    pytest.mark.sqlite_alone("a stranger locks the file"),
    pytest.mark.timeout(300),
]


class Watched:
    """A service and the Prometheus that scrapes it, without an alarm when a test begins."""

    def __init__(self, home: Path, service: str, key: str, prometheus: str) -> None:
        self.home, self._service, self._prometheus, self._numbers = home, service, prometheus, count()
        self.client = httpx2.Client(trust_env=False, timeout=60, headers={"Authorization": f"Bearer {key}"})

    def decide(self, car: str = "CAR-1", **headers: str) -> int:
        event = {"trip_id": f"T-{next(self._numbers)}", "car_id": car, "text": "Please."}
        return int(
            self.client.post(f"{self._service}/v1/gates/toll/decisions", json=event, headers=headers).status_code
        )

    def firing(self) -> set[str]:
        found = self.client.get(f"{self._prometheus}/api/v1/alerts").json()["data"]["alerts"]
        return {each["labels"]["alertname"] for each in found if each["state"] == "firing"}

    def shows(self, query: str) -> bool:
        """Tell whether a query has a result; not so while Prometheus starts."""
        with suppress(httpx2.ConnectError):
            found = self.client.get(f"{self._prometheus}/api/v1/query", params={"query": query})
            return found.status_code == 200 and bool(found.json()["data"]["result"])
        return False

    def fires(self, alarm: str, cause: Callable[[], object] = lambda: None) -> None:
        until(lambda: (cause(), alarm in self.firing())[1])

    def clears(self, alarm: str, cause: Callable[[], object] = lambda: None) -> None:
        until(lambda: (cause(), alarm not in self.firing())[1])

    @contextmanager
    def having(self, *files: str) -> Iterator[None]:
        for file in files:
            (self.home / file).touch()
        yield
        for file in files:
            (self.home / file).unlink()


def until(holds: Callable[[], object]) -> None:
    """Return once something holds; fail where it does not within `FIRES_S` seconds."""
    until_s = time.monotonic() + FIRES_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.1)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    home = tmp_path_factory.mktemp("home")
    down = f"if __import__('pathlib').Path({str(home / 'gateway_down')!r}).exists(): raise ConnectionError('down')"
    code = GATE.replace('if key == "CAR-1"', 'if key != "CAR-2"')
    code = code.replace("deadline_s):\n        amount", f"deadline_s):\n        {down}\n        amount")
    gate, start = (
        written(home / "toll_gate", code),
        ("-m", "tests.service.alarms.at_fault", "serve", "--metrics-open"),
    )
    with served(str(gate.parent), home, start) as (host, port, key, _), prometheus(home, f"{host}:{port}") as address:
        made = Watched(home, f"http://{host}:{port}", key, address)
        with closing(made.client):
            until(lambda: made.shows("sds_check_ok == 1"))
            yield made


@pytest.fixture(autouse=True)
def quiet(watched: Watched) -> None:
    until(lambda: not watched.firing())


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run Prometheus over the rules, with short times, and yield its address."""
    text = re.sub(r"for: \w+", "for: 2s", RULES.read_text(encoding="utf-8"))
    text = re.sub(r"(\[|offset )(\w+)", lambda found: found[1] + SHORT[found[2]], text).replace("> 100", "> 5")
    (folder / "alerts.yml").write_text(text, encoding="utf-8")
    job = {"job_name": "sds", "static_configs": [{"targets": [target]}]}
    every = {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"}
    asked = {"global": every, "rule_files": ["alerts.yml"], "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(json.dumps(asked), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("wb") as said:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=said, stderr=said)
        try:
            yield f"http://{address}"
        finally:
            process.kill()
            process.wait()


def test_a_fault_of_the_program(watched: Watched) -> None:
    assert 200 == watched.decide()
    with watched.having("faulty"):
        assert 500 == watched.decide(**{"Idempotency-Key": "k"})
        watched.fires("SdsFault")
    watched.clears("SdsFault")


def test_decisions_become_slow(watched: Watched) -> None:
    until(lambda: (watched.decide(), watched.shows("sum(increase(sds_decision_seconds_count[8s] offset 10s)) > 5"))[1])
    with watched.having("slow"):
        watched.fires("SdsSlow", watched.decide)
    watched.clears("SdsSlow", watched.decide)


def test_the_language_model_is_down(watched: Watched) -> None:
    with watched.having("language_model_asked", "language_model_down"):
        watched.fires("SdsLanguageModelDown", watched.decide)
    watched.clears("SdsLanguageModelDown")


def test_recovery_fails_while_somebody_holds_the_record(watched: Watched) -> None:
    with closing(sqlite3.connect(watched.home / "toll" / "decisions.db", isolation_level=None)) as db:
        with watched.having("gateway_down"):
            assert 200 == watched.decide("CAR-3")
            assert ("UNKNOWN",) == db.execute(
                "SELECT status FROM execution_log ORDER BY reserved_at_ms DESC"
            ).fetchone()
        db.execute("BEGIN IMMEDIATE")
        watched.fires("SdsRecoveryFails")
        db.execute("ROLLBACK")
        watched.clears("SdsRecoveryFails")


def test_the_key_is_lost(watched: Watched) -> None:
    path: Any = watched.home / "toll" / "kernel.key"
    aside = path.rename(path.with_name("aside"))
    watched.fires("SdsNotReady")
    aside.rename(path)
    watched.clears("SdsNotReady")


def test_the_ledger_is_altered(watched: Watched) -> None:
    watched.decide()
    with closing(sqlite3.connect(watched.home / "toll" / "decisions.db", isolation_level=None)) as db:
        stranger = SqliteStranger(db)
        stranger.execute("UPDATE ledger SET body = body || ' ' WHERE idx = 2")
        watched.fires("SdsNotReady")
        assert 503 == watched.decide()
        stranger.execute("UPDATE ledger SET body = substr(body, 1, length(body) - 1) WHERE idx = 2")
        stranger.hide()
    watched.clears("SdsNotReady")
    assert 200 == watched.decide()
