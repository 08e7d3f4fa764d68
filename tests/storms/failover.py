"""A PostgreSQL that is lost for good while three processes decide, and a standby that takes its place.

One that had confirmed every commit (`synchronous_standby_names`) lacks nothing. One that had fallen behind lacks the last
decisions, of which orders were sent: no process orders anything until those are taken over from the bank's statement.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial

import psycopg

from tests.attack.figures import Figure, none
from tests.attack.forks import fork, in_child
from tests.attack.testbed import contract

from .ground import POSTGRESQL, Bed, Ground, acknowledged_in, reckon, wait_for_an_answer
from .pg_restarts import LEASE_MS, PROCESSES, REFUSED, ended, lives, said, work
from .servers import Server

WHAT = (
    "PostgreSQL is lost under 3 processes that decide, and a standby takes over: one that lags, and one that does not"
)
STORES = (POSTGRESQL,)
LOST = 5  # decisions that the standby never hears of
BEHIND, BEHIND_S_MAX = "RECORD_BEHIND", 60.0


def storm(ground: Ground) -> list[Figure]:
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
        workers = [fork(partial(work, bed, part, ground.n)) for part in range(PROCESSES)]
        _wait_for_answers(bed, ground.n // 3)
        if lags:
            standby.fall_behind()
            _wait_for_answers(bed, LOST)
        primary.stop(signal.SIGQUIT)
        time.sleep(ground.rng.random())
        standby.take_over()
        paid_behind = _adopted(bed) if lags else 0
        while any(lives(worker) for worker in workers):
            time.sleep(0.01)
        figures = [
            *ended(bed, (*REFUSED, BEHIND)),
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
    while sum(line.endswith(BEHIND) for line in said(bed)) < count:
        assert time.monotonic() < until, "nobody found that the record is behind"
        time.sleep(0.01)


def _adopt(bed: Bed) -> None:
    with bed.gate() as gate:
        gate.adopt(who="ada", reason="the standby had fallen behind")
