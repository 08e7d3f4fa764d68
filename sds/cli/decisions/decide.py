"""`sds decide`, `retry`, `events`, `envelope`, `grammar`: decide one event, or show its envelope and its language."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Annotated

import typer
from rich.table import Table

from sds.cli.common import ChosenGate, EventFile, JsonFlag, OpenedGate, defined, open_store, read_event_text, whole_dfid
from sds.cli.engines import NO_OPTIONS, EngineOptions, opened_engine
from sds.cli.many import IdsFile, Report, for_each, ids_of
from sds.cli.render import Console, echo, number_range, print_json
from sds.definitions.definition import GateDefinition
from sds.gates.opening import preview_kernel
from sds.host.paths import gate_home, is_of_older_version
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.envelope import DecisionEnvelope, format_literal
from sds.kernel.errors import UsageError, WorldError
from sds.kernel.executor.wholeness import RECORD_BEHIND
from sds.kernel.flow import intake, undecided
from sds.kernel.flow.states import Answer

FORMATS = ("regex", "lark", "gbnf", "json-schema")
AGAIN_LATER = "decide the same event again later"


def decide(
    gate: ChosenGate,
    event: EventFile,
    options: EngineOptions = NO_OPTIONS,
    deadline_ms: Annotated[
        int | None, typer.Option("--deadline-ms", min=1, help="The deadline in milliseconds. Nothing is sent after it.")
    ] = None,
) -> None:
    """Decide one event; print the answer as JSON. The same event again prints the stored answer. Exit code 1: nobody has
    decided it, and it waits.

    Example: sds events refund | head -1 | sds decide refund --event -
    """
    definition = gate.find()
    text = read_event_text(event)
    from sds.gate import Gate  # noqa: PLC0415  imports the model's libraries

    folder = gate_home(definition.name)
    if not is_of_older_version(folder):  # opening raises its number: after the model, which may be refused
        with preview_kernel(definition, folder) as kernel:  # a stored answer needs no model
            known = kernel.known(intake.parse_event(kernel.contract, text))
        if known is not None and known.state != "ACTIVE":
            print_json(known.as_data())
            _refuse_undecided(known, definition, AGAIN_LATER)
            return
    with opened_engine(options, brief=True, gate=definition) as engine, Gate.load(definition, engine=engine) as opened:
        answer = opened.decide(text, deadline_ms=deadline_ms)
        print_json(answer.as_data())  # before `Gate` waits for a rationale
    _refuse_undecided(answer, definition, AGAIN_LATER)


def _refuse_undecided(answer: Answer, gate: GateDefinition, hint: str) -> None:
    """Raise WorldError where an answer says that nobody has decided the event."""
    if answer.retryable:
        why = answer.reason_code or answer.tag
        hint = gate.adoption if answer.tag == RECORD_BEHIND else hint
        raise WorldError(f"event `{answer.event_id}` was not decided: {why}", hint=hint, dfid=answer.dfid)


def retry(
    dfid: Annotated[
        list[str] | None,
        typer.Argument(help="The flow's id, as `sds flows --undecided` lists it.", metavar="DFID"),
    ] = None,
    file: IdsFile = None,
    gate: OpenedGate = "refund",
    options: EngineOptions = NO_OPTIONS,
) -> None:
    """Decide an undecided case again. Its flow ended without a decision. The answer is printed as JSON.

    Of several cases each has a line of its own. Exit code 1: a case still waits.

    Example: sds retry 550e8400-e29b-81d4-a716-446655440000
    """
    definition, dfids = defined(gate), ids_of(dfid, file, "DFID")
    from sds.gate import Gate  # noqa: PLC0415  imports the model's libraries

    one = file is None and len(dfids) == 1
    if not is_of_older_version(gate_home(definition.name)):  # refused before the model is opened
        with closing(open_store(definition.name)) as store:
            if one:
                undecided.refuse_unless_undecided(store, whole_dfid(store, dfids[0]))
    hint = f"sds flows --undecided{definition.option} lists what waits"
    with opened_engine(options, brief=True, gate=definition) as engine, Gate.load(definition, engine=engine) as opened:
        if not one:

            def again(each: str) -> Report:
                return opened.retry(whole_dfid(opened.store, each)).as_data(), ""

            for_each(dfids, again, as_json=True, is_done=lambda facts: not facts["retryable"], hint=hint)
            return
        answer = opened.retry(whole_dfid(opened.store, dfids[0]))
        print_json(answer.as_data())
    _refuse_undecided(answer, definition, hint)


def events(
    gate: ChosenGate, limit: Annotated[int, typer.Option("--limit", min=1, help="The maximum number of events.")] = 3
) -> None:
    """Print the queue's next undecided events. Each line is one JSON object.

    Example: sds events refund --limit 1 > event.json
    """
    definition = gate.find()
    folder = gate_home(definition.name)
    with preview_kernel(definition, folder) as kernel:
        known, name = undecided.settled_events(kernel.store, kernel.contract), kernel.contract.event.id
    waiting = [case.event for case in definition.cases(folder) if case.event.get(name) not in known]
    for line in waiting[:limit]:
        print_json(line)
    if not waiting:
        echo("no events: the whole queue is decided", err=True)


def envelope(gate: ChosenGate, event: EventFile, as_json: JsonFlag = False) -> None:
    """Show what may be decided about an event now. It shows kinds, exact bounds and reasons, and records nothing.

    Example: sds envelope refund --event event.json
    """
    packet = _preview(gate, event)
    if as_json:
        print_json({"hash": packet.envelope.hash, **packet.envelope.as_data(), "notes": packet.notes})
        return
    console = Console()
    console.print(_envelope_table(packet.envelope))
    for note in packet.notes:
        console.print(f"note: {note}", markup=False)


def grammar(
    gate: ChosenGate,
    event: EventFile,
    form: Annotated[str, typer.Option("--format", help="The form: regex, lark, gbnf or json-schema.")] = "regex",
) -> None:
    """Print the language of an event's envelope. It contains exactly what the model may write.

    Example: sds grammar refund --event event.json --format lark
    """
    if form not in FORMATS:
        raise UsageError(f"there is no format `{form}`", hint=f"choose one of: {', '.join(FORMATS)}")
    packet = _preview(gate, event)
    from sds.grammars.emit import json_schema  # noqa: PLC0415
    from sds.grammars.emit.gbnf import to_gbnf  # noqa: PLC0415
    from sds.grammars.language import Language, language  # noqa: PLC0415

    said = language(packet.envelope, packet.snapshot.id)
    if form == "json-schema":
        echo(json.dumps(json_schema.emit(said), indent=2))
    else:
        echo({"regex": Language.regex, "lark": Language.lark, "gbnf": to_gbnf}[form](said))


def _preview(gate: ChosenGate, event: str) -> DecisionPacket:
    definition, text = gate.find(), read_event_text(event)
    with preview_kernel(definition, gate_home(definition.name)) as kernel:
        return kernel.preview(intake.parse_event(kernel.contract, text))


def _envelope_table(permitted: DecisionEnvelope) -> Table:
    table = Table(title=f"decisions permitted now (envelope {permitted.hash[:12]})", title_justify="left")
    for heading in ("decision", "the model chooses", "the kernel fills in", "reasons"):
        table.add_column(heading, overflow="fold")
    for kind in permitted.kinds:
        table.add_row(
            kind.kind,
            ", ".join(number_range(name, bound) for name, bound in kind.params),
            ", ".join(f"{name} {format_literal(value, scale)}" for name, value, scale in kind.fills),
            "\n".join(kind.reasons),
        )
    return table
