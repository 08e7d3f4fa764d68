"""Measure how a decision's cost grows with what it grows with: `sds bench scaling --json`.

    durable_1m_over_1k   the durable verdict over a ledger of a million entries, over one of a thousand
    ledger               the same for every size: one record a size, asked in turn, so that all see the same disk
    prompt               a decision with one choice, by the tokens of the case's own text
    alternatives         the choice of a kind, by the number of kinds, greedy and exact
    contract             the pure verdict and a decision written without a model, by kinds, reasons of each, fields

Predicted before measuring. Ledger: every statement of a verdict goes through an index, so a thousand times the rows cost
one or two more pages of each tree, which are in memory: at most 1.1; a record that is read from end to end anywhere would
show as 10 and more. Prompt: linear from where arithmetic costs more than reading the weights; at this machine's rates,
said before each is timed. Alternatives: greedy as long as its passes, exact a pass or two more, with the tokens of all
alternatives in it. Contract: the verdict linear in kinds, the writing as long as what it writes, whatever the contract's size.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sds.benchmarks.kernel import durable_once, open_kernel
from sds.benchmarks.lib.measuring import Parser, Report, Say, existing, machine, main, summary, versions, whole_number
from sds.benchmarks.lib.weights import Weights, add_weights, weights_of
from sds.benchmarks.records import make_record
from sds.benchmarks.scaling_contract import contracts
from sds.benchmarks.scaling_model import alternatives, opened, prompt_lengths
from sds.models.openvino_.facts import OPENVINO

SIZES = (1_000, 10_000, 100_000, 1_000_000)
ENTRIES_MAX = 10_000_000
CASE_TOKENS = (50, 100, 200, 400, 800)
KINDS = (2, 4, 8, 16)
CONTRACTS = ((2, 2, 4), (4, 4, 16), (8, 8, 32), (16, 16, 64))  # kinds, reasons of each, fields
N, N_MAX = 500, 100_000
DECISIONS = 12
WARM_UP = 50


def ledger(folder: Path, sizes: Sequence[int], n: int) -> list[dict[str, Any]]:
    """Return one row a size: entries, and the durable verdict in microseconds."""
    entries = [make_record(folder / f"{size}.db", size) for size in sizes]
    kernels = [open_kernel(folder / f"{size}.db") for size in sizes]
    took: list[list[float]] = [[] for _ in sizes]
    for i in range(WARM_UP + n):
        for found, kernel in zip(took, kernels, strict=True):
            found.append(durable_once(kernel, i))
    for kernel in kernels:
        kernel.store.close()
    return [
        {"entries": held, "bytes": (folder / f"{size}.db").stat().st_size, "durable_us": summary(us[WARM_UP:])}
        for size, held, us in zip(sizes, entries, took, strict=True)
    ]


def run(
    folder: Path,
    weights: Weights,
    sizes: Sequence[int],
    n: int,
    decisions: int,
    say: Say,
) -> Report:
    with opened(weights) as backend:
        facts = weights.facts(backend.backend.fingerprint)
        prompts = prompt_lengths(backend, CASE_TOKENS, decisions, say)
        kinds = alternatives(backend, KINDS, decisions, say)
        sized = contracts(folder, backend.backend, CONTRACTS, n, say)
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


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
