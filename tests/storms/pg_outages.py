"""Stop PostgreSQL and start it again, or lose it for good, while three processes decide. The processes go on.

Started again: a decision without a server is refused, and the next one connects again. Lost: a standby takes its place. A standby
that had confirmed every commit (`synchronous_standby_names`) lacks nothing. One that had fallen behind lacks the last
decisions, whose orders were sent: no process orders anything until those are adopted from the bank's statement.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from traceback import print_exception

import psycopg

from sds import Gate
from sds.kernel.errors import SdsError, StoreError
from sds.kernel.executor.wholeness import RECORD_BEHIND
from tests.attack.figures import Figure, every, measured, none
from tests.attack.forks import fork, in_child
from tests.attack.testbed import Testbed, contract

from .ground import POSTGRESQL, Bed, Ground, acknowledged_in, bed_of, reckon, wait_for_an_answer
from .servers import Server

WHAT_ENDED = "PostgreSQL is ended and started again under 3 processes that decide"
STORES = (POSTGRESQL,)
PROCESSES = 3
LEASE_MS = 10_000
UP_S_MAX, DOWN_S_MAX = 1.0, 0.5
REFUSED = ("STORE_UNAVAILABLE", "FLOW_IN_PROGRESS")
PAUSE_S = 0.02
TRIES_MAX = 3_000
WHAT_LOST = (
    "PostgreSQL is lost under 3 processes that decide, and a standby takes over: one that lags, and one that does not"
)
LOST = 5  # decisions that the standby never hears of
BEHIND_S_MAX = 60.0


def restarts(ground: Ground) -> list[Figure]:
    assert ground.server is not None
    bed = bed_of(ground, contract(ttl_ms=LEASE_MS // 2, dispatch_ms=LEASE_MS // 2))
    bed.open_accounts(range(ground.n))
    in_child(lambda: bed.gate().close())
    workers = [fork(partial(_work, bed, part, ground.n)) for part in range(PROCESSES)]
    while sum(line.endswith("OPEN") for line in _said(bed)) < PROCESSES // 2:  # some gates are open, others not yet
        time.sleep(0.01)
    times = 0
    while any(_lives(worker) for worker in workers):
        wait_for_an_answer(bed)
        time.sleep(ground.rng.random() * UP_S_MAX)
        ground.server.stop(ground.rng.choice([signal.SIGINT, signal.SIGQUIT]))
        time.sleep(ground.rng.random() * DOWN_S_MAX)
        ground.server.start()
        times += 1
    return [measured("restarts", times), *_ended(bed, REFUSED), *reckon(bed, range(ground.n))]


def _ended(bed: Testbed, refused: tuple[str, ...]) -> list[Figure]:
    """Count how processes that `work` ended, and what they were refused; `refused`: as what."""
    codes = [line.split()[1] for line in _said(bed)]
    others = sorted({*codes} - {*refused, "DONE", "OPEN"})
    for code in others:
        print(f"  refused as {code}")
    return [
        measured("decisions refused meanwhile", sum(code in refused for code in codes)),
        none("refused in another way than as an error of the store, retryable", len(others)),
        every("processes that came to their end by themselves", codes.count("DONE"), PROCESSES),
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
        if not error.retryable:
            print_exception(error)
        return error.reason_code if error.retryable else f"{error.reason_code}-not-retryable"
    except Exception as error:  # noqa: BLE001  it is counted as a broken promise
        print_exception(error)
        return type(error).__name__
    acknowledged_in(bed).write(number, answer)
    return answer.tag or "RETRYABLE" if answer.retryable else ""


def failover(ground: Ground) -> list[Figure]:
    assert ground.server is not None
    lagging = _survived(ground, ground.server, lags=True)
    ground.server.start()
    return [*lagging, *_survived(ground, ground.server, lags=False)]


def _survived(ground: Ground, primary: Server, *, lags: bool) -> list[Figure]:
    with primary.followed() as standby:
        os.environ["SDS_STORE"] = standby.url_of_both
        if not lags:
            _confirm_every_commit(primary)
        terms = contract(ttl_ms=LEASE_MS // 2, dispatch_ms=LEASE_MS // 2)
        bed = Bed(ground.folder / f"lags-{lags}", terms=terms, idempotent=not lags, lists=lags)
        bed.open_accounts(range(ground.n))
        in_child(lambda: bed.gate().close())
        workers = [fork(partial(_work, bed, part, ground.n)) for part in range(PROCESSES)]
        _wait_for_answers(bed, ground.n // 3)
        if lags:
            standby.fall_behind()
            _wait_for_answers(bed, LOST)
        primary.stop(signal.SIGQUIT)
        time.sleep(ground.rng.random())
        standby.take_over()
        paid_behind = _adopted(bed) if lags else 0
        while any(_lives(worker) for worker in workers):
            time.sleep(0.01)
        figures = [
            *_ended(bed, (*REFUSED, RECORD_BEHIND)),
            none("paid by a record that was behind", paid_behind),
            *reckon(bed, range(ground.n)),
        ]
        who = "lagging" if lags else "synchronous"
        return [replace(figure, name=f"{figure.name}, over a {who} standby") for figure in figures]


def _confirm_every_commit(primary: Server) -> None:
    """Have each commit wait until the standby has it on its disk."""
    with psycopg.connect(primary.url, autocommit=True) as db:
        db.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        db.execute("SELECT pg_reload_conf()")
        while not db.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'").fetchone():
            time.sleep(0.01)


def _wait_for_answers(bed: Bed, count: int) -> None:
    before = len(acknowledged_in(bed).ended())
    while len(acknowledged_in(bed).ended()) < before + count:
        wait_for_an_answer(bed)


def _adopted(bed: Bed) -> int:
    """Take over the orders that a record lacks once every process was refused; return how many were paid meanwhile."""
    _wait_for_refusals(bed, 1)  # what had been ordered by the one that is lost is paid by now
    before = len(bed.bank.paid())
    _wait_for_refusals(bed, 3 * PROCESSES)
    paid = len(bed.bank.paid()) - before
    in_child(lambda: _adopt(bed))
    return paid


def _wait_for_refusals(bed: Bed, count: int) -> None:
    until = time.monotonic() + BEHIND_S_MAX
    while sum(line.endswith(RECORD_BEHIND) for line in _said(bed)) < count:
        assert time.monotonic() < until, "nobody found that the record is behind"
        time.sleep(0.01)


def _adopt(bed: Bed) -> None:
    with bed.gate() as gate:
        gate.adopt(who="ada", reason="the standby had fallen behind")
