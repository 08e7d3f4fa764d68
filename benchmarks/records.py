"""Decision records of any size, for benchmarks: real decisions, and as many copies of them as are wanted.

Every copy has ids of its own in every table and its entries are chained on to the ledger, so trees, indices and the
file are as large as those of that many decisions. Not measured itself, and no record to audit: a copy's seals are those of
what it was copied from.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sds.benchmarks.kernel import accepted, open_kernel
from sds.kernel.storage.ledger import entry_hash

TEMPLATES = 250
COPIED_AT_ONCE = 20  # times all templates, in one transaction
ID_COLUMNS = frozenset({"dfid", "event_id", "idempotency_key", "resource", "resource_key", "scope"})
TABLES = (
    "events",
    "case_keys",
    "decision_flows",
    "context_snapshots",
    "policy_proposals",
    "dim_validations",
    "execution_log",
    "reservations",
    "resources",
    "spend",
)


def make_record(path: Path, entries: int) -> int:
    """Write a record whose ledger has at least `entries` entries; return how many it has."""
    kernel = open_kernel(path)
    for i in range(TEMPLATES):
        accepted(kernel, f"T-{i}")
    kernel.store.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous=OFF")  # a power cut would cost a benchmark, not a decision
        for table in TABLES:
            db.execute(f"CREATE TEMP TABLE template_{table} AS SELECT * FROM {table}")
        written = db.execute("SELECT at_ms, kind, dfid, body FROM ledger WHERE dfid <> ''").fetchall()
        (held,) = db.execute("SELECT MAX(idx) FROM ledger").fetchone()
        copies = max(0, -(-(entries - held) // len(written)))
        for start in range(0, copies, COPIED_AT_ONCE):
            db.execute("BEGIN IMMEDIATE")
            for copy in range(start, min(start + COPIED_AT_ONCE, copies)):
                _copy(db, f"~{copy}", written)
            db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return int(db.execute("SELECT MAX(idx) FROM ledger").fetchone()[0])


def _copy(db: sqlite3.Connection, suffix: str, written: list[tuple[int, str, str, str]]) -> None:
    for table in TABLES:
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        wanted = ", ".join(f"{c} || '{suffix}'" if c in ID_COLUMNS else c for c in columns)
        db.execute(f"INSERT INTO {table} SELECT {wanted} FROM template_{table}")
    idx, prev_hash = db.execute("SELECT idx, entry_hash FROM ledger ORDER BY idx DESC LIMIT 1").fetchone()
    for at_ms, kind, dfid, body in written:
        idx, own = idx + 1, f"{dfid}{suffix}"
        hashed = entry_hash(idx, at_ms, kind, own, body, prev_hash)
        db.execute("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?)", (idx, at_ms, kind, own, body, prev_hash, hashed))
        prev_hash = hashed
