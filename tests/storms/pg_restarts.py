"""Stop PostgreSQL, as an operator does and as a crash does, and start it again, while three processes decide.

The processes go on: a decision without a server is refused, and the next one connects again.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from sds import Gate
from sds.kernel.errors import SdsError, StoreError
from tests.attack.figures import Figure, every, measured, none
from tests.attack.forks import fork, in_child
from tests.attack.testbed import Testbed, contract

from .ground import POSTGRESQL, Ground, acknowledged_in, bed_of, reckon, wait_for_an_answer

WHAT = "PostgreSQL is ended and started again under 3 processes that decide"
STORES = (POSTGRESQL,)
PROCESSES = 3
LEASE_MS = 10_000
UP_S_MAX, DOWN_S_MAX = 1.0, 0.5
REFUSED = ("STORE_UNAVAILABLE", "FLOW_IN_PROGRESS")
PAUSE_S = 0.02
TRIES_MAX = 3_000


def storm(ground: Ground) -> list[Figure]:
    assert ground.server is not None
    bed = bed_of(ground, contract(ttl_ms=LEASE_MS // 2, dispatch_ms=LEASE_MS // 2))
    bed.open_accounts(range(ground.n))
    in_child(lambda: bed.gate().close())
    workers = [fork(partial(_work, bed, part, ground.n)) for part in range(PROCESSES)]
    while sum(line.endswith("OPEN") for line in _said(bed)) < PROCESSES // 2:  # some gates are open, others not yet
        time.sleep(0.01)
    restarts = 0
    while any(_lives(worker) for worker in workers):
        wait_for_an_answer(bed)
        time.sleep(ground.rng.random() * UP_S_MAX)
        ground.server.stop(ground.rng.choice([signal.SIGINT, signal.SIGQUIT]))
        time.sleep(ground.rng.random() * DOWN_S_MAX)
        ground.server.start()
        restarts += 1
    codes = [line.split() for line in _said(bed)]
    refused = [code for _, code in codes if code in REFUSED]
    others = sorted({code for _, code in codes if code not in (*REFUSED, "DONE", "OPEN")})
    for code in others:
        print(f"  refused as {code}")
    return [
        measured("restarts", restarts),
        measured("decisions refused meanwhile", len(refused)),
        none("refused in another way than as an error of the store, retryable", len(others)),
        every("processes that came to their end by themselves", sum(code == "DONE" for _, code in codes), PROCESSES),
        *reckon(bed, range(ground.n)),
    ]


def _lives(worker: int) -> bool:
    try:
        return os.waitpid(worker, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


def _said(bed: Testbed) -> list[str]:
    path = bed.folder / "said"
    return path.read_text().splitlines() if path.exists() else []


def _say(bed: Testbed, part: int, code: str) -> None:
    with (bed.folder / "said").open("a") as file:
        file.write(f"{part} {code}\n")


def _work(bed: Testbed, part: int, n: int) -> None:
    """Decide one share of the events at one gate, each until it is answered."""
    with _opened(bed, part) as gate:
        _say(bed, part, "OPEN")
        for number in range(part, n, PROCESSES):
            for _ in range(TRIES_MAX):
                code = _decide(gate, bed, number)
                if not code:
                    break
                _say(bed, part, code)
                time.sleep(PAUSE_S)
    _say(bed, part, "DONE")


def _opened(bed: Testbed, part: int) -> Gate:
    """Open the gate, and try again while the store is not there, as a service manager does."""
    for _ in range(TRIES_MAX):
        try:
            return bed.gate()
        except StoreError as error:
            _say(bed, part, error.reason_code)
            time.sleep(PAUSE_S)
    raise AssertionError("the gate could never be opened")


def _decide(gate: Gate, bed: Testbed, number: int) -> str:
    """Return why an event could not be decided; "" where it was."""
    try:
        answer = gate.decide(bed.event(number))
    except SdsError as error:
        return error.reason_code if error.retryable else f"{error.reason_code}-not-retryable"
    except Exception as error:  # noqa: BLE001  it is counted as a broken promise
        print(f"  {type(error).__name__}: {error}")
        return type(error).__name__
    acknowledged_in(bed).write(number, answer)
    return answer.tag or "RETRYABLE" if answer.retryable else ""
