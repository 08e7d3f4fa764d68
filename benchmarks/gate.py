"""Measure a gate's decisions over its own queue: latency from trigger to durable receipt, and their outcomes.

Any gate: `--gate refund`, or the path of one. Its queue is decided in a temporary folder. The first decision, for which
everything is read for the first time, is reported apart (`cold_ms`). Orders of a gate of your own are settled by a stand-in.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from sds.benchmarks.lib.measuring import Parser, Report, Say, existing, machine, main, whole_number
from sds.benchmarks.lib.orders import without_orders
from sds.definitions.definition import DEFAULT
from sds.engines.factory import open_engine
from sds.gates import runner
from sds.host.clock import now_ms

N, N_MAX = 100, 10_000


def run(gate: str, folder: Path, model: Path | None, n: int) -> Report:
    """Decide one event, then `n` more; return the document of these, with the first one's milliseconds."""
    definition = without_orders(gate)
    engine = open_engine(model, now_ms=now_ms)
    try:
        first, rest = (
            runner.run(definition, folder, limit=limit, engine=engine, on_decided=lambda _: None) for limit in (1, n)
        )
    finally:
        engine.close()
    kept = ("model", "decisions", "decided_by_model", "outcomes", "latency_ms", "agreement", "out_of_envelope")
    facts = {name: rest[name] for name in (*kept, "double_payouts", "record_faults")}
    return {
        "benchmark": "gate",
        **machine(),
        "gate": definition.name,
        "cold_ms": first["latency_ms"].get("max"),
        **facts,
    }


def _options(parser: Parser) -> None:
    parser.add_argument("--gate", default=DEFAULT, help="which gate: its name, or its path")
    parser.add_argument("--n", type=whole_number(N_MAX), default=N, help="how many decisions")
    parser.add_argument(
        "--model", type=existing, help="a GGUF file or a checkpoint folder; without it, the embedded model"
    )
    parser.add_argument("--folder", type=existing, default=Path(), help="where to measure: the disk matters")


def _run(asked: argparse.Namespace, _say: Say) -> Report:
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix=".bench-") as folder:
        return run(asked.gate, Path(folder), asked.model, asked.n)


def _show(report: Report) -> None:
    print(
        f"{report['gate']}: {report['decisions']} decisions, latency {report['latency_ms']} ms, cold {report['cold_ms']} ms"
    )
    print(f"outcomes: {report['outcomes']}")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
