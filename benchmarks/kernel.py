"""Measure what the kernel costs, and its peers, in one run: `sds bench kernel --json`.

    jit_us_p99               one drift check on five fields
    verdict_us_p50           one pure verdict: derive the envelope from a snapshot, then all five gates
    durable_over_commit_p50  the one durable transaction of an accepted, reserving decision (snapshot, proposal,
                             verdict, reservation, ledger entries), over a bare one-row commit on the same disk
    monitors_us_p50          one decision counted and judged in four windows, after a million others; no commit

The same is measured of `dir-core`, in a process of its own: its drift check of the same fields, its verdict on the bytes of
a proposal, and a whole decision, from the case to its durable execution, once. Cedar and `dir-core` are asked the same rule;
before they are timed they must answer as ours does on both sides of every bound.

Predicted before measuring: the drift check is five dictionary look-ups and comparisons, 0.3 us; the verdict one CEL
evaluation of all rules (10 us), the safeguards and one parse, 50 us; the durable verdict one commit, plus some
statements of 5 us each. First their parts are timed alone (`predicted`): the look-ups, the rules and a parse, a bare commit
and as many bare statements as the transaction has.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sds.benchmarks.lib.measuring import (
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
from sds.benchmarks.lib.monitoring import monitored
from sds.benchmarks.lib.process import PeerProcess
from sds.benchmarks.lib.statements import traced_in
from sds.benchmarks.peer.cedar import Ask, cases, cedar, ours
from sds.benchmarks.peer.contenders import OVERLAYS
from sds.gates.refund.gate import load_refund_contract
from sds.kernel.contract.schema import Contract
from sds.kernel.decision import dim, jit
from sds.kernel.decision.dim import AuthorityState
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.envelope.state import StateRead, StateSource, Value
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.flow import intake
from sds.kernel.flow.kernel import Kernel
from sds.kernel.registry import registry
from sds.kernel.storage import sqlite
from sds.kernel.storage.keyring import Signer
from sds.kernel.storage.ledger import GENESIS, CheckpointWitness, Head, LedgerKey
from sds.kernel.storage.store import Store

WARM_UP, N, N_MAX = 200, 2_000, 100_000
PURE_PER_DURABLE = 10  # calls that take microseconds, for each durable verdict
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
DRIFT_CENTS = 100  # how far the fare may move
ONE_ROW = "INSERT INTO one (value) VALUES ('x')"
DIR_CORE_DECISIONS_MAX = 300  # of some 10 ms each
DIR_CORE_TIMEOUT_S = 300.0
DIR_CORE = "sds.benchmarks.peer.drivers.dir_core"
DRIFT_FIELDS = ("flight.cancelled", "flight.arr_delay_min", "weather.condition", "ticket.fare_minor", "flight.dest")


class _Tickets:
    """A state source in which all keys have the same state, but a customer each, so that no spend limit is reached."""

    def read(self, key: str) -> StateRead | None:
        return StateRead({**FIELDS, "ticket.customer": key}, "1")


class _Pays:
    """An executor that settles every order at once."""

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
    policy = tuple((path, DRIFT_CENTS if path == "ticket.fare_minor" else 0, -1) for path in DRIFT_FIELDS)
    then, now = _then_and_now()
    return measure(lambda: jit.drift(policy, then, now), times)


def _then_and_now() -> tuple[dict[str, Value], dict[str, Value]]:
    then = {path: FIELDS[path] for path in DRIFT_FIELDS}
    return then, {**then, "ticket.fare_minor": 30_050}


def pure_verdict(kernel: Kernel, packet: DecisionPacket, data: bytes, times: int) -> dict[str, float]:
    """Measure deriving the envelope in force and the five gates, on an accepted proposal."""
    contract = kernel.contract
    standing = AuthorityState(True, False, contract.hash, contract.mission_hash)
    decoding = Decoding("bench", 0.9)

    def once() -> object:
        kernel.envelope(packet.situation)
        return dim.judge(contract, packet, data, standing, decoding, packet.created_at_ms)

    if dim.judge(contract, packet, data, standing, decoding, packet.created_at_ms).outcome != "ACCEPTED":
        raise SystemExit("the benchmark's own proposal is not accepted")
    return measure(once, times)


def beside_cedar(kernel: Kernel, times: int) -> dict[str, dict[str, float]]:
    """Measure one yes or no under the same rule, Cedar's and ours. Raises SystemExit where the two do not answer alike."""
    ask, own = cedar(), ours(kernel.rules)
    proposal = Proposal("REFUND_TICKET", (("amount", "123.45"),), "NOT_TRAVELLED", "0" * 64)
    figures = {"rule_us": measure(lambda: own(FIELDS, proposal), times)}
    if ask is None:
        return figures
    if any(ask(fields, said) != own(fields, said) for fields, said in cases(FIELDS)):
        raise SystemExit("Cedar's policies and the contract do not say the same")
    return figures | {"cedar_us": measure(lambda: ask(FIELDS, proposal), times)}


def beside_dir_core(own: Ask, folder: Path, overlays: Path, times: int, n: int) -> tuple[Report, dict[str, str]]:
    """Return the times of `dir-core`, and its versions. Raises SystemExit where it does not answer as `own`."""
    log, overlay = folder / "dir-core.log", overlays / "dir-core"
    peer = PeerProcess(DIR_CORE, [str(folder)], log=log, overlay=overlay, timeout_s=DIR_CORE_TIMEOUT_S)
    try:
        return _timed_in(peer, own, times, n), peer.versions
    finally:
        peer.close()


def _timed_in(peer: PeerProcess, own: Ask, times: int, n: int) -> Report:
    if peer.missing:
        return {"not_asked": f"dir-core: {peer.missing}"}
    sides, (then, now) = list(cases(FIELDS)), _then_and_now()
    tolerance = {"ticket.fare_minor": DRIFT_CENTS}
    drift = {"then": then, "now": now, "keys": list(DRIFT_FIELDS), "tolerance": tolerance}
    case = {"fields": FIELDS, "amount": 12_345}
    requests: dict[str, dict[str, Any]] = {
        "answers": {"cases": [[dict(fields), said.action, _cents(said)] for fields, said in sides]},
        "dir_core_jit_us": {"measure": "jit", "times": times, **drift},
        "dir_core_verdict_us": {"measure": "verdict", "times": times, **case},
        "dir_core_decided_us": {"measure": "decided", "times": min(n, DIR_CORE_DECISIONS_MAX), **case},
    }
    results: Report = {}
    for name, request in requests.items():
        answer = peer.ask({"warm_up": WARM_UP, **request}, timeout_s=DIR_CORE_TIMEOUT_S)
        if "error" in answer:
            return {"not_asked": f"dir-core: {answer['error']}"}
        results |= {name: answer["found"]}
    if results.pop("answers") != [own(fields, said) for fields, said in sides]:
        raise SystemExit("dir-core's contract and ours do not say the same")
    return results


def _cents(said: Proposal) -> int:
    return sum(int(text.replace(".", "")) for _, text in said.params)


def predicted(kernel: Kernel, data: bytes, folder: Path) -> dict[str, float]:
    """Return the least that the figures can be, in microseconds: their parts, each timed alone."""
    then, now = _then_and_now()
    bare = _one_table(folder / "predicted.db")
    commit = measure(lambda: bare.execute(ONE_ROW), WARM_UP)["p50"]
    bare.execute("BEGIN")
    statement = measure(lambda: bare.execute(ONE_ROW), WARM_UP)["p50"]
    bare.execute("COMMIT")
    bare.close()
    rules = measure(lambda: kernel.rules.envelope(FIELDS), WARM_UP)["p50"]
    parsed = measure(lambda: json.loads(data), WARM_UP)["p50"]
    return {
        "jit_us": measure(lambda: [then[path] == now[path] for path in DRIFT_FIELDS], WARM_UP)["p50"],
        "verdict_us": round(rules + parsed, 2),
        "durable_us": round(commit + _statements(folder) * statement, 2),
    }


def _statements(folder: Path) -> int:
    """Return the number of statements in a decision's durable transaction."""
    seen: list[str] = []
    kernel = open_kernel(folder / "traced.db", connect=traced_in(seen))
    began = len(seen)
    durable_once(kernel, 0)  # two transactions: opened, and this one
    seen = list(seen)
    kernel.store.close()
    return len(seen) - seen.index("BEGIN IMMEDIATE", seen.index("COMMIT", began))


def _one_table(path: Path) -> sqlite3.Connection:
    """Return a bare database whose commits are as durable as the record's."""
    bare = sqlite.connect(path)
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        bare.execute(f"PRAGMA {pragma}")
    bare.execute("CREATE TABLE one (id INTEGER PRIMARY KEY, value TEXT NOT NULL) STRICT")
    return bare


def durable_verdict(kernel: Kernel, folder: Path, n: int) -> tuple[dict[str, float], dict[str, float]]:
    """Measure the durable transaction and a bare one-row commit, in turn, on the same file system."""
    bare = _one_table(folder / "bare.db")
    commits: list[float] = []
    verdicts: list[float] = []
    for i in range(WARM_UP + n):
        verdicts.append(durable_once(kernel, i))
        commits.append(timed_us(lambda: bare.execute(ONE_ROW)))
    bare.close()
    return summary(verdicts[WARM_UP:]), summary(commits[WARM_UP:])


def durable_once(kernel: Kernel, i: int) -> float:
    """Return the time of the durable transaction of one accepted, reserving decision, in microseconds."""
    packet = _open(kernel, f"B-{i}")
    data = _proposal(packet)
    decoding = Decoding("bench", 0.9)
    verdict = kernel.judge(packet, data, decoding)
    report = kernel.just_in_time(packet, verdict)
    began = time.perf_counter_ns()
    intent = kernel.commit(packet, data, decoding, verdict, report)
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
    path: Path,
    *,
    contract: Contract | None = None,
    source: StateSource | None = None,
    connect: sqlite.Connect = sqlite.connect,
    store: Store | None = None,
) -> Kernel:
    """Return a kernel over the record at `path`, old or new: the refund gate's, with limits that no benchmark reaches.

    `contract` and `source` replace the refund gate's, `store` the SQLite file.
    """
    contract = contract or without_limits(load_refund_contract())
    key = LedgerKey(bytes(32), Head(0, GENESIS))
    opened = store or sqlite.SqliteStore(path, connect=connect, witness=CheckpointWitness(lambda _: key, lambda: 1))
    registry.register(opened, contract, by="operator", now_ms=1)
    return Kernel(
        contract,
        opened,
        source or _Tickets(),
        _Pays(),
        Signer(bytes(32)),
        now_ms=lambda: time.time_ns() // 1_000_000,
    )


def run(folder: Path, n: int, say: Say, *, overlays: Path = OVERLAYS) -> Report:
    kernel = open_kernel(folder / "decisions.db")
    packet = _open(kernel, "A-0")
    floor = predicted(kernel, _proposal(packet), folder)
    say(f"predicted, in us: {floor}")
    pure = n * PURE_PER_DURABLE
    jit_us = drift_check(pure)
    verdict_us = pure_verdict(kernel, packet, _proposal(packet), pure)
    rule = beside_cedar(kernel, pure)
    durable_us, commit_us = durable_verdict(kernel, folder, n)
    decided = [timed_us(partial(accepted, kernel, f"D-{i}")) for i in range(WARM_UP + n)]
    beside, peer_versions = beside_dir_core(ours(kernel.rules), folder, overlays, pure, n)
    kernel.store.close()
    monitors_us = monitored(folder, n)
    return {
        "benchmark": "kernel",
        **machine(),
        "n": n,
        "versions": versions("common-expression-language", "cedarpy")
        | peer_versions
        | {"sqlite": sqlite3.sqlite_version},
        "predicted": floor,
        "over_predicted": {
            name: round(found["p50"] / floor[name], 2)
            for name, found in (("jit_us", jit_us), ("verdict_us", verdict_us), ("durable_us", durable_us))
        },
        "jit_us_p99": jit_us["p99"],
        "verdict_us_p50": verdict_us["p50"],
        "durable_over_commit_p50": round(durable_us["p50"] / commit_us["p50"], 2),
        "monitors_us_p50": monitors_us["p50"],
        "jit_us": jit_us,
        "verdict_us": verdict_us,
        **rule,
        "durable_us": durable_us,
        "commit_us": commit_us,
        "decided_us": summary(decided[WARM_UP:]),
        "monitors_us": monitors_us,
        **beside,
    }


def without_limits(contract: Contract) -> Contract:
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
    "decided_us": "a whole decision: opened, judged, reserved, carried out, settled",
    "monitors_us": "the monitors' share of it: four windows, after a million decisions",
    "dir_core_jit_us": "dir-core: drift check, the same fields",
    "dir_core_verdict_us": "dir-core: its verdict on the bytes of a proposal, the same rule",
    "dir_core_decided_us": "dir-core: evaluated and carried out once, its SQLite storage",
}


def _options(parser: Parser) -> None:
    parser.add_argument("--n", type=whole_number(N_MAX), default=N, help="durable verdicts; ten times that of the rest")
    parser.add_argument("--folder", type=existing, default=Path(), help="where to measure: the disk matters")
    parser.add_argument("--overlays", type=Path, default=OVERLAYS, help="where peers' own versions of libraries lie")


def _run(asked: argparse.Namespace, say: Say) -> Report:
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix=".bench-") as folder:
        return run(Path(folder), asked.n, say, overlays=asked.overlays)


def _show(report: Report) -> None:
    for name in ROWS:
        print(f"{name:<20} {report.get(name, 'not asked')}")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
