"""What the commands `fit` and `eval` share: a gate's labels, a progress bar, tables of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sds.cli.render import Console
from sds.definitions.definition import GateDefinition, LabelledCase
from sds.host.paths import gate_home, make_private
from sds.judgement.evaluation.page import number
from sds.judgement.labels import read_labels
from sds.kernel.contract.schema import Contract
from sds.kernel.errors import UsageError

if TYPE_CHECKING:
    from sds.judgement.fitting import Progress as Report

LabelsPath = Annotated[
    Path | None,
    typer.Option(
        "--labels",
        help="Labels, one JSON object a line: a file, or a folder with train.jsonl, calibrate.jsonl, test.jsonl. Default: the gate's.",
        show_default=False,
    ),
]


def labels_of(gate: GateDefinition, contract: Contract, path: Path | None) -> list[LabelledCase]:
    """Return the labels at `path`, else those that come with the gate. Raises UsageError."""
    if not contract.policy:
        raise UsageError(
            f"the contract of gate `{contract.gate}` has no readings",
            hint="judgement.md of the documentation says how to declare readings and a policy",
        )
    if path is not None:
        return read_labels(contract, path)
    folder = gate_home(gate.name)
    make_private(folder)
    labels = gate.labels(folder)
    if not labels:
        raise UsageError(
            f"gate `{gate.name}` has no labels of its own", hint=f"--labels FILE.jsonl; sds label {gate.argument}"
        )
    return labels


@contextmanager
def progress_bar() -> Iterator[Report]:
    """Show a bar for each task, where standard error is a terminal; yield the function that reports progress."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = dict[str, TaskID]()

        def report(done: int, total: int, what: str) -> None:
            head = what.rpartition(":")[0] or what  # one bar for a fit that counts several things
            if head not in tasks:
                tasks[head] = progress.add_task(what, total=total)
            progress.update(tasks[head], completed=done, total=total, description=what)

        yield report


def table_lines(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table, its first column aligned left and the others right."""
    cells = [[number(each) for each in row] for row in [head, *rows]]
    widths = [max(len(row[place]) for row in cells) for place in range(len(head))]
    return [
        "  ".join(cell.ljust(width) if not place else cell.rjust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in cells
    ]  # fmt: skip
