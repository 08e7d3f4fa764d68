"""`sds label`: label cases at the terminal; `sds labels export`: print labels from what humans decided."""

from __future__ import annotations

import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sds.cli.common import ChosenGate, open_store, written
from sds.cli.render import Console, counted, echo, plain
from sds.definitions.definition import GateDefinition
from sds.host.input_files import read_bytes
from sds.host.paths import fitted_readers, gate_home, labels_path
from sds.kernel.canonical import seen_json
from sds.kernel.contract.compiler import parse_type, show
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.state import Fields, StateSource
from sds.kernel.errors import EventError, UsageError
from sds.kernel.flow.intake import parse_event
from sds.policy.distribution import SCORE
from sds.policy.judgement import open_judgement

if TYPE_CHECKING:
    from sds.judgement.labelling.queue import Asked
    from sds.models.readers.protocol import Reader


Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="The file to append to. Default: one in $SDS_HOME/labels.", show_default=False, callback=written
    ),
]
CasesFile = Annotated[
    Path | None,
    typer.Option("--cases", help="Events, one JSON object a line. Default: the gate's queue.", show_default=False),
]
ReadingName = Annotated[
    str | None, typer.Option("--reading", help="The reading. Default: the contract's first.", show_default=False)
]


def label(gate: ChosenGate, out: Out = None, cases: CasesFile = None, reading: ReadingName = None) -> None:
    """Label cases, one key each. Unfamiliar ones come first, then the least certain. Stop and continue at any time.

    Example: sds label refund --out labels.jsonl
    """
    definition = gate.find()
    contract = definition.load_contract()
    if not contract.readings:
        raise UsageError(
            f"the contract of gate `{definition.name}` has no readings",
            hint="judgement.md of the documentation says how to declare readings",
        )
    from sds.judgement.labelling import queue  # noqa: PLC0415

    name = reading or next(iter(contract.readings))
    values = queue.values_of(contract, name)
    path = out or labels_path(definition.name)
    given = None if cases is None else _events(contract, cases)
    file = queue.LabelFile(contract, path)
    with ExitStack() as opened:
        source = opened.enter_context(definition.opened_source(gate_home(definition.name)))
        asked = queue.unlabelled(contract, name, _cases(definition, contract, given, source), file.known())
        asked = queue.least_certain_first(contract, name, asked, _readers(definition, contract, opened))
        answers = dict(zip(queue.KEYS, values, strict=False))
        session = queue.Session(file, name, answers, _teller(contract, name, answers, values), _key)
        done = session.walk(asked)
    left = len(asked) - done
    echo(f"{counted(done, 'label')} added to {path}; {left} of these cases have none yet")


def _cases(
    gate: GateDefinition, contract: Contract, given: list[tuple[str, str]] | None, source: StateSource
) -> Iterator[Asked]:
    from sds.judgement.labelling.queue import Asked  # noqa: PLC0415

    if given is None:
        given = [contract_event(contract, case.event) for case in gate.cases(gate_home(gate.name))]
    for key, text in given:
        yield Asked(text, _state(source, key))


def contract_event(contract: Contract, event: Mapping[str, object]) -> tuple[str, str]:
    """Return the key and the text of an event of a queue."""
    return str(event.get(contract.event.key, "")), str(event.get(contract.event.evidence or "", ""))


def _events(contract: Contract, path: Path) -> list[tuple[str, str]]:
    """Return the key and the text of each event in a file. Raises UsageError with the line."""
    from sds.judgement.labels import FILE_BYTES_MAX  # noqa: PLC0415

    lines = read_bytes(path, FILE_BYTES_MAX).removeprefix(BOM_UTF8).splitlines()
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = parse_event(contract, line) if line.strip() else None
        except EventError as error:
            hint = error.hint or f"write each event as one line: sds events {contract.gate} > cases.jsonl"
            raise UsageError(f"{path}:{number}: {error}", hint=hint) from error
        if event is not None:
            events.append((event.key, event.evidence))
    return events


def _state(source: StateSource, key: str) -> Callable[[], Fields]:
    def state() -> Fields:
        read = source.read(key)
        return {} if read is None else read.fields

    return state


def _readers(gate: GateDefinition, contract: Contract, opened: ExitStack) -> Mapping[str, Reader]:
    folder = fitted_readers(gate.name, gate.readers)
    if folder is None or not folder.exists():
        return {}
    judgement = open_judgement(folder, contract)
    opened.callback(judgement.close)
    return judgement.readers


def _teller(
    contract: Contract, name: str, answers: Mapping[str, str], values: Mapping[str, str]
) -> Callable[[Asked, int, int], None]:
    console, spec = Console(highlight=False, markup=False), contract.readings[name]

    def tell(case: Asked, number: int, of: int) -> None:
        console.print(f"\n{number} of {of}  {spec.question}", style="bold")
        if case.text:
            console.print(f"  {plain(case.text)}")
        for path, value in case.state().items() if spec.score else ():
            shown = show(parse_type(path, contract.snapshot[path]), value) if path in contract.snapshot else value
            console.print(f"  {path}: {plain(shown)}")
        shares = case.shares or {}
        for key, value in answers.items():
            meant = values[value] if spec.score else f"{value}: {values[value]}"
            console.print(f"  {key}  {meant}" + (f"  {shares[value]:.3f}" if value in shares else ""))
        if SCORE in shares:
            console.print(f"  as it is read: {shares[SCORE]:.3f}")
        console.print("  s  skip   u  undo   q  quit")

    return tell


def _key() -> str:
    """Return the next key typed. Without a terminal: the first character of the next line, and `q` at the end of input."""
    if sys.stdin is not None and sys.stdin.isatty():
        return str(typer.getchar())
    line = sys.stdin.readline() if sys.stdin is not None else ""
    return line.strip()[:1] if line else "q"


def export(gate: ChosenGate) -> None:
    """Print the decisions of humans as labels. Each line is a JSON object for one escalated case.

    Example: sds labels export refund > labels.jsonl
    """
    definition = gate.find()
    contract = definition.load_contract()
    from sds.judgement.labelling.recorded import LeftOut, recorded_labels  # noqa: PLC0415
    from sds.judgement.labels import label_line  # noqa: PLC0415

    with closing(open_store(definition.name)) as store:
        each = None
        for each in recorded_labels(store, contract):
            if isinstance(each, LeftOut):
                echo(f"not exported: {each.dfid}: {each.why}", err=True)
            else:
                echo(seen_json(label_line(each, contract.gate)), nl=False)
        if each is None:
            echo("no labels: a label is made when a human resolves an escalated case", err=True)
