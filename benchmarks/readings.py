"""Measure what a reading costs, and a whole decision where the written policy decides: `sds bench readings --json`.

    reading_ms        one reading alone: of a text of 15, 60 and 200 of the reader's tokens, and of the queue's own texts
                      (`own`); for a score, of a row of fields (`row`)
    distribution_us   from the readings to the distribution over decisions, alone
    decisions         from trigger to receipt, by kind of decision, and for all that went to no human (`DECIDED`); medians of
                      the stages: open (the packet), read, distribution, policy (the proposal that follows), judge (and drift
                      check), commit, dispatch, answer (reading it from the record, and all that is in no other stage)
    language_model    with `--with-model`: 20 more cases, each by the policy and by the embedded language model, in turn

The gate's own queue, fitted readers and executor, the record on this disk; orders of a gate of your own are settled by a
stand-in. A text of so many tokens is made of the queue's words, padded with full stops. A case whose envelope leaves nothing
to decide is not read and does not count, nor do the first 16 (`WARM_UP`) of each measurement; of the language model's cases
the first 64 (`EARLIER`) do not count.

Predicted before measuring: the stage `read` takes as long as the same readers take alone for the same texts;
`read_over_alone` is what it takes within a decision over that.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sds.benchmarks.lib.measuring import Parser, Report, Say, existing, machine, main, summary, versions, whole_number
from sds.benchmarks.lib.orders import without_orders
from sds.benchmarks.lib.packets import EARLIER
from sds.definitions.definition import DEFAULT, GateDefinition, QueuedCase
from sds.engines.factory import open_engine
from sds.gate import Gate
from sds.host.clock import now_ms
from sds.host.paths import fitted_readers
from sds.kernel.contract.policy import policy_rules
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.envelope import ESCALATE
from sds.kernel.errors import UsageError
from sds.kernel.flow.dispatch import Dispatcher
from sds.kernel.flow.kernel import Kernel
from sds.models.readers.artifact import SPELLING, TOKENIZER, TOKENS_MAX
from sds.models.readers.encoder import TextTokenizer
from sds.models.readers.protocol import THREADS
from sds.policy import engine as proposer
from sds.policy.distribution import distribution
from sds.policy.judgement import Judgement, open_judgement
from sds.policy.readers import FittedAnswers, evidence_of

N, N_MAX, N_MODEL = 300, 10_000, 20
WARM_UP = 16
TOKENS = 15, 60, 200
DECIDED, WHOLE, ANSWER = "DECIDED", "whole", "answer"
STAGES: dict[str, list[tuple[Any, str]]] = {
    "open": [(Kernel, "open")],
    "read": [(FittedAnswers, "answer")],
    "distribution": [(proposer, "distribution")],
    "policy": [(proposer.PolicyEngine, "propose")],
    "judge": [(Kernel, "judge"), (Kernel, "just_in_time")],
    "commit": [(Kernel, "commit")],
    "dispatch": [(Dispatcher, "carry_out")],
    ANSWER: [],
}
Decided = tuple[str, dict[str, float]]  # kind of decision; milliseconds by stage, and their sum under WHOLE


class Clock:
    """Times the stages of decisions by wrapping their functions; a stage excludes stages within it. For one thread."""

    def __init__(self, opened: ExitStack) -> None:
        self._ms, self._within = defaultdict[str, float](float), [0.0]
        for stage, calls in STAGES.items():
            for owner, name in calls:
                opened.enter_context(patch.object(owner, name, self._timed(stage, getattr(owner, name))))

    def _timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: object, **named: object) -> Any:
            self._within.append(0.0)
            began = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                took = (time.perf_counter() - began) * 1000
                self._ms[stage] += took - self._within.pop()
                self._within[-1] += took

        return run

    def decide(self, gate: Gate, case: QueuedCase) -> Decided:
        self._ms.clear()
        answer = self._timed(ANSWER, gate.decide)(case.event)
        ms = {stage: self._ms[stage] for stage in STAGES}
        kind = answer.action if answer.outcome == "ACCEPTED" else ESCALATE
        return kind, ms | {WHOLE: sum(ms.values())}


def of_tokens(words: Sequence[str], count: int, tokens_of: Callable[[str], int]) -> str:
    """Return a text of `count` tokens, special ones included: as many of the words as fit, then full stops."""
    kept = bisect_right(range(1, len(words) + 1), count, key=lambda number: tokens_of(" ".join(words[:number])))
    text = " ".join(words[:kept])
    return text + " ." * (count - tokens_of(text))


def _counter(reader: Path) -> Callable[[str], int]:
    files = {name: (reader / name).read_bytes() for name in (TOKENIZER, SPELLING) if (reader / name).is_file()}
    encode = TextTokenizer(files, TOKENS_MAX).encode
    return lambda text: len(encode(text)[0])


def alone(gate: Gate, fitted: Judgement, packets: Sequence[DecisionPacket]) -> tuple[dict[str, Report], Report]:
    """Read each packet's text and texts of every length, in turn; return the milliseconds by reading and length, and the
    microseconds of the distributions that follow.
    """
    specs, rules = gate.contract.readings, policy_rules(gate.contract)
    counters = {name: _counter(fitted.folder / name) for name, spec in specs.items() if not spec.score}
    words = cycle([word for packet in packets for word in evidence_of(packet).split()])
    took = {
        name: defaultdict[str, list[float]](list) for name in (*counters, *(specs.keys() - counters))
    }  # scores last
    weighed = list[float]()
    for packet in packets:
        following, shares = list(islice(words, TOKENS[-1])), dict[str, dict[str, float]]()
        for name, of in took.items():
            texts = {"row": ""}
            if name in counters:
                lengths = {str(count): of_tokens(following, count, counters[name]) for count in TOKENS}
                texts = {**lengths, "own": evidence_of(packet)}
            for label, text in texts.items():
                began = time.perf_counter()
                reading = fitted.readers[name].read(text, packet.snapshot.fields, shares)
                of[label].append((time.perf_counter() - began) * 1000)
            shares[name] = reading.probabilities
        began = time.perf_counter()
        distribution(rules, packet.snapshot.fields, shares)
        weighed.append((time.perf_counter() - began) * 1e6)
    summed = {name: {label: summary(each[WARM_UP:]) for label, each in of.items()} for name, of in took.items()}
    return summed, summary(weighed[WARM_UP:])


def summed(found: Sequence[Decided]) -> dict[str, Report]:
    """Return how long decisions take, by kind, and for all that went to no human."""
    groups = defaultdict[str, list[dict[str, float]]](list)
    for kind, ms in found:
        for group in {kind, ESCALATE if kind == ESCALATE else DECIDED}:
            groups[group].append(ms)
    of = {group: {name: summary([ms[name] for ms in every]) for name in every[0]} for group, every in groups.items()}
    return {
        group: {"whole_ms": took.pop(WHOLE), "stages_ms": {name: each["p50"] for name, each in took.items()}}
        for group, took in sorted(of.items())
    }


def beside_model(clock: Clock, gate: Gate, other: Gate, cases: Sequence[QueuedCase]) -> Report:
    """Decide cases by the policy and, at another gate with a record of its own, by the language model."""
    pairs = [(clock.decide(gate, case), clock.decide(other, case)) for case in cases]
    by_policy, by_model = (summary([ms[WHOLE] for _, ms in side]) for side in zip(*pairs, strict=True))
    over = round(by_model["p50"] / by_policy["p50"], 2)
    return {"model": other.engine.model, "policy_ms": by_policy, "model_ms": by_model, "over_policy": over}


def _readers_of(definition: GateDefinition) -> Path:
    found = fitted_readers(definition.name, definition.readers)
    if found is None or not found.exists() or not definition.load_contract().policy:
        raise UsageError(f"gate `{definition.name}` has no fitted readers", hint=f"sds fit {definition.argument}")
    return found


def _asked(gate: Gate, queue: Sequence[QueuedCase], most: int) -> list[tuple[QueuedCase, DecisionPacket]]:
    """Return the first `most` cases in which there is something to decide. Raises UsageError where there are fewer."""
    looked = ((case, gate.preview(case.event)) for case in queue)
    found = list(islice((each for each in looked if each[1].envelope.names != (ESCALATE,)), most))
    if len(found) < most:
        raise UsageError(
            f"{most} cases are needed, and the queue has {len(found)} to read", hint="choose a smaller --n"
        )
    return found


def run(definition: GateDefinition, folder: Path, n: int, more: int, say: Say) -> Report:
    """Measure, and return the document. `more`: how many cases the language model decides, too. Raises UsageError."""
    readers, report = _readers_of(definition), dict[str, Any]()
    with ExitStack() as opened:
        gate = opened.enter_context(Gate.load(definition, folder=folder / "policy"))
        asked = _asked(gate, definition.cases(folder / "policy"), WARM_UP + n + more)
        with closing(open_judgement(readers, gate.contract)) as fitted:
            took, weighed = alone(gate, fitted, [packet for _, packet in asked[: WARM_UP + n]])
        predicted = round(sum([*of.values()][-1]["p50"] for of in took.values()), 2)
        say(f"predicted for the stage `read`: {predicted} ms")
        cases, clock = [case for case, _ in asked], Clock(opened)
        found = [
            each for each in [clock.decide(gate, case) for case in cases[: WARM_UP + n]][WARM_UP:] if each[1]["read"]
        ]
        if more:
            engine = opened.enter_context(closing(open_engine(None, now_ms=now_ms)))
            other = opened.enter_context(Gate.load(definition, folder=folder / "model", engine=engine))
            for case in cases[:-more][:EARLIER]:
                other.decide(case.event)
            report["language_model"] = beside_model(clock, gate, other, cases[-more:])
        return report | {
            "benchmark": "readings",
            **machine(),
            "n": n,
            "gate": definition.name,
            "model": gate.engine.model,
            "versions": versions("onnxruntime", "tokenizers", "numpy"),
            "threads": THREADS,
            "reading_ms_p50": max((of["60"]["p50"] for of in took.values() if "60" in of), default=None),
            "reading_ms": took,
            "distribution_us": weighed,
            "decisions": summed(found),
            "predicted": {"read_ms": predicted},
            "read_over_alone": round(summary([ms["read"] for _, ms in found])["p50"] / predicted, 2),
        }


def _options(parser: Parser) -> None:
    parser.add_argument("--gate", default=DEFAULT, help="which gate: its name, or its path")
    parser.add_argument("--n", type=whole_number(N_MAX), default=N, help="how many texts, and how many decisions")
    parser.add_argument("--with-model", action="store_true", help="also ask the embedded language model, a few cases")
    parser.add_argument("--folder", type=existing, default=Path(), help="where to measure: the disk matters")


def _run(asked: argparse.Namespace, say: Say) -> Report:
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix=".bench-") as folder:
        return run(without_orders(asked.gate), Path(folder), asked.n, N_MODEL * asked.with_model, say)


def _show(report: Report) -> None:
    for what in ("reading_ms", "decisions"):
        for name, of in report[what].items():
            print(f"{what}, {name}: {of}")
    print(f"distribution_us: {report['distribution_us']}")
    print(f"language_model: {report.get('language_model', 'not asked (--with-model)')}")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
