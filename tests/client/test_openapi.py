"""The description of the service is true: whatever schemathesis makes of it, there is no 500 and no answer but those described.

SDS_TEST_SCALE=full python -m pytest tests/client/test_openapi.py     more of everything; SDS_TEST_SEED=N replays
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sds.kernel.decision.packet import Decoding
from tests.client.live import served
from tests.kernel.durable import proposal
from tests.proposers import Says
from tests.scale import limit_s, scale
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
            "--checks", "all", "--exclude-path", "/v1/events", "-H", f"Authorization: Bearer {bed.key}", "--max-examples", scale(3, 200), "--seed", SEED,
            "--no-color", "--generation-database", "none",
        ]  # fmt: skip
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=False, timeout=limit_s(600), cwd=home
        )
    assert 0 == done.returncode, done.stdout[-8_000:] + done.stderr[-2_000:]
    assert "Tested: " in done.stdout
    assert [] == [facts for event, facts in bed.logged if event == "service.failed"]


def test_allow_names_every_method_of_a_path(bed: Bed) -> None:
    answer = bed.client.delete("/v1/halt")
    assert (405, "GET, PUT") == (answer.status_code, answer.headers["allow"])
    assert "METHOD_NOT_ALLOWED" == answer.json()["reason_code"]
