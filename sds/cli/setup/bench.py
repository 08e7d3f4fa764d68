"""`sds bench`: run one benchmark in a process of its own. Its last line is one JSON document."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from sds.cli.common import JsonFlag, written
from sds.cli.render import echo
from sds.kernel.errors import UsageError

QUESTIONS = {
    "hotpath": "one decision, from event to durable receipt, by stage and over its floor",
    "gate": "the queue of any gate (--gate NAME_OR_PATH)",
    "readings": "one fitted reader, and one decision by policy (--gate NAME_OR_PATH)",
    "peers": "one decision, ours and that of every peer",
    "throughput": "decisions a second by the number asked for at once, ours and the best peer's",
    "grammar": "a packet with new bounds, ours and that of every grammar engine",
    "kernel": "drift check, verdict, durable verdict, and the rule of Cedar and dir-core",
    "service": "what HTTP adds to a decision, and a duplicate (--gate NAME_OR_PATH)",
    "scaling": "growth with the prompt, the alternatives, the contract and a ledger of a million entries",
    "store": "decisions a second of several processes on one record, PostgreSQL and SQLite, over bare commits",
    "gpu": "hot path and throughput on a CUDA device",
    "report": "one page of all documents that --save kept",
}

# `python -m`, except that Ctrl-C during the imports ends the process without a traceback
_START = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def _questions() -> str:
    return "The benchmark. " + "; ".join(f"{name}: {what}" for name, what in QUESTIONS.items()) + "."


def bench(
    context: typer.Context,
    question: Annotated[str, typer.Argument(help=_questions(), metavar="QUESTION")],
    as_json: JsonFlag = False,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", help="Also write the JSON document into this folder.", show_default=False, callback=written
        ),
    ] = None,
) -> None:
    """Run one benchmark. The machine must be idle: under other load the figures mean nothing.

    The benchmark takes more options: --n 5, --model FILE, --gate PATH; report takes --results FOLDER and --page FILE.
    `sds bench QUESTION -h` lists them.

    Example: sds bench kernel --json --save benchmarks/results
    """
    if question == "-h":
        echo(context.get_help())
        raise typer.Exit
    if question not in QUESTIONS:
        raise UsageError(f"there is no benchmark `{question}`", hint=f"choose one of: {', '.join(QUESTIONS)}")
    command = [sys.executable, "-c", _START, f"sds.benchmarks.{question}", *(["--json"] if as_json else [])]
    command += ["--save", str(save)] if save else []
    command += context.args  # the benchmark's own options, such as `--n 5`
    gentle = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches both processes: we end after the benchmark
    try:
        code = subprocess.run(command, check=False).returncode  # noqa: S603  our own module
    finally:
        signal.signal(signal.SIGINT, gentle)
    raise typer.Exit(code if code >= 0 else 128 - code)  # negative: a signal ended it
