"""A PostgreSQL that is ended, as an operator does and as a crash does, and started again, while three processes decide.

No process is started anew: what a decision needed and was not there is refused, and the next one finds the server again.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from traceback import print_exception

from sds import Gate
from sds.kernel.errors import SdsError, StoreError
from tests.attack.figures import Figure, every, none, told
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
    workers = [fork(partial(work, bed, part, ground.n)) for part in range(PROCESSES)]
    while sum(line.endswith("OPEN") for line in said(bed)) < PROCESSES // 2:  # some are open, some are to be
        time.sleep(0.01)
    restarts = 0
    while any(lives(worker) for worker in workers):
        wait_for_an_answer(bed)
        time.sleep(ground.rng.random() * UP_S_MAX)
        ground.server.stop(ground.rng.choice([signal.SIGINT, signal.SIGQUIT]))
        time.sleep(ground.rng.random() * DOWN_S_MAX)
        ground.server.start()
        restarts += 1
    return [told("restarts", restarts), *ended(bed, REFUSED), *reckon(bed, range(ground.n))]


def ended(bed: Testbed, refused: tuple[str, ...]) -> list[Figure]:
    """Count how processes that `work` ended, and what they were refused; `refused`: as what."""
    codes = [line.split()[1] for line in said(bed)]
    others = sorted({*codes} - {*refused, "DONE", "OPEN"})
    for code in others:
        print(f"  refused as {code}")
    return [
        told("decisions refused meanwhile", sum(code in refused for code in codes)),
        none("refused in another way than as an error of the store, retryable", len(others)),
        every("processes that came to their end by themselves", codes.count("DONE"), PROCESSES),
    ]


def lives(worker: int) -> bool:
    try:
        return os.waitpid(worker, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


def said(bed: Testbed) -> list[str]:
    path = bed.folder / "said"
    return path.read_text().splitlines() if path.exists() else []


def _say(bed: Testbed, part: int, code: str) -> None:
    with (bed.folder / "said").open("a") as file:
        file.write(f"{part} {code}\n")


def work(bed: Testbed, part: int, n: int) -> None:
    """Decide one share, each event until it is answered, in one process with one gate."""
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
    """Open the gate as whoever starts services does: again and again, as long as the store is not there."""
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
        if not error.retryable:
            print_exception(error)
        return error.reason_code if error.retryable else f"{error.reason_code}-not-retryable"
    except Exception as error:  # noqa: BLE001  that is what is counted
        print_exception(error)
        return type(error).__name__
    acknowledged_in(bed).write(number, answer)
    return answer.tag or "RETRYABLE" if answer.retryable else ""
