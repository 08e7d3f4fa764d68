"""Measure what the kernel costs: `sds bench kernel --json`.

Three figures, each beside what it is measured against, all in one run:

    jit_us_p99               one drift check on five fields
    verdict_us_p50           one pure verdict: derive the envelope from a snapshot, then all five gates
    durable_over_commit_p50  the one durable transaction of an accepted, reserving decision (snapshot, proposal,
                             verdict, reservation, ledger entries), over a bare one-row commit on the same disk

Predicted before measuring: the drift check is five dictionary look-ups and comparisons, 0.3 us; the verdict one CEL
evaluation of all rules (10 us), the safeguards and one parse, 50 us; the durable verdict one commit, plus about
twenty statements of 5 us each.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from sds.benchmarks.measuring import machine, summary, versions
from sds.gates.refund.desk import load_refund_contract
from sds.kernel import dim, intake, jit, registry, store
from sds.kernel.contract import Contract
from sds.kernel.dim import Standing
from sds.kernel.executor import NoExecutor, Signer
from sds.kernel.packet import DecisionPacket, Decoding
from sds.kernel.proposal import Proposal, write_proposal
from sds.kernel.runtime import Kernel
from sds.kernel.state import StateRead, Value

WARM_UP = 200
PURE_N = 20_000
DURABLE_N = 2_000
FIELDS: dict[str, Value] = {
    "flight.carrier": "B6",
    "flight.number": 1,
    "flight.origin": "JFK",
    "flight.dest": "LAX",
    "flight.cancelled": True,
    "flight.due": True,
    "flight.arr_delay_min": 0,
    "flight.dep_delay_min": 0,
    "flight.distance_m": 3_983_000,
    "flight.sched_dep_at": 1_380_000_000,
    "weather.condition": "clear",
    "ticket.customer": "cust-1",
    "ticket.fare_minor": 30_000,
    "ticket.refundable_minor": 30_000,
    "ticket.compensations_left": 1,
    "ticket.vouchers_left": 1,
}
DRIFT_FIELDS = ("flight.cancelled", "flight.arr_delay_min", "weather.condition", "ticket.fare_minor", "flight.dest")


class _Tickets:
    """Every key has the same state, and a customer of its own, so that no spend limit is ever reached."""

    def read(self, key: str) -> StateRead | None:
        return StateRead({**FIELDS, "ticket.customer": key}, "1")


def measure(call: Callable[[], object], times: int) -> dict[str, float]:
    """Return p50, p95, p99 and max of one call, in microseconds, after a warm-up."""
    for _ in range(WARM_UP):
        call()
    return summary([_timed(call) for _ in range(times)])


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1000


def drift_check() -> dict[str, float]:
    """Measure the drift check on five fields of which one moved within its tolerance."""
    policy = tuple((path, 100 if path == "ticket.fare_minor" else 0, -1) for path in DRIFT_FIELDS)
    then = {path: FIELDS[path] for path in DRIFT_FIELDS}
    now = {**then, "ticket.fare_minor": 30_050}
    return measure(lambda: jit.drift(policy, then, now), PURE_N)


def pure_verdict(kernel: Kernel, packet: DecisionPacket, data: bytes) -> dict[str, float]:
    """Measure envelope in force plus five gates, on an accepted proposal."""
    contract = kernel.contract
    standing = Standing(True, False, contract.hash, contract.mission_hash)
    decoding = Decoding("bench", 0.9)

    def once() -> object:
        kernel.envelope(packet.situation)
        return dim.judge(contract, packet, data, standing, decoding, packet.created_at_ms)

    if dim.judge(contract, packet, data, standing, decoding, packet.created_at_ms).outcome != "ACCEPTED":
        raise SystemExit("the benchmark's own proposal is not accepted")
    return measure(once, PURE_N)


def durable_verdict(kernel: Kernel, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Measure the durable transaction and a bare one-row commit, in turn, on the same file system."""
    bare = store.connect(folder / "bare.db")
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        bare.execute(f"PRAGMA {pragma}")
    bare.execute("CREATE TABLE one (id INTEGER PRIMARY KEY, value TEXT NOT NULL) STRICT")
    commits: list[float] = []
    verdicts: list[float] = []
    for i in range(WARM_UP + DURABLE_N):
        verdicts.append(_durable_once(kernel, i))
        commits.append(_timed(lambda: bare.execute("INSERT INTO one (value) VALUES ('x')")))
    bare.close()
    return summary(verdicts[WARM_UP:]), summary(commits[WARM_UP:])


def _durable_once(kernel: Kernel, i: int) -> float:
    packet = _open(kernel, f"B-{i}")
    data = _proposal(packet)
    decoding = Decoding("bench", 0.9)
    verdict = kernel.judge(packet, data, decoding)
    report = kernel.just_in_time(packet, verdict)
    began = time.perf_counter_ns()
    intent = kernel.conclude(packet, data, decoding, verdict, report)
    took = (time.perf_counter_ns() - began) / 1000
    if intent is None:
        raise SystemExit("the benchmark's own decision was not reserved")
    return took


def _open(kernel: Kernel, key: str) -> DecisionPacket:
    event = {"claim_id": key, "ticket_id": key, "claim_text": "My flight was cancelled."}
    packet = kernel.open(intake.read_event(kernel.contract, event))
    if not isinstance(packet, DecisionPacket):
        raise SystemExit("the benchmark's own event was seen before")
    return packet


def _proposal(packet: DecisionPacket) -> bytes:
    params = (("amount", "123.45"),)
    return write_proposal(Proposal("REFUND_TICKET", params, "NOT_TRAVELLED", packet.snapshot.id))


def run(folder: Path) -> dict[str, Any]:
    contract = _without_limits(load_refund_contract())
    opened = store.Store(folder / "decisions.db")
    registry.register(opened, contract, by="operator", now_ms=1)
    ids = count()
    kernel = Kernel(
        contract,
        opened,
        _Tickets(),
        NoExecutor(),
        Signer(bytes(32)),
        now_ms=lambda: time.time_ns() // 1_000_000,
        new_id=lambda: f"flow-{next(ids)}",
    )
    packet = _open(kernel, "A-0")
    jit_us = drift_check()
    verdict_us = pure_verdict(kernel, packet, _proposal(packet))
    durable_us, commit_us = durable_verdict(kernel, folder)
    opened.close()
    return {
        "benchmark": "kernel",
        **machine(),
        "versions": {**versions("common-expression-language"), "sqlite": sqlite3.sqlite_version},
        "jit_us_p99": jit_us["p99"],
        "verdict_us_p50": verdict_us["p50"],
        "durable_over_commit_p50": round(durable_us["p50"] / commit_us["p50"], 2),
        "jit_us": jit_us,
        "verdict_us": verdict_us,
        "durable_us": durable_us,
        "commit_us": commit_us,
    }


def _without_limits(contract: Contract) -> Contract:
    """Raise the spend limits so that thousands of decisions an hour fit; the checks themselves stay."""
    spend = tuple(limit.model_copy(update={"max_minor": 10**12}) for limit in contract.spend)
    return contract.model_copy(update={"spend": spend})


TARGETS = {"jit_us_p99": 5.0, "verdict_us_p50": 60.0, "durable_over_commit_p50": 5.0}
ROWS = {
    "jit_us": "drift check, five fields",
    "verdict_us": "pure verdict: envelope and five gates",
    "durable_us": "durable verdict: one transaction",
    "commit_us": "bare one-row commit, same disk, same run",
}


def page(report: dict[str, Any]) -> str:
    """Return the report as a Markdown page; every figure on it comes from the report."""
    targets = "\n".join(f"| `{k}` | {report[k]} | under {limit:g} |" for k, limit in TARGETS.items())
    rows = "\n".join(
        f"| {text} | {r['n']:,} | {r['p50']} | {r['p95']} | {r['p99']} | {r['max']} |"
        for key, text in ROWS.items()
        for r in [report[key]]
    )
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return f"""# What the kernel costs

Written by `sds bench kernel --page benchmarks/kernel.md` on {report["date"]}; nothing here is typed in by hand.
Machine: {report["machine"]}, {report["cores"]} cores. Versions: {versions}. The kernel is ours, so is this benchmark.

| figure | measured | target |
|---|---|---|
{targets}

All in microseconds, one run, after a warm-up of {WARM_UP} calls.

| what | N | p50 | p95 | p99 | max |
|---|---|---|---|---|---|
{rows}

The durable verdict writes flow, snapshot, proposal, verdict, order, reservation, two spend counters for each limit and
two ledger entries in one SQLite transaction (WAL, `synchronous=FULL`), and seals them; the bare commit writes one row.
The two are measured in turn, one after the other, so both see the same disk. On a disk whose `fsync` is slower the ratio
falls towards 1; on memory it rises, since then only the statements are left.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the JSON document")
    parser.add_argument("--page", type=Path, help="write the report as a Markdown page, too")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to measure: the disk matters")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-") as folder:
        report = run(Path(folder))
    if options.page:
        options.page.write_text(page(report), encoding="utf-8")
    if not options.json:
        print(__doc__)
        for name in ROWS:
            print(f"{name:<12} {report[name]}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
