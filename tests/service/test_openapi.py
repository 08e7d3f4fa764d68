"""The description of the service is true: whatever schemathesis makes of it, there is no 500 and no answer but those described.

SDS_TEST_SCALE=full python -m pytest tests/service/test_openapi.py     more of everything; SDS_TEST_SEED=N replays
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from sds.kernel.decision.packet import Decoding
from tests.kernel.durable import proposal
from tests.proposers import Says
from tests.scale import scale
from tests.service.testbed import EVENT, Bed, opened_bed

ROOT = Path(__file__).parents[2]
SEED = os.environ.get("SDS_TEST_SEED", "34")
# Half of what is asked for is there: cases that wait, the agent
KNOWN = """
[dictionaries.cases]
values = [{cases}]
[dictionaries.agents]
values = ["toll-agent"]
[parameters]
"path.dfid" = {{ dictionary = "cases", probability = 0.5 }}
"path.agent_id" = {{ dictionary = "agents", probability = 0.5 }}
"""


@contextmanager
def served(bed: Bed) -> Iterator[str]:
    """Serve an app from a thread on a port of its own, and return its address."""
    server = uvicorn.Server(uvicorn.Config(bed.app, port=0, log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.usefixtures("home")
def test_no_request_that_schemathesis_makes_fails_or_is_answered_otherwise_than_described(home: Path) -> None:
    engine = Says(proposal("ESCALATE", "HUMAN_REVIEW"), Decoding("says", 0.75))
    with opened_bed(home, engine) as bed, served(bed) as address:
        cases = [bed.post({**EVENT, "trip_id": f"T-{n}"}).json()["dfid"] for n in range(8)]
        config = home / "schemathesis.toml"
        told = (ROOT / "schemathesis.toml").read_text(encoding="utf-8")
        config.write_text(told + KNOWN.format(cases=", ".join(f'"{dfid}"' for dfid in cases)), encoding="utf-8")
        command: list[Any] = [
            Path(sys.executable).with_name("schemathesis"), "--config-file", config, "run", f"{address}/openapi.json",
            "--checks", "all", "-H", f"Authorization: Bearer {bed.key}", "--max-examples", scale(3, 200), "--seed", SEED,
            "--no-color", "--generation-database", "none",
        ]  # fmt: skip
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=False, timeout=1_800, cwd=home
        )
    assert 0 == done.returncode, done.stdout[-8_000:] + done.stderr[-2_000:]
    assert "Tested: " in done.stdout
    assert [] == [facts for event, facts in bed.logged if event == "service.failed"]


def test_every_event_of_a_gate_is_described_by_its_contract(bed: Bed) -> None:
    described = bed.client.get("/openapi.json").json()
    asking = described["paths"]["/v1/gates/{gate}/decisions"]["post"]
    schema = asking["requestBody"]["content"]["application/json"]["schema"]
    assert ["trip_id", "car_id", "text"] == schema["required"]
    assert {"type": "string", "enum": ["toll"]} == next(
        p["schema"] for p in asking["parameters"] if p["name"] == "gate"
    )
    assert {"400", "401", "403", "404", "413", "415", "422", "429", "500", "503", "504"} <= asking["responses"].keys()


def test_allow_names_every_method_of_a_path(bed: Bed) -> None:
    answer = bed.client.delete("/v1/halt")
    assert (405, "GET, PUT") == (answer.status_code, answer.headers["allow"])
    assert "METHOD_NOT_ALLOWED" == answer.json()["reason_code"]
