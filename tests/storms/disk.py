"""Fill the disk now and then: SQLite may not grow the record, or the system refuses to write beyond a size.

What cannot be written is not decided, and nothing is paid that was not written first. Once there is room again, the same
process goes on.
"""

from __future__ import annotations

import resource
import sqlite3
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from sds import Gate
from sds.kernel.errors import SdsError
from tests.attack.figures import Figure, every, measured, none
from tests.attack.forks import in_child, in_children
from tests.attack.testbed import Testbed, contract

from .ground import IN_PROGRESS, SQLITE, Ground, acknowledged_in, bed_of, reckon

WHAT = "the disk is full now and then, by SQLite's own limit and by the system's, for 2 processes"
STORES = (SQLITE,)  # PostgreSQL has its own disk; `pg-restarts` covers its refusals
PROCESSES = 2
LEASE_MS = 2_000
TURNS = 4  # events with room, then as many without, and so on
PAGES_MAX = 1_073_741_823


def storm(ground: Ground) -> list[Figure]:
    bed = bed_of(ground, contract(ttl_ms=LEASE_MS // 2, dispatch_ms=LEASE_MS // 2))
    bed.open_accounts(range(ground.n))
    in_child(lambda: bed.gate().close())
    parts = [
        partial(_work, bed, range(part, ground.n, PROCESSES), Random(ground.rng.random())) for part in range(PROCESSES)
    ]
    refused, other, after, given = (sum(column) for column in zip(*in_children(parts, PROCESSES), strict=True))
    return [
        measured("decisions refused because the disk was full", refused),
        none("decisions refused in another way than as an error of the store, retryable", other),
        every("decided by the same process as soon as there is room", after, given),
        *reckon(bed, range(ground.n)),
    ]


class Disk:
    """Simulates a full disk for all connections of this process to one record. Make it before any is opened."""

    def __init__(self, record: Path) -> None:
        self._record, self._open = record, list[sqlite3.Connection]()
        connect = sqlite3.connect

        def kept(path: Any, *given: Any, **named: Any) -> sqlite3.Connection:
            made = connect(path, *given, **named)
            if str(path) == str(record):
                self._open.append(made)
            return made

        sqlite3.connect = kept  # type: ignore[assignment]  # in a child, for the store that it opens

    def fill(self, *, by_system: bool) -> None:
        """Leave no room: no file may grow beyond the write-ahead log's size, or the record gets no more pages."""
        if by_system:
            log = self._record.with_name(f"{self._record.name}-wal")
            resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 1, resource.RLIM_INFINITY))
            return
        for db in self._open:
            (pages,) = db.execute("PRAGMA page_count").fetchone()
            db.execute(f"PRAGMA max_page_count={pages}")

    def clear(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for db in self._open:
            db.execute(f"PRAGMA max_page_count={PAGES_MAX}")


def _work(bed: Testbed, numbers: range, rng: Random) -> tuple[int, int, int, int]:
    """Decide with room and without, in turns; return (refused, refused otherwise, decided with room, sent with room)."""
    refused = other = decided = given = 0
    disk = Disk(bed.own / "decisions.db")
    with bed.gate() as gate:
        for number in numbers:
            turn = number // PROCESSES
            full = turn // TURNS % 2 == 1
            if turn % TURNS == 0 and full:
                disk.fill(by_system=rng.random() < 0.5)
            code = _decide(gate, bed, number)
            if turn % TURNS == TURNS - 1 and full:
                disk.clear()
            refused += full and code == "STORE_UNAVAILABLE"
            other += code not in ("", "STORE_UNAVAILABLE", IN_PROGRESS)
            given += not full
            decided += not full and not code
        disk.clear()
    return refused, other, decided, given


def _decide(gate: Gate, bed: Testbed, number: int) -> str:
    """Return why an event could not be decided; "" where it was."""
    try:
        answer = gate.decide(bed.event(number))
    except SdsError as error:
        return error.reason_code if getattr(error, "retryable", True) else f"{error.reason_code}, not retryable"
    except Exception as error:  # noqa: BLE001  it is counted as a broken promise
        print(f"  {type(error).__name__}: {error}")
        return type(error).__name__
    acknowledged_in(bed).write(number, answer)
    return ""
