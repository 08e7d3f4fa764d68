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
import sqlite3
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from sds.benchmarks.cedar import cases, cedar, ours
from sds.benchmarks.measuring import (
    Parser,
    Report,
    Say,
    existing,
    machine,
    main,
    summary,
    timed_us,
    versions,
    whole_number,
)
from sds.gates.refund.desk import load_refund_contract
from sds.kernel import dim, intake, jit, registry, store
from sds.kernel.contract import Contract
from sds.kernel.dim import Standing
from sds.kernel.executor import ExecutionIntent, Receipt, Signer
from sds.kernel.packet import DecisionPacket, Decoding
from sds.kernel.proposal import Proposal, write_proposal
from sds.kernel.runtime import Kernel
from sds.kernel.state import StateRead, StateSource, Value

WARM_UP = 200
N, N_MAX = 2_000, 100_000
PURE_PER_DURABLE = 10  # what takes microseconds is called so many times as often
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


class _Pays:
    """Carries everything out at once."""

    idempotent = True

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:  # noqa: ARG002
        return Receipt("settled", key)

    def lookup(self, key: str, deadline_s: float) -> Receipt:  # noqa: ARG002
        return Receipt("settled", key)


def measure(call: Callable[[], object], times: int) -> dict[str, float]:
    """Return p50, p95, p99 and max of one call, in microseconds, after a warm-up."""
    for _ in range(WARM_UP):
        call()
    return summary([timed_us(call) for _ in range(times)])


def drift_check(times: int) -> dict[str, float]:
    """Measure the drift check on five fields of which one moved within its tolerance."""
    policy = tuple((path, 100 if path == "ticket.fare_minor" else 0, -1) for path in DRIFT_FIELDS)
    then = {path: FIELDS[path] for path in DRIFT_FIELDS}
    now = {**then, "ticket.fare_minor": 30_050}
    return measure(lambda: jit.drift(policy, then, now), times)


def pure_verdict(kernel: Kernel, packet: DecisionPacket, data: bytes, times: int) -> dict[str, float]:
    """Measure envelope in force plus five gates, on an accepted proposal."""
    contract = kernel.contract
    standing = Standing(True, False, contract.hash, contract.mission_hash)
    decoding = Decoding("bench", 0.9)

    def once() -> object:
        kernel.envelope(packet.situation)
        return dim.judge(contract, packet, data, standing, decoding, packet.created_at_ms)

    if dim.judge(contract, packet, data, standing, decoding, packet.created_at_ms).outcome != "ACCEPTED":
        raise SystemExit("the benchmark's own proposal is not accepted")
    return measure(once, times)


def beside_cedar(kernel: Kernel, times: int) -> dict[str, dict[str, float]]:
    """Measure one yes or no under the same rule: Cedar's and ours, after both have answered alike on every side of it."""
    ask, own = cedar(), ours(kernel.rules)
    proposal = Proposal("REFUND_TICKET", (("amount", "123.45"),), "NOT_TRAVELLED", "0" * 64)
    found = {"rule_us": measure(lambda: own(FIELDS, proposal), times)}
    if ask is None:
        return found
    if any(ask(fields, said) != own(fields, said) for fields, said in cases(FIELDS)):
        raise SystemExit("Cedar's policies and the contract do not say the same")
    return found | {"cedar_us": measure(lambda: ask(FIELDS, proposal), times)}


def durable_verdict(kernel: Kernel, folder: Path, n: int) -> tuple[dict[str, float], dict[str, float]]:
    """Measure the durable transaction and a bare one-row commit, in turn, on the same file system."""
    bare = store.connect(folder / "bare.db")
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        bare.execute(f"PRAGMA {pragma}")
    bare.execute("CREATE TABLE one (id INTEGER PRIMARY KEY, value TEXT NOT NULL) STRICT")
    commits: list[float] = []
    verdicts: list[float] = []
    for i in range(WARM_UP + n):
        verdicts.append(durable_once(kernel, i))
        commits.append(timed_us(lambda: bare.execute("INSERT INTO one (value) VALUES ('x')")))
    bare.close()
    return summary(verdicts[WARM_UP:]), summary(commits[WARM_UP:])


def durable_once(kernel: Kernel, i: int) -> float:
    """Return what the durable transaction of one accepted, reserving decision took, in microseconds."""
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


def accepted(kernel: Kernel, key: str) -> None:
    """Decide one event to its end: reserved, carried out, settled."""
    packet = _open(kernel, key)
    answer = kernel.decide(packet, _proposal(packet), Decoding("bench", 0.9))
    if answer.execution != "SUCCESS":
        raise SystemExit("the benchmark's own decision was not carried out")


def _open(kernel: Kernel, key: str) -> DecisionPacket:
    event = {"claim_id": key, "ticket_id": key, "claim_text": "My flight was cancelled."}
    packet = kernel.open(intake.read_event(kernel.contract, event))
    if not isinstance(packet, DecisionPacket):
        raise SystemExit("the benchmark's own event was seen before")
    return packet


def _proposal(packet: DecisionPacket) -> bytes:
    params = (("amount", "123.45"),)
    return write_proposal(Proposal("REFUND_TICKET", params, "NOT_TRAVELLED", packet.snapshot.id))


def open_kernel(
    path: Path, *, prefix: str = "flow", contract: Contract | None = None, source: StateSource | None = None
) -> Kernel:
    """Return the refund gate's kernel over a record of its own, with limits that no benchmark reaches.

    `prefix`: of the ids of its flows. A record that is there is gone on with. Or that of another contract and its state.
    """
    contract = contract or _without_limits(load_refund_contract())
    opened = store.Store(path)
    registry.register(opened, contract, by="operator", now_ms=1)
    ids = count()
    return Kernel(
        contract,
        opened,
        source or _Tickets(),
        _Pays(),
        Signer(bytes(32)),
        now_ms=lambda: time.time_ns() // 1_000_000,
        new_id=lambda: f"{prefix}-{next(ids)}",
    )


def run(folder: Path, n: int) -> Report:
    kernel = open_kernel(folder / "decisions.db")
    packet = _open(kernel, "A-0")
    pure = n * PURE_PER_DURABLE
    jit_us = drift_check(pure)
    verdict_us = pure_verdict(kernel, packet, _proposal(packet), pure)
    rule = beside_cedar(kernel, pure)
    durable_us, commit_us = durable_verdict(kernel, folder, n)
    kernel.store.close()
    return {
        "benchmark": "kernel",
        **machine(),
        "n": n,
        "versions": versions("common-expression-language", "cedarpy") | {"sqlite": sqlite3.sqlite_version},
        "jit_us_p99": jit_us["p99"],
        "verdict_us_p50": verdict_us["p50"],
        "durable_over_commit_p50": round(durable_us["p50"] / commit_us["p50"], 2),
        "jit_us": jit_us,
        "verdict_us": verdict_us,
        **rule,
        "durable_us": durable_us,
        "commit_us": commit_us,
    }


def _without_limits(contract: Contract) -> Contract:
    """Raise the spend limits so that thousands of decisions an hour fit; the checks themselves stay."""
    spend = tuple(limit.model_copy(update={"max_minor": 10**12}) for limit in contract.spend)
    return contract.model_copy(update={"spend": spend})


ROWS = {
    "jit_us": "drift check, five fields",
    "verdict_us": "pure verdict: envelope and five gates",
    "rule_us": "one yes or no: this contract's rule",
    "cedar_us": "one yes or no: Cedar, the same rule",
    "durable_us": "durable verdict: one transaction",
    "commit_us": "bare one-row commit, same disk, same run",
}


READING = """The durable verdict writes flow, snapshot, proposal, verdict, order, reservation, two spend counters for each limit and
two ledger entries in one SQLite transaction (WAL, `synchronous=FULL`), and seals them; the bare commit writes one row.
The two are measured in turn, one after the other, so both see the same disk. On a disk whose `fsync` is slower the ratio
falls towards 1; on memory it rises, since then only the statements are left."""


def _options(parser: Parser) -> None:
    parser.add_argument(
        "--n", type=whole_number(N_MAX), default=N, help="durable verdicts; ten times as many of the rest"
    )
    parser.add_argument("--folder", type=existing, default=Path(), help="where to measure: the disk matters")


def _run(asked: argparse.Namespace, _say: Say) -> Report:
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix=".bench-") as folder:
        return run(Path(folder), asked.n)


def _show(report: Report) -> None:
    for name in ROWS:
        print(f"{name:<12} {report.get(name, 'not installed')}")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
