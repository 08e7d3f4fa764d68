"""Measure what monitors add to a decision: counting and judging it in a record with a long past, without the commit.

The past is written in bulk: ledger entries, up to PAST, and full windows.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from sds.benchmarks.lib.measuring import summary, timed_us
from sds.kernel.contract.monitors import MonitorSpec
from sds.kernel.registry.monitors import MonitoredDecision, Monitors
from sds.kernel.storage.sqlite import SqliteStore
from sds.kernel.storage.store import Store

PAST, PAST_PER_MEASURED = 1_000_000, 500  # past decisions: at most, and for each measured one
LONGEST = 10_000  # decisions of the longest window
BATCH = 10_000
STEP_MS = 40  # between two decisions
SPECS = (
    {"name": "rate", "of": "approval_rate", "window": {"last": 1_000}, "warn": 0.9},
    {"name": "mean", "of": "paid_mean_minor", "window": {"last": LONGEST}, "stop": 10**9},
    {"name": "sure", "of": "confidence_mean", "window": {"last": 1_000}, "stop": 0.1},
    {"name": "sum", "of": "paid_sum_minor", "window": {"minutes": 1_440}, "stop": 10**12},
)
_PAST = (
    "WITH RECURSIVE past(n) AS (SELECT ? UNION ALL SELECT n + 1 FROM past WHERE n + 1 < ?)"
    " INSERT INTO ledger SELECT n, n, 'DECIDED', 'flow-' || n,"
    ' \'{"action":"REFUND_TICKET","agent_id":"agent","params":{"amount":12345},"state":"EXECUTING"}\','
    " printf('%064d', n), printf('%064d', n + 1) FROM past"
)


def monitored(folder: Path, n: int) -> dict[str, float]:
    """Measure `n` decisions, counted in four windows after up to PAST others; return their `summary` in microseconds."""
    store = SqliteStore(folder / "monitored.db")
    monitors = Monitors("agent", "decisions", [MonitorSpec.model_validate(spec) for spec in SPECS])
    try:
        _write_past(store, min(PAST, n * PAST_PER_MEASURED))
        with store.transaction():
            for number in range(LONGEST + 1):
                _count(store, monitors, number)
        with store.transaction():  # one for all: a commit between them would disturb the processor's caches
            return summary([timed_us(partial(_count, store, monitors, LONGEST + i)) for i in range(1, n + 1)])
    finally:
        store.close()


def _write_past(store: Store, past: int) -> None:
    with store.transaction():
        store.run("DROP TRIGGER ledger_next")  # it would look up the entry before each one
    for first in range(1, past, BATCH):
        with store.transaction():
            store.run(_PAST, (first, min(first + BATCH, past)))


def _count(store: Store, monitors: Monitors, number: int) -> None:
    decided = MonitoredDecision(True, True, 10_000 + number % 500, "NOT_TRAVELLED", 0.9)
    counted = monitors.count(store, decided, number * STEP_MS, lambda _: ())
    monitors.settle(store, counted, number * STEP_MS)
