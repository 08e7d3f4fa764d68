"""Measure one decision from trigger to durable receipt, warm and cold, by stage: `sds bench hotpath --json`.

    over_floor          reasoning of a warm decision over the bare passes that it needs, which are run again right after it
    exact_over_greedy   the exact distribution over the kinds, over the greedy one, on the same packets; exact_differs: how
                        often the likeliest whole alternatives and numbers differ from those of the likeliest tokens
    stages_ms           open, reason, judge, drift, reserve, pay: medians, for DENY and for a four-digit REFUND_TICKET

Real claims over real flights, the real payment rail in a process of its own, the record on this disk. There are two sorts
of packets: narrowed, as a safeguard would, to a denial or an escalation; and narrowed to a refund of 10.00 to 99.99, a
denial or an escalation. Other decisions of the model are counted and left out. The first 64 claims (`EARLIER`) of each
sort are not measured: a gate at work has decided before. `kept`: the number of measured decisions whose recurring words
had been read before. The others read them within the decision, which shows in the tail.

Predicted before measuring, from the passes of an earlier decision of each sort: a pass takes at least as long as reading
the weights once, and as two operations for each weight and token, at the rates of this machine in the data type of the
products. All that is no pass (language, kernel, disk) is less than a tenth of the whole (`no_pass`: its share).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from sds.benchmarks.lib.floor import Device, Recorded, device
from sds.benchmarks.lib.measuring import Parser, Report, Say, existing, machine, main, summary, versions, whole_number
from sds.benchmarks.lib.packets import EARLIER, REFUND, narrow_to_denial, narrow_to_digits, renewed
from sds.benchmarks.lib.weights import Weights, add_weights, weights_of
from sds.benchmarks.peer.drivers.serving import timed
from sds.definitions.definition import QueuedCase
from sds.definitions.registry import find
from sds.engines.native import NativeEngine
from sds.gate import Gate
from sds.host.clock import now_ms
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.envelope import DENY
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.models.openvino_.facts import OPENVINO
from sds.models.protocol import Backend

N = 30
N_MAX = 500
COLD_N = 3
STAGES = ("open", "reason", "judge", "drift", "reserve", "pay")
SORTS = {DENY: narrow_to_denial, REFUND: narrow_to_digits}


@dataclass
class Measured:
    """The decisions of one sort: milliseconds of each stage, of the whole, and of the bare passes."""

    stages: list[list[float]] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    exact_over_greedy: list[float] = field(default_factory=list)
    all_exact_over_greedy: list[float] = field(default_factory=list)
    exact_differs: int = 0
    tokens: list[list[int]] = field(default_factory=list)
    canonical: int = 0
    kept: int = 0
    otherwise: Counter[str] = field(default_factory=Counter)
    packets: list[DecisionPacket] = field(default_factory=list)
    predicted: dict[str, Any] = field(default_factory=dict)

    @property
    def over_floor(self) -> list[float]:
        return [stages[STAGES.index("reason")] / bare for stages, bare in zip(self.stages, self.bare, strict=True)]

    def report(self) -> dict[str, Any]:
        stages = dict(zip(STAGES, zip(*self.stages, strict=True), strict=True))
        all_ms = [sum(each) for each in self.stages]
        whole, bare = summary(all_ms), summary(self.bare)
        return {
            "decisions": len(all_ms),
            "decided_otherwise": dict(self.otherwise),
            "canonical": self.canonical,
            "kept": self.kept,
            "whole_ms": whole,
            "stages_ms": {name: summary(found)["p50"] for name, found in stages.items()},
            "reason_ms": summary(stages["reason"]),
            "bare_passes_ms": bare,
            "no_pass": round(float(np.median(1 - np.array(self.bare) / np.array(all_ms))), 3),
            "over_floor": round(summary(self.over_floor)["p50"], 3),
            "whole_over_floor": round(whole["p50"] / bare["p50"], 2),
            "whole_over_predicted": round(whole["p50"] / self.predicted["floor_ms"], 2),
            "exact_over_greedy": round(summary(self.exact_over_greedy)["p50"], 3),
            "all_exact_over_greedy": round(summary(self.all_exact_over_greedy)["p50"], 3),
            "exact_differs": self.exact_differs,
            "tokens_of_passes": list(Counter(map(tuple, self.tokens)).most_common(1)[0][0]),
        }


class Bench:
    """One gate whose stages are called one by one, as the pipeline does, with the clock read between them."""

    def __init__(
        self,
        gate: Gate,
        recorded: Recorded,
        predict: Callable[[str, list[int]], dict[str, Any]],
        *engines: NativeEngine,
    ) -> None:
        """`predict`: returns the least time of a sort's passes. `engines`: greedy, exact over kinds, exact over all."""
        self.gate, self.recorded, self.predict, self.engines = gate, recorded, predict, engines
        self.tokens_max = gate.contract.budget.tokens_max

    def measure(self, sort: str, claims: Iterator[QueuedCase], n: int) -> Measured:
        """Decide claims until `n` were decided as `sort`, after a warm-up; then decide these packets in all modes."""
        measured = Measured()
        for number, claim in enumerate(claims):
            if len(measured.stages) == n:
                for packet in measured.packets:
                    self._compare(packet, measured)
                return measured
            self._decide(sort, claim.event, number, measured)
        raise SystemExit(
            f"the queue ends after {len(measured.stages)} decisions {sort}; {dict(measured.otherwise)} otherwise"
        )

    def _decide(self, sort: str, event: Mapping[str, object], number: int, measured: Measured) -> None:
        kernel, clock = self.gate.kernel, [time.perf_counter()]
        opened = kernel.open(self.gate.read(event))
        clock.append(time.perf_counter())
        narrowed = SORTS[sort](kernel, opened, number) if isinstance(opened, DecisionPacket) else None
        if not isinstance(opened, DecisionPacket) or narrowed is None:
            return
        since = time.perf_counter() - clock[-1]  # narrowing is the benchmark's own work, and no part of a stage
        self.recorded.clear()
        data, decoding = self.engines[0].propose(narrowed, tokens_max=self.tokens_max)
        clock.append(time.perf_counter() - since)
        kept = self.recorded.kept
        verdict = kernel.judge(narrowed, data, decoding)
        clock.append(time.perf_counter() - since)
        report = kernel.just_in_time(narrowed, verdict) if verdict.outcome == "ACCEPTED" else None
        clock.append(time.perf_counter() - since)
        intent = kernel.commit(narrowed, data, decoding, verdict, report)
        clock.append(time.perf_counter() - since)
        if intent is not None:
            kernel.send(intent)
        clock.append(time.perf_counter() - since)
        proposal = parse_proposal(data)
        action = proposal.action if isinstance(proposal, Proposal) else ""
        if action != sort:
            measured.otherwise[action] += 1
            return
        if not measured.predicted:
            measured.predicted = self.predict(sort, self.recorded.tokens)
        if number >= EARLIER:
            measured.stages.append([(b - a) * 1000 for a, b in pairwise(clock)])
            measured.tokens.append(self.recorded.tokens)
            measured.bare.append(self.recorded.bare_ms())
            measured.packets.append(narrowed)
            measured.canonical += bool(decoding.facts["canonical"])
            measured.kept += kept

    def _compare(self, packet: DecisionPacket, measured: Measured) -> None:
        took, written = [], []
        for engine in self.engines:
            (data, _), ms = timed(partial(engine.propose, renewed(packet), tokens_max=self.tokens_max))
            written.append(data)
            took.append(ms)
        measured.exact_differs += written[2] != written[0]
        measured.exact_over_greedy.append(took[1] / took[0])
        measured.all_exact_over_greedy.append(took[2] / took[0])


def cold_ms(weights: Weights, packet: DecisionPacket, tokens_max: int) -> list[float]:
    """Return the time of a new engine's first decision, COLD_N times: weights loaded, nothing cached or compiled."""
    took = []
    for _ in range(COLD_N):
        with closing(NativeEngine(weights.open(), now_ms=now_ms)) as engine:
            took.append(timed(partial(engine.propose, renewed(packet), tokens_max=tokens_max))[1])
    return took


def predicted(rates: Device, size: tuple[int, int], tokens: list[int]) -> dict[str, Any]:
    """Return the least time of passes of so many tokens, and its parts. `size`: the weights' bytes and parameters."""
    weights_bytes, parameters = size
    least = [round(rates.pass_ms(weights_bytes, parameters, count), 2) for count in tokens]
    return {
        **rates.facts,
        "weights_mb": round(weights_bytes / 1e6, 1),
        "parameters_m": round(parameters / 1e6, 1),
        "tokens_of_passes": tokens,
        "passes_ms": least,
        "floor_ms": round(sum(least), 2),
    }


def run(folder: Path, weights: Weights, n: int, say: Say) -> Report:
    rates, size = device(weights), weights.size()

    def predict(sort: str, tokens: list[int]) -> dict[str, Any]:
        found = predicted(rates, size, tokens)
        say(f"{sort}: predicted {found}")
        return found

    with ExitStack() as opened:
        backend = weights.open()
        recorded = Recorded(backend)
        greedy = NativeEngine(cast("Backend", recorded), now_ms=now_ms)
        opened.callback(greedy.close)
        exact = NativeEngine(backend, now_ms=now_ms, mode="exact-kinds")
        whole = NativeEngine(backend, now_ms=now_ms, mode="exact")
        refund = find("refund")  # without monitors: one would stop an agent that is made to deny everyone
        unwatched = refund.load_contract().model_copy(update={"aggregate_thresholds": ()})
        gate = opened.enter_context(Gate.load(replace(refund, contract=unwatched), folder=folder, engine=greedy))
        bench = Bench(gate, recorded, predict, greedy, exact, whole)
        claims = iter(refund.cases(folder))
        measured = {sort: bench.measure(sort, claims, n) for sort in SORTS}
        packet = next(p for p in (narrow_to_denial(gate.kernel, gate.preview(c.event), 0) for c in claims) if p)
        reports = {sort: found.report() for sort, found in measured.items()}
        facts = weights.facts(backend.fingerprint)
    over = [ratio for found in measured.values() for ratio in found.over_floor]
    exact_over = [ratio for found in measured.values() for ratio in found.exact_over_greedy]
    return {
        "benchmark": "hotpath",
        **machine(),
        "n": n,
        "model": facts,
        "versions": versions("llama-cpp-python", OPENVINO.distribution, "numpy"),
        "over_floor": round(summary(over)["p50"], 3),
        "exact_over_greedy": round(summary(exact_over)["p50"], 3),
        "stages_ms": {sort: found["stages_ms"] for sort, found in reports.items()},
        "predicted": {sort: found.predicted for sort, found in measured.items()},
        "warm": reports,
        "cold_ms": summary(cold_ms(weights, packet, gate.contract.budget.tokens_max)),
    }


def _options(parser: Parser) -> None:
    parser.add_argument("--n", type=whole_number(N_MAX), default=N, help="decisions of each sort")
    add_weights(parser)
    parser.add_argument("--folder", type=existing, default=Path(), help="where to measure: the disk matters")


def _run(asked: argparse.Namespace, say: Say) -> Report:
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix=".bench-") as folder:
        return run(Path(folder), weights_of(asked), asked.n, say)


def _show(report: Report) -> None:
    for sort in SORTS:
        print(f"{sort}: {report['warm'][sort]}")
    print(f"cold: {report['cold_ms']}")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
