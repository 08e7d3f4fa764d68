"""Measure one decision, ours and that of every peer in its best mode: `sds bench peers --n 20`.

The same weights file, the same prompt tokens, the same language (each is given the exact regular expression or GBNF of
the packet), greedy. Every engine lives in a process of its own and is asked for one decision at a time, in turn, so that
all see the same machine. Every decision is about a new packet: new state, bounds, claim and reference; what a grammar
costs is part of what is measured. Peers keep the contract's part of the prompt in their cache, as we do.

`fixed` packets have no free digit, `digits` ones an amount of four. What lies outside the envelope is counted as a
violation, what raised or ran out of time as an error; times are of all that was written, violations too. Engines spell
alike and still choose differently: an engine that denies where ours refunds writes no digits, so its time flatters it.
"""

from __future__ import annotations

import argparse
import base64
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sds.benchmarks.measuring import (
    Parser,
    Report,
    Say,
    existing,
    machine,
    main,
    names,
    summary,
    versions,
    whole_number,
)
from sds.benchmarks.packets import REFUND, digits_packets, fixed_packets
from sds.benchmarks.peer_process import PeerProcess
from sds.benchmarks.weights import weights_path
from sds.engines.written import END_TOKENS, grammar_of
from sds.grammars import emit_gbnf
from sds.grammars.language import language
from sds.kernel.errors import UsageError
from sds.kernel.packet import DecisionPacket
from sds.kernel.proposal import Proposal, parse_proposal
from sds.models.llama import LlamaBackend
from sds.models.protocol import prompt_sections

WARM_UP = 2
DECISIONS = 20
DECISIONS_MAX = 1_000
CANDIDATES_PER_DECISION = 4
TIMEOUT_S = 120.0
START_TIMEOUT_S = 300.0
TOKENS_MAX = 2_048
OPENING, TAIL = b'{"action":"', b'","context_ref"'
KINDS = ("fixed", "digits")
OVERLAYS = Path(".peers")


@dataclass(frozen=True, slots=True)
class Contender:
    """One engine: the module that drives it and what that is told. `overlay`: whose other versions it needs."""

    name: str
    module: str
    options: tuple[str, ...] = ()
    overlay: str = ""


_DRIVERS = "sds.benchmarks.peer_drivers"
OURS = Contender("ours", f"{_DRIVERS}.ours")
PEERS = (
    Contender("guidance-llamacpp", f"{_DRIVERS}.guidance_llamacpp", overlay="guidance"),
    Contender("llamacpp-grammar", f"{_DRIVERS}.llamacpp_grammar"),
    Contender("llamacpp-server", f"{_DRIVERS}.llamacpp_server"),
    Contender("outlines-llamacpp", f"{_DRIVERS}.outlines_llamacpp", ("outlines_core",)),
    Contender("outlines-llamacpp-llguidance", f"{_DRIVERS}.outlines_llamacpp", ("llguidance",)),
    Contender("outlines-transformers", f"{_DRIVERS}.on_transformers", ("outlines_core",)),
    Contender("outlines-transformers-llguidance", f"{_DRIVERS}.on_transformers", ("llguidance",)),
    Contender("xgrammar-transformers", f"{_DRIVERS}.on_transformers", ("xgrammar",)),
    Contender("lm-format-enforcer-transformers", f"{_DRIVERS}.on_transformers", ("lm-format-enforcer",)),
)


@dataclass(frozen=True, slots=True)
class Task:
    """One packet, and the same question as every engine is asked it."""

    packet: DecisionPacket
    request: dict[str, Any]

    def permits(self, text: str) -> bool:
        """Tell whether a text is a decision about this packet within its envelope."""
        data = text.encode("utf-8", "replace")
        proposal = parse_proposal(data)
        known = isinstance(proposal, Proposal) and proposal.context_ref == self.packet.snapshot.id
        return known and self.packet.envelope.contains(data)


@dataclass
class Tally:
    """What one engine did with the packets of one kind."""

    ms: list[float] = field(default_factory=list)
    refund_ms: list[float] = field(default_factory=list)
    compile_ms: list[float] = field(default_factory=list)
    decided: Counter[str] = field(default_factory=Counter)
    texts: list[str | None] = field(default_factory=list)
    violations: int = 0
    errors: int = 0
    first_error: str = ""

    def add(self, task: Task, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self.errors += 1
            self.first_error = self.first_error or answer["error"]
            self.texts.append(None)
            return
        self.ms.append(answer["ms"])
        if answer.get("compile_ms") is not None:
            self.compile_ms.append(answer["compile_ms"])
        self.texts.append(answer["text"])
        if task.permits(answer["text"]):
            action = _action(answer["text"])
            self.decided[action] += 1
            self.refund_ms += [answer["ms"]] if action == REFUND else []
        else:
            self.violations += 1

    @property
    def ms_p50(self) -> float | None:
        return summary(self.ms)["p50"] if self.ms else None


def _action(text: str) -> str:
    proposal = parse_proposal(text.encode())
    return proposal.action if isinstance(proposal, Proposal) else ""


@dataclass
class Entry:
    """One engine in the run. `missing`: why it did not start; then nothing is measured."""

    contender: Contender
    process: PeerProcess
    tallies: dict[str, Tally] = field(default_factory=lambda: {kind: Tally() for kind in KINDS})

    @property
    def in_the_run(self) -> bool:
        return not self.process.missing  # one that died goes on to be asked: each answer that fails to come is an error


def tasks_of(packets: Sequence[DecisionPacket], backend: LlamaBackend) -> list[Task]:
    return [Task(packet, _request(packet, backend)) for packet in packets]


def _request(packet: DecisionPacket, backend: LlamaBackend) -> dict[str, Any]:
    said = language(packet.envelope, packet.snapshot.id)
    grammar = grammar_of(said, "regex")
    frame, sections = backend.frame(), prompt_sections(backend, packet.texts[0], "".join(packet.texts[1:]))
    static, *rest = packet.texts
    return {
        "tokens": [token for section in sections for token in section],
        "tokens_static": len(sections[0]),
        "text": f"{frame.before_system}{static}{frame.between}{''.join(rest)}{frame.after_user}",
        "regex": grammar.text,
        "gbnf": emit_gbnf.to_gbnf(said),
        "tokens_max": grammar.bytes_max + END_TOKENS,
    }


def ask(entry: Entry, task: Task) -> dict[str, Any]:
    """Ask one engine for one decision. Ours is given the packet itself, and makes of it what the others are handed."""
    if entry.contender is not OURS:
        return entry.process.ask(task.request, timeout_s=TIMEOUT_S)
    packet = base64.b64encode(pickle.dumps(task.packet)).decode()
    request = {"packet": packet, "tokens_max": TOKENS_MAX, "timeout_ms": int(TIMEOUT_S * 1000)}
    return entry.process.ask(request, timeout_s=TIMEOUT_S)


def chosen_tasks(
    ours: Entry, candidates: Sequence[Task], count: int, wanted: Callable[[str], bool]
) -> tuple[list[Task], list[dict[str, Any]]]:
    """Return the tasks about which our engine decides as `wanted`, then others where these are too few; and its answers."""
    answers: list[tuple[bool, Task, dict[str, Any]]] = []
    for task in candidates:
        answer = ask(ours, task)
        answers.append((wanted(_action(answer.get("text", ""))), task, answer))
        if sum(fits for fits, _, _ in answers) == count:
            break
    answers.sort(key=lambda found: not found[0])  # stable: in the order of the queue
    return [task for _, task, _ in answers[:count]], [answer for _, _, answer in answers[:count]]


def measure(entries: Sequence[Entry], tasks: dict[str, list[Task]]) -> None:
    """Ask every engine about every packet, in turn; the first WARM_UP of each kind are not counted."""
    for kind, of_kind in tasks.items():
        for number, task in enumerate(of_kind):
            for entry in _in_turn(entries, number):
                answer = ask(entry, task)
                if number >= WARM_UP:
                    entry.tallies[kind].add(task, answer)


def _in_turn(entries: Sequence[Entry], number: int) -> Iterator[Entry]:
    """Yield those in the run; each time another is the first."""
    living = [entry for entry in entries if entry.in_the_run]
    return iter(living[number % len(living) :] + living[: number % len(living)])


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a kind must cost by its passes alone: the shapes of the passes, and the measured cost of each shape."""

    kind: str
    passes: int
    read_tokens: int
    opening_tokens: int
    tail_at_token: int
    decision_tokens: int

    @property
    def later_tokens(self) -> int:
        """Tokens of each pass of ours after the first, on average: a choice and what it forces."""
        return max(1, round((self.tail_at_token - self.opening_tokens) / max(1, self.passes - 1)))

    def shapes(self) -> tuple[int, ...]:
        return (self.read_tokens + self.opening_tokens, self.read_tokens, self.later_tokens, 1)

    def ms(self, cost: dict[int, float]) -> dict[str, float]:
        first, read, later, single = (cost[shape] for shape in self.shapes())
        return {
            "ours": round(first + (self.passes - 1) * later, 2),
            "token_by_token": round(read + self.decision_tokens * single, 2),
        }


def predict(kind: str, task: Task, answer: dict[str, Any], backend: LlamaBackend) -> Prediction:
    data = answer["text"].encode()
    tail = data.index(TAIL)
    return Prediction(
        kind,
        answer["passes"],
        len(task.request["tokens"]) - task.request["tokens_static"],
        len(backend.tokenize(OPENING, special=False)),
        len(backend.tokenize(data[:tail], special=False)),
        len(backend.tokenize(data, special=False)),
    )


def costs(ours: Entry, task: Task, shapes: set[int]) -> dict[int, float]:
    """Return what one pass of each shape costs here, in milliseconds, behind the rest of the prompt."""
    tokens = task.request["tokens"]
    asked = {shape: min(shape, len(tokens) - 1) for shape in sorted(shapes)}
    return {
        shape: ours.process.ask({"tokens": tokens, "pass_tokens": of}, timeout_s=TIMEOUT_S)["pass_ms"]
        for shape, of in asked.items()
    }


def row(entry: Entry, ours: Entry) -> dict[str, Any]:
    """Return what is reported of one engine."""
    found: dict[str, Any] = {"name": entry.contender.name, "version": entry.process.versions}
    for kind, prefix in (("fixed", ""), ("digits", "digits_")):
        tally = entry.tallies[kind]
        found[f"{prefix}ms_p50"] = tally.ms_p50
        found[f"{prefix}ms"] = summary(tally.ms) if tally.ms else None
        found[f"{prefix}compile_ms_p50"] = summary(tally.compile_ms)["p50"] if tally.compile_ms else None
        found[f"{prefix}decided"] = dict(sorted(tally.decided.items()))
        pairs = zip(tally.texts, ours.tallies[kind].texts, strict=False)
        found[f"{prefix}same_as_ours"] = sum(mine is not None and mine == other for mine, other in pairs)
    refunds = entry.tallies["digits"].refund_ms
    found["digits_refund_ms_p50"] = summary(refunds)["p50"] if refunds else None
    tallies = entry.tallies.values()
    found["violations"] = sum(tally.violations for tally in tallies)
    found["errors"] = sum(tally.errors for tally in tallies)
    errors = (tally.first_error for tally in tallies if tally.first_error)
    found["notes"] = entry.process.missing or entry.process.failed or next(errors, "") or entry.process.notes
    return found


def speedups(rows: Sequence[dict[str, Any]], ours: Entry) -> dict[str, float | None]:
    """Return how many times quicker ours was, by the medians: over the quickest peer, violations or not, and by name."""
    fixed, digits = (ours.tallies[kind].ms_p50 for kind in KINDS)

    def over(prefix: str, key: str, mine: float | None) -> float | None:
        found = [r[key] for r in rows if r["name"].startswith(prefix) and r[key] is not None]
        return round(min(found) / mine, 2) if found and mine else None

    return {
        "speedup_over_fastest": over("", "ms_p50", fixed),
        "speedup_digits": over("", "digits_ms_p50", digits),
        "speedup_over_outlines_llamacpp": over("outlines-llamacpp", "ms_p50", fixed),
        "speedup_digits_over_outlines_llamacpp": over("outlines-llamacpp", "digits_ms_p50", digits),
        "speedup_over_llamacpp_grammar": over("llamacpp-grammar", "ms_p50", fixed),
        "speedup_digits_over_llamacpp_grammar": over("llamacpp-grammar", "digits_ms_p50", digits),
    }


def run(
    folder: Path,
    model: Path,
    peers: Sequence[Contender],
    count: int,
    *,
    overlays: Path = OVERLAYS,
    threads: int,
    say: Say = print,
) -> Report:
    """Measure `count` decisions of each kind by each engine. `folder` is where the airline of the packets is made."""
    with ExitStack() as opened:
        backend = LlamaBackend(model, threads=threads)
        opened.callback(backend.close)
        entries = [_start(opened, contender, folder, model, overlays, threads) for contender in (OURS, *peers)]
        ours = entries[0]
        for entry in entries:
            if entry.process.missing or entry.process.failed:
                say(f"{entry.contender.name}: {entry.process.missing or entry.process.failed}")
        if ours.process.missing or ours.process.failed:
            raise UsageError("our own engine did not start", hint=ours.process.missing or ours.process.failed)
        if not any(entry.in_the_run for entry in entries[1:]):
            raise UsageError("none of these peers is installed", hint="make peers")
        tasks, predicted = _prepare(ours, folder, backend, count + WARM_UP, say)
        measure(entries, tasks)
        rows = [row(entry, ours) for entry in entries]
        return {
            "benchmark": "peers",
            **machine(),
            "threads": threads,
            "n": count,
            "model": {"name": backend.name, "sha256": backend.fingerprint},
            "versions": versions("llama_cpp_python", "llguidance", "numpy"),
            "predicted_ms": predicted,
            "ours_ms_p50": rows[0]["ms_p50"],
            "ours_digits_ms_p50": rows[0]["digits_ms_p50"],
            **speedups(rows[1:], ours),
            "ours": rows[0],
            "peers": rows[1:],
        }


def _prepare(
    ours: Entry, folder: Path, backend: LlamaBackend, count: int, say: Callable[[str], None]
) -> tuple[dict[str, list[Task]], dict[str, dict[str, float]]]:
    """Choose the packets, and say what they must cost before anything is timed."""
    made = {"fixed": fixed_packets, "digits": digits_packets}
    wanted: dict[str, Callable[[str], bool]] = {"fixed": bool, "digits": REFUND.__eq__}
    tasks: dict[str, list[Task]] = {}
    predicted: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        candidates = tasks_of(made[kind](folder, count * CANDIDATES_PER_DECISION), backend)
        tasks[kind], answers = chosen_tasks(ours, candidates, count, wanted[kind])
        guess = predict(kind, tasks[kind][0], answers[0], backend)
        cost = costs(ours, tasks[kind][0], set(guess.shapes()))
        predicted[kind] = guess.ms(cost)
        say(
            f"{kind}: {guess.read_tokens} prompt tokens to read, a decision of {guess.decision_tokens}; ours needs "
            f"{guess.passes} passes, {predicted[kind]['ours']} ms; an engine that runs one for every token "
            f"{guess.decision_tokens + 1}, {predicted[kind]['token_by_token']} ms"
        )
    return tasks, predicted


def _start(opened: ExitStack, contender: Contender, folder: Path, model: Path, overlays: Path, threads: int) -> Entry:
    log = folder / f"{contender.name}.log"
    arguments = [str(model), str(threads), *contender.options]
    overlay = overlays / contender.overlay if contender.overlay else None
    process = PeerProcess(contender.module, arguments, log=log, overlay=overlay, timeout_s=START_TIMEOUT_S)
    opened.callback(process.close)
    return Entry(contender, process)


def _options(parser: Parser) -> None:
    known = [peer.name for peer in PEERS]
    where = "where peers' own versions of libraries lie"
    parser.add_argument("--n", type=whole_number(DECISIONS_MAX), default=DECISIONS, help="decisions of each kind")
    parser.add_argument("--only", type=names(known), default=known, help=f"peers, commas between: {', '.join(known)}")
    parser.add_argument("--model", type=existing, help="a GGUF file; left out: the embedded model as prepared here")
    parser.add_argument("--overlays", type=Path, default=OVERLAYS, help=where)


def _run(asked: argparse.Namespace, say: Say) -> Report:
    peers = [peer for peer in PEERS if peer.name in asked.only]
    threads = int(os.environ.get("SDS_THREADS") or os.cpu_count() or 1)
    model = weights_path(asked.model)
    with tempfile.TemporaryDirectory(prefix="sds-peers-") as folder:
        return run(Path(folder), model, peers, asked.n, overlays=asked.overlays, threads=threads, say=say)


def _show(report: Report) -> None:
    for found in (report["ours"], *report["peers"]):
        print(f"{found['name']:<34} {found['ms_p50']} ms  digits {found['digits_ms_p50']} ms")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
