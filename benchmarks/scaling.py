"""Measure how a decision's cost grows with what it grows with: `sds bench scaling --json`.

    durable_1m_over_1k   the durable verdict over a ledger of a million entries, over one of a thousand
    ledger               the same for every size: one record a size, asked in turn, so that all see the same disk

Predicted before measuring: every statement of a verdict goes through an index, so a thousand times the rows cost one or
two more pages of each tree, which are in memory: at most 1.1. A record that is read from end to end anywhere would show as 10 and more.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sds.benchmarks.kernel import durable_once, open_kernel
from sds.benchmarks.measuring import machine, summary, versions
from sds.benchmarks.records import make_record

SIZES = (1_000, 10_000, 100_000, 1_000_000)
N = 500
WARM_UP = 50


def ledger(folder: Path, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row a size: entries, and the durable verdict in microseconds."""
    entries = [make_record(folder / f"{size}.db", size) for size in sizes]
    kernels = [open_kernel(folder / f"{size}.db", prefix="more") for size in sizes]
    took: list[list[float]] = [[] for _ in sizes]
    for i in range(WARM_UP + N):
        for found, kernel in zip(took, kernels, strict=True):
            found.append(durable_once(kernel, i))
    for kernel in kernels:
        kernel.store.close()
    return [
        {"entries": held, "bytes": (folder / f"{size}.db").stat().st_size, "durable_us": summary(us[WARM_UP:])}
        for size, held, us in zip(sizes, entries, took, strict=True)
    ]


def run(folder: Path, sizes: Sequence[int]) -> dict[str, Any]:
    rows = ledger(folder, sizes)
    least, most = rows[0]["durable_us"]["p50"], rows[-1]["durable_us"]["p50"]
    return {
        "benchmark": "scaling",
        **machine(),
        "versions": versions() | {"sqlite": sqlite3.sqlite_version},
        "durable_1m_over_1k": round(most / least, 3),
        "ledger": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the JSON document")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to measure: the disk matters (3 GB)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-") as folder:
        report = run(Path(folder), SIZES)
    if not options.json:
        print(__doc__)
        for row in report["ledger"]:
            print(row)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
