"""Measure how a decision's cost grows with ledger, prompt, alternatives and contract: `sds bench scaling --json`.

    durable_1m_over_1k   the durable verdict with a ledger of a million entries, over that with a thousand
    ledger               the same for every size: one record a size, in turn, so that all see the same disk
    prompt               a decision with one choice, by the tokens of the case's own text
    alternatives         the choice of a kind, by the number of kinds, greedy and exact
    contract             the pure verdict and a decision written without a model, by kinds, reasons of each, fields

Predicted before measuring. Ledger: every statement of a verdict goes through an index, so a thousand times the rows cost
one or two more pages of each tree, which are in memory: at most 1.1; a record that is read from end to end anywhere would
show as 10 and more. Prompt: linear once arithmetic costs more than reading the weights; each time is predicted from this
machine's rates. Alternatives: greedy takes as long as its passes, exact a pass or two more, over the tokens of all
alternatives. Contract: the verdict is linear in kinds; writing takes time by what is written, whatever the contract's size.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

from sds.benchmarks.kernel import accepted, durable_once, open_kernel, pure_verdict
from sds.benchmarks.lib.floor import Device, Recorded, device
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
from sds.benchmarks.lib.weights import Weights, add_weights, weights_of
from sds.decoding.decoder import Mode, deciding
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.grammars.tokens.tokenizer import Tokenizer
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import DENY, DecisionEnvelope, KindBound, envelope_of
from sds.kernel.envelope.state import StateRead
from sds.kernel.flow import intake
from sds.kernel.storage.ledger import entry_hash
from sds.models.openvino_.facts import OPENVINO
from sds.models.protocol import Backend
from sds.models.tokenizer.tokenizer import prompt_sections

SIZES = (1_000, 10_000, 100_000, 1_000_000)
ENTRIES_MAX = 10_000_000
CASE_TOKENS = (50, 100, 200, 400, 800)
KINDS = (2, 4, 8, 16)
CONTRACTS = ((2, 2, 4), (4, 4, 16), (8, 8, 32), (16, 16, 64))  # kinds, reasons of each, fields
N, N_MAX = 500, 100_000
DECISIONS = 12
WARM_UP = 50
FORKS_MAX = 64
HI_MINOR = 50_000
KINDS_CASE_TOKENS = 100
MODES: tuple[Mode, Mode] = ("greedy", "exact")
TOKENS_MAX = 2_048
STATIC = (
    "You decide claims of airline passengers. Compensate a long delay or a cancellation that the airline caused. "
    "Deny what extraordinary circumstances caused: severe weather, strikes, security risks. Escalate when in doubt."
)
CASE = "cancelled no, arrival delay 215, weather clear. Claim: my flight came four hours late and nobody told me why. "
NAMES = (  # of kinds, besides ESCALATE
    *(DENY, "COMPENSATE", "REFUND_TICKET", "VOUCHER", "REBOOK", "UPGRADE", "MEAL", "HOTEL", "TAXI", "APOLOGY", "MILES"),
    *("LOUNGE", "BAGGAGE", "REPAY_FEE", "CREDIT"),
)
CONTRACTS_PREDICTED = (
    "predicted 8 us a kind for the verdict; a decision that does not grow; a grammar that grows with kinds x reasons"
)
Rows = list[dict[str, Any]]
TEMPLATES = 250
COPIED_AT_ONCE = 20  # copies of all templates in one transaction
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


def ledger(folder: Path, sizes: Sequence[int], n: int) -> Rows:
    """Return one row a size: entries, and the durable verdict in microseconds."""
    entries = [make_record(folder / f"{size}.db", size) for size in sizes]
    kernels = [open_kernel(folder / f"{size}.db") for size in sizes]
    took = [[durable_once(kernel, i) for kernel in kernels] for i in range(WARM_UP + n)][WARM_UP:]
    for kernel in kernels:
        kernel.store.close()
    return [
        {"entries": held, "bytes": (folder / f"{size}.db").stat().st_size, "durable_us": summary(us)}
        for size, held, us in zip(sizes, entries, zip(*took, strict=True), strict=True)
    ]


class Model:
    """One backend, a compiler, and the least time of passes at this machine's rates (`lib/floor.py`)."""

    def __init__(self, backend: Backend, rates: Device, size: tuple[int, int]) -> None:
        self.backend, self._recorded = backend, Recorded(backend)
        self._rates, self._size = rates, size
        self._compiler, self._refs = GrammarCompiler(backend), count()
        self._closing = backend.tokenize(backend.frame().after_user.encode(), special=True)
        self._static = prompt_sections(backend, STATIC, CASE)[0]
        self._case = backend.tokenize(CASE.encode(), special=False)

    def prompt(self, case_tokens: int) -> list[list[int]]:
        """Return a prompt's sections, with `case_tokens` tokens in the case's own."""
        own = case_tokens - len(self._closing)
        return [self._static, (self._case * (own // len(self._case) + 1))[:own] + self._closing]

    def decide(self, sections: Sequence[Sequence[int]], envelope: DecisionEnvelope, mode: Mode = "greedy") -> float:
        """Return the time of one decision in milliseconds; its context reference is new."""
        self._recorded.clear()
        began = time.perf_counter()
        matcher = self._compiler.matcher(envelope, f"{next(self._refs):064x}")
        backend = cast("Backend", self._recorded)
        with closing(deciding(backend, 0, sections, matcher, tokens_max=TOKENS_MAX, mode=mode)) as run:
            rows = next(run)
            with suppress(StopIteration):
                while True:
                    rows = run.send(backend.run(rows))
        return (time.perf_counter() - began) * 1000

    def predict(
        self, sections: Sequence[Sequence[int]], envelope: DecisionEnvelope, mode: Mode = "greedy"
    ) -> dict[str, Any]:
        """Decide once untimed; return the tokens of its passes and the least time of these."""
        self.decide(sections, envelope, mode)
        tokens = self._recorded.tokens
        least = sum(self._rates.pass_ms(*self._size, of_pass) for of_pass in tokens)
        return {"tokens_of_passes": tokens, "predicted_ms": round(least, 2)}


@contextmanager
def opened(weights: Weights) -> Iterator[Model]:
    with closing(weights.open()) as backend:
        yield Model(backend, device(weights), weights.size())


def prompt_lengths(model: Model, lengths: Sequence[int], n: int, say: Say) -> Rows:
    """Return one row a length of the case's own text; a denial or an escalation: one choice."""
    envelope = _envelope(2)
    prompts = [model.prompt(length) for length in lengths]
    rows = [{"case_tokens": length} | model.predict(p, envelope) for length, p in zip(lengths, prompts, strict=True)]
    for row in rows:
        say(f"a case of {row['case_tokens']} tokens: predicted {row['predicted_ms']} ms")
    took = [[model.decide(prompt, envelope) for prompt in prompts] for _ in range(n)]
    return [row | {"decision_ms": summary(ms)} for row, ms in zip(rows, zip(*took, strict=True), strict=True)]


def alternatives(model: Model, sizes: Sequence[int], n: int, say: Say) -> Rows:
    """Return one row a number of kinds, greedy and exact; the kind is the only choice."""
    prompt = model.prompt(KINDS_CASE_TOKENS)
    rows = Rows()
    for size in sizes:
        envelope = _envelope(size)
        found = {mode: model.predict(prompt, envelope, mode) for mode in MODES}
        said = ", ".join(f"{mode} {of_mode['predicted_ms']} ms" for mode, of_mode in found.items())
        say(f"{size} kinds: predicted {said}")
        took = [[model.decide(prompt, envelope, mode) for mode in MODES] for _ in range(n)]
        for of_mode, ms in zip(found.values(), zip(*took, strict=True), strict=True):
            of_mode["decision_ms"] = summary(ms)
        over = summary([exact / greedy for greedy, exact in took])["p50"]
        rows.append({"kinds": size, "exact_over_greedy": over, "greedy": found["greedy"], "exact": found["exact"]})
    return rows


def _envelope(kinds: int) -> DecisionEnvelope:
    return envelope_of([KindBound(name, ("REVIEWED",)) for name in NAMES[: kinds - 1]])


class _Fields:
    """A state source in which every key has the same state: every field is HI_MINOR."""

    def __init__(self, names: Sequence[str]) -> None:
        self._read = StateRead(dict.fromkeys(names, HI_MINOR), "1")

    def read(self, _key: str) -> StateRead | None:
        return self._read


def contract_of(kinds: int, reasons: int, paths: Sequence[str]) -> Contract:
    """Return a contract of `kinds` kinds, DENY among them; each of the others reads a field for condition and bound."""
    codes = tuple(f"CAUSE_{number}" for number in range(reasons))

    def kind(number: int) -> dict[str, Any]:
        path = paths[number % len(paths)]
        return {"reasons": codes, "when": f"{path} > 0", "params": {"amount": {"lo": "1", "hi": path, "scale": 2}}}

    spec = {f"KIND_{number}": kind(number) for number in range(kinds - 1)} | {DENY: {"reasons": codes}}
    head = {"gate": "scaling", "agent_id": "scaling-agent", "version": "1.0.0", "owner": "bench@example"}
    head |= {"effective_from": "2020-01-01", "mission": "Decide."}
    event, snapshot = {"id": "claim_id", "key": "ticket_id"}, dict.fromkeys(paths, "fixed(2)")
    said = {**head, "authority": tuple(spec), "event": event, "snapshot": snapshot, "kinds": spec}
    return Contract.model_validate(said)


def contracts(folder: Path, words: Tokenizer, size: tuple[int, int, int], n: int) -> dict[str, Any]:
    """Return a row: the times of the pure verdict, of writing a decision, and of the first writing, which compiles."""
    kinds, reasons, fields = size
    paths = [f"state.field_{number}" for number in range(fields)]
    contract, path = contract_of(kinds, reasons, paths), folder / f"{kinds}-{reasons}-{fields}.db"
    kernel = open_kernel(path, contract=contract, source=_Fields(paths))
    packet = kernel.preview(intake.read_event(kernel.contract, {"claim_id": "A", "ticket_id": "T"}))
    compiler = GrammarCompiler(words)
    write = partial(written, compiler, packet.envelope)
    made_us = timed_us(partial(write, packet.snapshot.id))
    data = write(packet.snapshot.id)
    writing = [timed_us(partial(write, f"{number:064x}")) for number in range(n)]
    found = {
        "kinds": kinds,
        "reasons": reasons,
        "fields": fields,
        "verdict_us": pure_verdict(kernel, packet, data, n),
        "walk_us": summary(writing),
        "plan_ms": round(made_us / 1000, 2),
    }
    kernel.store.close()
    return found


def written(compiler: GrammarCompiler, envelope: DecisionEnvelope, context_ref: str) -> bytes:
    """Write one decision without a model: at every choice point the last permitted token."""
    matcher = compiler.matcher(envelope, context_ref)
    for _ in range(FORKS_MAX):
        matcher.accept_forced()
        if matcher.finished:
            return matcher.data
        matcher.accept(int(matcher.choice_point().tokens[-1]))
    raise SystemExit("the benchmark's own decision does not end")


def run(folder: Path, weights: Weights, sizes: Sequence[int], n: int, decisions: int, say: Say) -> Report:
    with opened(weights) as model:
        facts = weights.facts(model.backend.fingerprint)
        prompts = prompt_lengths(model, CASE_TOKENS, decisions, say)
        kinds = alternatives(model, KINDS, decisions, say)
        say(f"contracts: {CONTRACTS_PREDICTED}")
        sized = [contracts(folder, model.backend, size, n) for size in CONTRACTS]
    say(f"ledgers of {', '.join(map(str, sizes))} entries: predicted 1.1 between the last and the first")
    rows = ledger(folder, sizes, n)
    least, most = rows[0]["durable_us"]["p50"], rows[-1]["durable_us"]["p50"]
    return {
        "benchmark": "scaling",
        **machine(),
        "n": n,
        "decisions": decisions,
        "model": facts,
        "versions": versions("llama-cpp-python", OPENVINO.distribution) | {"sqlite": sqlite3.sqlite_version},
        "durable_1m_over_1k": round(most / least, 3),
        "ledger": rows,
        "prompt": prompts,
        "alternatives": kinds,
        "contract": sized,
    }


def _options(parser: Parser) -> None:
    parser.add_argument("--n", type=whole_number(N_MAX), default=N, help="verdicts of each size")
    parser.add_argument("--decisions", type=whole_number(N_MAX), default=DECISIONS, help="decisions of each size")
    parser.add_argument("--sizes", type=whole_number(ENTRIES_MAX), nargs="+", default=SIZES, help="ledger entries")
    add_weights(parser)
    parser.add_argument("--folder", type=existing, default=Path(), help="where to measure: the disk matters (3 GB)")


def _run(asked: argparse.Namespace, say: Say) -> Report:
    sizes = sorted(set(asked.sizes))
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix=".bench-") as folder:
        return run(Path(folder), weights_of(asked), sizes, asked.n, asked.decisions, say)


def _show(report: Report) -> None:
    for row in [*report["prompt"], *report["alternatives"], *report["contract"], *report["ledger"]]:
        print(row)


def make_record(path: Path, entries: int) -> int:
    """Write a record whose ledger has at least `entries` entries, of real decisions and copies; return how many it has.

    A copy has its own ids in every table, and its entries are chained to the ledger, so that trees, indices and file are as
    large as those of that many decisions. The record cannot be audited: a copy has the seals of its template.
    """
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


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
