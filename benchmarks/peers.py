"""Measure one decision, ours and that of every peer in its best mode: `sds bench peers --n 20`.

All engines have the same weights file, the same prompt tokens and the same language (each is given the packet's exact
regular expression or GBNF), and decode greedily. Each runs in a process of its own and is asked for one decision at a
time, in turn, so that all see the same machine. Every decision is about a new packet: new state, bounds, claim and
reference; so the cost of a grammar is part of what is measured. Each engine caches earlier prompts in its own way: most
keep the beginning that a prompt shares with the one before it, at least the contract's part. Ours and OpenVINO GenAI keep
sections or blocks of many prompts, so these two first decide the 64 packets (`EARLIER`) before them in the queue, as a gate
at work has. `recurring`: the number of packets whose recurring words had been read before. Ours runs in the library and the
data type that `sds models prepare` found quickest. Where nearly all of its products are in int8, `ours-bf16` or `ours-fp32`
multiplies the same weights unrounded: `..._same_type` are its ratios. Where the library is not llama.cpp, which most
peers run in, `ours-llamacpp` is ours in llama.cpp: its ratios compare the decoders, not the libraries.

`fixed` packets have no free digit. `digits` packets have an amount of four digits, and their prompt is changed: its mission
is to refund, and its form shows an amount. Ours is asked first and chooses the packets (`chosen_from`: how many it was
asked, and for how many it failed or decided otherwise). It reads ahead the numbers that a prompt shows, so that an amount
which is one of them (`amount_shown`) costs no pass of its own. This model mostly copies the first; one that makes up its own
numbers costs more (`passes`: the number of decisions, by passes).
What lies outside the envelope counts as a violation, what raised or ran out of time as an error; times are of all that was
written, violations included. Engines spell alike and still choose differently: an engine that denies where ours refunds
writes no digits, so its time flatters it. An engine that has taken 30 s (`PATIENCE_S`) over packets of a kind is asked no
more of them once it was asked 8 (`DECISIONS_MIN`); ratios are over the packets that both decided.
"""

from __future__ import annotations

import argparse
import base64
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from sds.benchmarks.lib.floor import TIMEOUT_S, Prediction
from sds.benchmarks.lib.measuring import Parser, Report, Say, machine, main, names, summary, versions, whole_number
from sds.benchmarks.lib.packets import EARLIER, REFUND, digits_packets, fixed_packets, recurring
from sds.benchmarks.lib.process import PeerProcess
from sds.benchmarks.lib.weights import Weights, add_weights, vocabulary, weights_of
from sds.benchmarks.peer.contenders import OVERLAYS, PEERS, Contender, ours_with
from sds.benchmarks.peer.outcomes import KINDS, PeerOutcomes, Task, action_of, speedups
from sds.engines.factory import cores
from sds.engines.text import END_TOKENS, grammar_of
from sds.grammars.emit import gbnf
from sds.grammars.language import language
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import UsageError
from sds.models.openvino_.facts import OPENVINO
from sds.models.tokenizer.tokenizer import ModelTokenizer, prompt_sections

WARM_UP = 2
DECISIONS = 40
DECISIONS_MAX = 1_000
CANDIDATES_PER_DECISION = 4
TOKENS_MAX = 2_048


@dataclass
class Entry:
    """One engine in the run, and what it did with the packets of each kind."""

    contender: Contender
    process: PeerProcess
    outcomes: dict[str, PeerOutcomes] = field(default_factory=lambda: {kind: PeerOutcomes() for kind in KINDS})

    @property
    def in_the_run(self) -> bool:
        return not self.process.missing  # one that died stays in: each answer that does not come is an error


@dataclass(frozen=True, slots=True)
class Work:
    """The packets of one kind: those to measure, and those that came before them in the queue."""

    earlier: list[Task]
    tasks: list[Task]

    @property
    def recurring(self) -> int:
        """The number of measured packets whose recurring words were read for an earlier packet."""
        seen = [recurring(task.packet) for task in [*self.earlier, *self.tasks]]
        first = len(self.earlier) + WARM_UP
        return sum(seen[n] in seen[:n] for n in range(first, len(seen)))


def tasks_of(packets: Sequence[DecisionPacket], words: ModelTokenizer) -> list[Task]:
    return [Task(packet, _request(packet, words)) for packet in packets]


def _request(packet: DecisionPacket, words: ModelTokenizer) -> dict[str, Any]:
    said = language(packet.envelope, packet.snapshot.id)
    grammar = grammar_of(said, "regex")
    static, recurs, varying = packet.sections
    frame, sections = words.frame(), prompt_sections(words, static, recurs, varying)
    return {
        "tokens": [token for section in sections for token in section],
        "tokens_static": len(sections[0]),
        "tokens_kept": sum(map(len, sections[:-1])),
        "text": f"{frame.before_system}{static}{frame.between}{recurs}{varying}{frame.after_user}",
        "regex": grammar.text,
        "gbnf": gbnf.to_gbnf(said),
        "tokens_max": grammar.bytes_max + END_TOKENS,
    }


def ask(entry: Entry, task: Task, *, shape: bool = False) -> dict[str, Any]:
    """Ask one engine for one decision. Ours is given the packet itself, and makes prompt and language from it. With `shape`
    its answer also has the tokens of each pass.
    """
    if not entry.contender.is_ours:
        return entry.process.ask(task.request, timeout_s=TIMEOUT_S)
    packet = base64.b64encode(pickle.dumps(task.packet)).decode()
    request = {"packet": packet, "tokens_max": TOKENS_MAX, "timeout_ms": int(TIMEOUT_S * 1000), "shape": shape}
    return entry.process.ask(request, timeout_s=TIMEOUT_S)


def chosen_tasks(
    ours: Entry, candidates: Sequence[Task], count: int, wanted: Callable[[str], bool]
) -> tuple[list[Task], dict[str, int]]:
    """Return `count` tasks that our engine decides as `wanted`, then others where these are too few; and how many it was
    asked, failed, and decided otherwise.
    """
    answers: list[tuple[bool, Task]] = []
    failed = 0
    for task in candidates:
        answer = ask(ours, task)
        failed += "error" in answer
        answers.append((wanted(action_of(answer.get("text", ""))), task))
        if sum(fits for fits, _ in answers) == count:
            break
    otherwise = sum(not fits for fits, _ in answers) - failed
    answers.sort(key=lambda found: not found[0])  # stable: in the order of the queue
    return [task for _, task in answers[:count]], {"asked": len(answers), "failed": failed, "otherwise": otherwise}


def measure(entries: Sequence[Entry], work: Mapping[str, Work]) -> None:
    """Ask every engine about every packet, in turn; the first WARM_UP of each kind are not counted."""
    for kind, of_kind in work.items():
        for entry in (entry for entry in entries if entry.contender.keeps_many and entry.in_the_run):
            for task in of_kind.earlier:
                ask(entry, task)
        for number, task in enumerate(of_kind.tasks):
            for entry in _in_turn([entry for entry in entries if not entry.outcomes[kind].is_enough], number):
                began = time.perf_counter()
                answer = ask(entry, task)
                if number >= WARM_UP:
                    entry.outcomes[kind].add(task, answer, time.perf_counter() - began)


def _in_turn(entries: Sequence[Entry], number: int) -> list[Entry]:
    """Return the engines in the run, in a random order that depends on `number` alone."""
    living = [entry for entry in entries if entry.in_the_run]
    Random(number).shuffle(living)  # noqa: S311  so that no engine always follows the same one
    return living


def row(entry: Entry, ours: Entry) -> dict[str, Any]:
    """Return one engine's row of the document."""
    found: dict[str, Any] = {"name": entry.contender.name, "version": entry.process.versions}
    for kind, prefix in (("fixed", ""), ("digits", "digits_")):
        of_kind = entry.outcomes[kind]
        found[f"{prefix}ms_p50"] = of_kind.ms_p50
        found[f"{prefix}ms"] = summary(of_kind.ms) if of_kind.ms else None
        found[f"{prefix}each_ms"] = [ms and round(ms, 2) for ms in of_kind.each_ms]
        found[f"{prefix}compile_ms_p50"] = summary(of_kind.compile_ms)["p50"] if of_kind.compile_ms else None
        found[f"{prefix}decided"] = dict(sorted(of_kind.decided.items()))
        pairs = zip(of_kind.texts, ours.outcomes[kind].texts, strict=False)
        found[f"{prefix}same_as_ours"] = sum(mine is not None and mine == other for mine, other in pairs)
    refunds = entry.outcomes["digits"].refund_ms
    found["digits_refund_ms_p50"] = summary(refunds)["p50"] if refunds else None
    outcomes = entry.outcomes.values()
    found["violations"] = sum(of_kind.violations for of_kind in outcomes)
    found["errors"] = sum(of_kind.errors for of_kind in outcomes)
    errors = (of_kind.first_error for of_kind in outcomes if of_kind.first_error)
    found["notes"] = entry.process.missing or entry.process.failed or next(errors, "") or entry.process.notes
    return found


def run(
    folder: Path,
    weights: Weights,
    peers: Sequence[Contender],
    count: int,
    *,
    overlays: Path = OVERLAYS,
    threads: int,
    say: Say = print,
) -> Report:
    """Measure `count` decisions of each kind by each engine. `folder`: for the packets' world and the engines' logs."""
    with ExitStack() as opened:

        def started(contender: Contender) -> Entry:
            log = folder / f"{contender.name}.log"
            return Entry(contender, contender.start(opened, weights.path, threads, log=log, overlays=overlays))

        words = opened.enter_context(vocabulary(weights.path))
        different = dict.fromkeys(of_ours := ours_with(weights))
        own = [started(contender) for contender in different]
        others = [started(contender) for contender in peers]
        _check_ours(own)
        _check_theirs(others, say)
        work, chosen_from, predicted = _prepare(own, folder, words, count + WARM_UP, say)
        for entry in own:  # started again, for they have read the packets that are measured
            entry.process.close()
        own = [started(contender) for contender in different]
        _check_ours(own)
        measure([*own, *others], work)
        chosen = {"chosen_from": chosen_from, "predicted_ms": predicted}
        return _document(weights, threads, count, work, own, others, of_ours) | chosen


def _document(
    weights: Weights,
    threads: int,
    count: int,
    work: Mapping[str, Work],
    own: Sequence[Entry],
    others: Sequence[Entry],
    of_ours: Sequence[Contender],
) -> Report:
    """Return the document. `of_ours`: ours as it runs, in the peers' kind of numbers, and on llama.cpp."""
    ours, *alike = (row(entry, own[0]) for entry in own)
    outcomes = {entry.contender: entry.outcomes for entry in own}
    theirs = {entry.contender.name: entry.outcomes for entry in others}
    return {
        "benchmark": "peers",
        **machine(),
        "threads": threads,
        "n": count,
        "model": weights.facts(),
        "versions": versions("llama_cpp_python", OPENVINO.distribution, "llguidance", "numpy"),
        "recurring": {kind: of_kind.recurring for kind, of_kind in work.items()},
        "passes": {kind: dict(sorted(own[0].outcomes[kind].passes.items())) for kind in KINDS},
        "amount_shown": own[0].outcomes["digits"].amount_shown,
        "ours_ms_p50": ours["ms_p50"],
        "ours_digits_ms_p50": ours["digits_ms_p50"],
        **speedups(theirs, *(outcomes[contender] for contender in of_ours)),
        "ours": ours,
        "ours_besides": alike,
        "peers": [row(entry, own[0]) for entry in others],
    }


def _check_ours(own: Sequence[Entry]) -> None:
    """Raise UsageError where one of ours did not start."""
    for entry in own:
        if why := entry.process.missing or entry.process.failed:
            raise UsageError("our own engine did not start", hint=why)


def _check_theirs(others: Sequence[Entry], say: Say) -> None:
    """Report which peers did not start. Raises UsageError where none did."""
    for entry in others:
        if why := entry.process.missing or entry.process.failed:
            say(f"{entry.contender.name}: {why}")
    if not any(entry.in_the_run for entry in others):
        raise UsageError("none of these peers is installed", hint="make peers")


def _prepare(
    own: Sequence[Entry], folder: Path, words: ModelTokenizer, count: int, say: Say
) -> tuple[dict[str, Work], dict[str, dict[str, int]], dict[str, dict[str, dict[str, float]]]]:
    """Choose the packets, and predict their times before anything is timed, by kind and by what ours runs in."""
    chosen_from: dict[str, dict[str, int]] = {}
    made = {"fixed": fixed_packets, "digits": digits_packets}
    wanted: dict[str, Callable[[str], bool]] = {"fixed": bool, "digits": REFUND.__eq__}
    work: dict[str, Work] = {}
    predicted: dict[str, dict[str, dict[str, float]]] = {}
    for kind in KINDS:
        candidates = tasks_of(made[kind](folder, EARLIER + count * CANDIDATES_PER_DECISION), words)
        chosen, chosen_from[kind] = chosen_tasks(own[0], candidates[EARLIER:], count, wanted[kind])
        work[kind] = Work(candidates[:EARLIER], chosen)
        predicted[kind] = {}
        for entry in own:
            library = " ".join(entry.contender.options)
            guess = Prediction(chosen[0].request, ask(entry, chosen[0], shape=True), words)
            predicted[kind][library] = ms = guess.ms(entry.process)
            say(
                f"{kind}, {library}: {guess.read_tokens} prompt tokens to read, a decision of {guess.decision_tokens}; "
                f"ours needs passes of {guess.passes} tokens, {ms['ours']} ms; an engine that runs one for every token "
                f"{guess.decision_tokens + 1}, {ms['token_by_token']} ms"
            )
    return work, chosen_from, predicted


def _options(parser: Parser) -> None:
    known = [peer.name for peer in PEERS]
    where = "where peers' own versions of libraries lie"
    parser.add_argument("--n", type=whole_number(DECISIONS_MAX), default=DECISIONS, help="decisions of each kind")
    parser.add_argument("--only", type=names(known), default=known, help=f"peers, commas between: {', '.join(known)}")
    add_weights(parser)
    parser.add_argument("--overlays", type=Path, default=OVERLAYS, help=where)


def _run(asked: argparse.Namespace, say: Say) -> Report:
    peers = [peer for peer in PEERS if peer.name in asked.only]
    threads = cores()
    weights = weights_of(asked)
    with tempfile.TemporaryDirectory(prefix="sds-peers-") as folder:
        return run(Path(folder), weights, peers, asked.n, overlays=asked.overlays, threads=threads, say=say)


def _show(report: Report) -> None:
    for found in (report["ours"], *report["ours_besides"], *report["peers"]):
        print(f"{found['name']:<34} {found['ms_p50']} ms  digits {found['digits_ms_p50']} ms")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
