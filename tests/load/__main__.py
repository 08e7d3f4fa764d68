"""Offers a service more than it can decide, and looks whether it stays honest: `python -m tests.load --rate 10x --seconds 60`.

    unloaded    one request at a time
    capacity    as many as it decides when a few always ask
    loaded      so many times its capacity (or so many a second), at random moments that wait for no answer; latency counts
                from the moment at which a request was to be sent, and each has twice the unloaded p99 as its deadline

The service is `sds serve` in a process of its own, the refund gate with its readers, policy and rail; of its contract only the
limits of money and of escalations an hour are wider. `--gate scripted`: a toll without a model. `lag_ms` is how late the load
was sent, which is in every latency, too. `memory_mib`: what the service's processes hold before the load, after a quarter of it
(`begin`), at its `end` and at most, and how much a minute it grew in between, by least squares. Exit code 1: a promise was not kept; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from sds.benchmarks.lib.measuring import machine, summary, versions
from sds.client import DecisionClient
from sds.gates.refund.gate import ensure_world, read_queue
from sds.host import paths
from tests.load import promises
from tests.load.offering import Offer, a_few_at_a_time, at_a_rate, one_by_one, queue_of
from tests.load.scripted.gate import event as scripted_event
from tests.load.serving import ROOT, Served, served
from tests.load.wire import Pool

CONNECTIONS, CONNECTIONS_MAX = 64, 1_000
CLIENTS = 16
DECIDED_PER_S_MAX = 400  # the queue is long enough for this rate
WEIGHED = 24  # memory samples of a load


@dataclass(frozen=True)
class Load:
    """One run. `rate`: requests a second, or as `10x` times the capacity; `unloaded`: how many are asked one by one."""

    gate: str = "refund"
    rate: str = "10x"
    seconds: float = 60.0
    unloaded: int = 300
    warm_up: int = 20
    capacity_s: float = 10.0
    seed: int = 34

    @property
    def events_max(self) -> int:
        return int(DECIDED_PER_S_MAX * (self.seconds + self.capacity_s)) + self.unloaded + self.warm_up

    def per_s(self, capacity: float) -> float:
        return float(self.rate[:-1]) * capacity if self.rate.endswith("x") else float(self.rate)


def measure(load: Load) -> dict[str, Any]:
    """Start a service, load it and end it; return the report."""
    with tempfile.TemporaryDirectory(prefix="sds-load-") as folder:
        home, scripted = Path(folder), load.gate == "scripted"
        events = list(_events(load, home))
        name, gate = ("toll", str(ROOT / "tests/load/scripted")) if scripted else ("refund", "refund")
        with served(home, gate, f"tests.load.{'scripted' if scripted else 'widened'}") as service:
            report = asyncio.run(_asked(load, service, name, events))
            with DecisionClient(f"http://{service.host}:{service.port}", service.key) as client:
                report["agents"] = {agent["agent_id"]: agent["status"] for agent in client.agents()}
        record = paths.open_record(home / name)
        try:
            report["escalated_for_a_turn"] = promises.escalated_for_a_turn(record)
        finally:
            record.close()
    about = {**machine(), "versions": versions("uvicorn", "uvloop", "httptools", "starlette"), "gate": load.gate}
    report = {"benchmark": "load", **about, "seed": load.seed, "seconds": load.seconds, "rate": load.rate, **report}
    return report | {"broken": promises.broken(report)}


def _events(load: Load, home: Path) -> Iterator[Mapping[str, object]]:
    if load.gate == "scripted":
        yield from map(scripted_event, range(load.events_max))
        return
    ensure_world(home / "refund", claims=load.events_max)
    yield from (case.event for case in read_queue(home / "refund"))


async def _asked(load: Load, service: Served, gate: str, events: list[Mapping[str, object]]) -> dict[str, Any]:
    pool = Pool(service.host, service.port, CONNECTIONS_MAX)
    await pool.open(CONNECTIONS)
    offer = Offer(pool, f"/v1/gates/{gate}/decisions", service.key, queue_of(events))
    gc.collect()
    gc.freeze()  # a collection of the sender's garbage would count as the service's time
    await one_by_one(offer, load.warm_up)
    alone = summary([outcome.latency_ms for outcome in await one_by_one(offer, load.unloaded)])
    few = await a_few_at_a_time(offer, CLIENTS, load.capacity_s)
    capacity = sum(outcome.status == promises.DECIDED for outcome in few) / load.capacity_s
    before_mib, deadline_ms = service.memory_mib, math.ceil(promises.SLOWER_MAX * alone["p99"])
    per_s = load.per_s(capacity)
    outcomes, mib = await asyncio.gather(
        at_a_rate(offer, per_s, load.seconds, deadline_ms, Random(load.seed)), _weighed(service, load.seconds)
    )
    report = {
        "unloaded_ms": alone,
        "capacity_per_s": round(capacity, 1),
        "offered_per_s": round(per_s, 1),
        "deadline_ms": deadline_ms,
        "connections": pool.opened,
        "loaded": promises.summed_up(outcomes),
        "memory_mib": {"before": round(before_mib, 1), **promises.weighed(mib, load.seconds)},
    }
    pool.close()
    return report


async def _weighed(service: Served, seconds: float) -> list[float]:
    """Return a service's memory in MiB at WEIGHED moments of a load."""
    found = list[float]()
    for _ in range(WEIGHED):
        await asyncio.sleep(seconds / WEIGHED)
        found.append(service.memory_mib)
    return found


def _rate(text: str) -> str:
    number = text.removesuffix("x")
    if not number.replace(".", "", 1).isdecimal() or not float(number) > 0:
        raise argparse.ArgumentTypeError(f"`{text}` is neither a number a second nor, as 10x, times the capacity")
    return text


def show(report: Mapping[str, Any]) -> None:
    loaded = report["loaded"]
    print(f"unloaded   {report['unloaded_ms']} ms")
    print(f"capacity   {report['capacity_per_s']} decisions a second")
    print(
        f"offered    {report['offered_per_s']} a second for {report['seconds']} s, deadline {report['deadline_ms']} ms"
    )
    print(f"answers    {loaded['answers']} {loaded['reason_codes']}, of decided: {loaded['states']}")
    print(f"accepted   {loaded['accepted_ms']} ms, of which decided: {loaded['decided_ms']} ms")
    print(f"refused    {loaded['refused_ms']} ms")
    print(f"sender     {loaded['lag_ms']} ms late, {report['connections']} connections")
    print(f"memory     {report['memory_mib']} MiB, agents {report['agents']}")
    print("\n".join(f"BROKEN: {line}" for line in report["broken"]) or "every promise was kept")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rate", type=_rate, default="10x")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--gate", choices=("refund", "scripted"), default="refund")
    parser.add_argument("--unloaded", type=int, default=300, help="how many are asked one by one")
    parser.add_argument("--capacity-s", type=float, default=10.0, help="for how long the capacity is measured")
    parser.add_argument("--seed", type=int, default=34)
    report = measure(Load(**vars(parser.parse_args())))
    show(report)
    print(json.dumps(report))
    sys.exit(bool(report["broken"]))


if __name__ == "__main__":
    main()
