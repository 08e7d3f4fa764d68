"""Send one event many times over HTTP to `sds serve` with several workers, half of them with another body.

The gate is `refund`, whose policy decides with its fitted readers, without a language model. Payments are counted in the
rail's file.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx2

from sds.benchmarks.service import served
from tests.attack.figures import Figure, every, measured, none

from .ground import Ground

WHAT = "one event is sent many times at once to `sds serve` with 4 workers, half of them with another body"
WORKERS, CALLERS = 4, 16
ANSWERED_S = 60.0
TRIES_MAX, PAUSE_S = 200, 0.1
NO_TURN = (409, 429, 503)  # retryable: still running, too many, full


def storm(ground: Ground) -> list[Figure]:
    home = {**os.environ, "SDS_HOME": str(ground.folder / "home"), "SDS_THREADS": "1"}
    event = _event(home)
    changed = {**event, "claim_text": "another text altogether"}
    start = ("-m", "sds.cli.app", "serve", "--workers", str(WORKERS))
    with served("refund", Path(home["SDS_HOME"]), start, **home) as (host, port, key, _):
        address = f"http://{host}:{port}"
        first = _send(address, key, event)
        bodies = [changed if number % 2 else event for number in range(ground.n)]
        with ThreadPoolExecutor(CALLERS) as pool:
            said = list(pool.map(partial(_send, address, key), bodies))
    same, other = said[::2], said[1::2]
    codes = Counter(code for code, _ in said)
    paid = _paid(ground.folder / "home" / "refund" / "rail.db")
    return [
        measured(f"answers: {dict(codes)}", len(said)),
        every("the changed refused with 422", sum(code == 422 for code, _ in other), len(other)),
        every("of them that name the flow", sum(first[1] in text for _, text in other), len(other)),
        every("the same answered with 200, for the same flow", sum(each[1] == first[1] for each in same), len(same)),
        none("executions beyond the first", max(0, paid - 1)),
        none("answers that are an error of ours (500)", codes[500]),
    ]


def _event(home: dict[str, str]) -> dict[str, str]:
    command = [sys.executable, "-m", "sds.cli.app", "events", "refund", "--limit", "1"]
    done = subprocess.run(command, env=home, capture_output=True, text=True, check=True)
    event: dict[str, str] = json.loads(done.stdout.splitlines()[0])
    return event


def _send(address: str, key: str, event: dict[str, str]) -> tuple[int, str]:
    """Send an event until it gets its turn; return the status, and the dfid of the reply, or its text."""
    with httpx2.Client(trust_env=False, timeout=ANSWERED_S) as client:
        for _ in range(TRIES_MAX):
            url, headers = f"{address}/v1/gates/refund/decisions", {"Authorization": f"Bearer {key}"}
            reply = client.post(url, json=event, headers=headers)
            if reply.status_code not in NO_TURN:
                break
            time.sleep(PAUSE_S)
    return reply.status_code, str(reply.json().get("dfid", reply.text))


def _paid(rail: Path) -> int:
    with closing(sqlite3.connect(rail)) as db:
        return int(db.execute("SELECT count(*) FROM payouts WHERE status = 'settled'").fetchone()[0])
