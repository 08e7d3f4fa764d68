"""`sds decide`, `sds retry`, `sds events`, `sds envelope`, `sds grammar`: one event, and what may be decided and said about it."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sds.cli.common import (
    EventFile,
    GateName,
    GateOption,
    JsonFlag,
    ModelPath,
    folder_of,
    open_store,
    print_json,
    read_event_text,
    whole_dfid,
)
from sds.cli.engines import (
    AsIs,
    BackendName,
    DeviceName,
    DtypeName,
    EngineKind,
    EnginesPath,
    LibraryName,
    ModeName,
    opened_engine,
)
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.bounds import format_literal
from sds.kernel.envelope.envelope import DecisionEnvelope
from sds.kernel.errors import UsageError
from sds.kernel.flow import intake, undecided

FORMATS = ("regex", "lark", "gbnf", "json-schema")


def add_to(app: typer.Typer) -> None:
    app.command("decide")(decide)
    app.command("events")(events)
    app.command("envelope")(envelope)
    app.command("grammar")(grammar)
    app.command("retry")(retry)


def decide(
    gate: GateName,
    event: EventFile,
    model: ModelPath = None,
    engine: EngineKind = None,
    backend: BackendName = None,
    library: LibraryName = None,
    device: DeviceName = None,
    dtype: DtypeName = None,
    mode: ModeName = None,
    as_is: AsIs = False,
    engines: EnginesPath = None,
) -> None:
    """Decide one event and print the answer as JSON. The same event again prints the stored answer.

    Example: sds events refund | head -1 | sds decide refund --event -
    """
    folder = folder_of(gate)
    text = read_event_text(event)
    from sds.gate import Gate  # noqa: PLC0415  the model's libraries load when a model is needed
    from sds.gates.refund import gate as desk  # noqa: PLC0415

    with desk.preview_kernel(folder) as kernel:  # what can be said without a model is said before one is opened
        known = intake.stored_answer(kernel.store, kernel.contract, intake.parse_event(kernel.contract, text))
    if known is not None:
        print_json(known.as_data())
        return
    with (
        opened_engine(
            model,
            engines,
            brief=True,
            engine=engine,
            backend=backend,
            library=library,
            device=device,
            dtype=dtype,
            mode=mode,
            as_is=as_is,
        ) as decides,
        Gate.load(gate, folder=folder, engine=decides) as opened,
    ):
        print_json(opened.decide(text).as_data())  # a rationale may follow: nobody waits for it


def retry(
    dfid: Annotated[str, typer.Argument(help="The flow's id, as `sds flows --undecided` shows it.", metavar="DFID")],
    gate: GateOption = "refund",
    model: ModelPath = None,
    engine: EngineKind = None,
    backend: BackendName = None,
    library: LibraryName = None,
    device: DeviceName = None,
    dtype: DtypeName = None,
    mode: ModeName = None,
    as_is: AsIs = False,
    engines: EnginesPath = None,
) -> None:
    """Decide the case of a flow that ended without a decision once more, and print the answer as JSON.

    Example: sds retry 550e8400-e29b-81d4-a716-446655440000
    """
    folder = folder_of(gate)
    from sds.gate import Gate  # noqa: PLC0415  the model's libraries load when a model is needed

    with closing(open_store(gate)) as store:
        dfid = whole_dfid(store, dfid)
        undecided.refuse_unless_undecided(store, dfid)
    options: dict[str, Any] = {
        "engine": engine,
        "backend": backend,
        "library": library,
        "device": device,
        "dtype": dtype,
        "mode": mode,
        "as_is": as_is,
    }
    with (
        opened_engine(model, engines, brief=True, **options) as decides,
        Gate.load(gate, folder=folder, engine=decides) as opened,
    ):
        print_json(opened.retry(dfid).as_data())


def events(gate: GateName, limit: Annotated[int, typer.Option("--limit", min=1, help="How many.")] = 3) -> None:
    """Print the next undecided events of the queue, one JSON object a line.

    Example: sds events refund --limit 1 > event.json
    """
    folder = folder_of(gate)
    from sds.gates.refund import gate as desk  # noqa: PLC0415

    with desk.preview_kernel(folder) as kernel:
        known = intake.settled_events(kernel.store, kernel.contract)
    waiting = [claim.event for claim in desk.read_queue(folder) if claim.event["claim_id"] not in known]
    for line in waiting[:limit]:
        print_json(line)


def envelope(gate: GateName, event: EventFile, as_json: JsonFlag = False) -> None:
    """Show what may be decided about an event now: kinds, exact bounds, reasons. Nothing is recorded.

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
    gate: GateName,
    event: EventFile,
    form: Annotated[str, typer.Option("--format", help="regex, lark, gbnf or json-schema.")] = "regex",
) -> None:
    """Print the language of an event's envelope: everything the model may say, and nothing else.

    Example: sds grammar refund --event event.json --format lark
    """
    if form not in FORMATS:
        raise UsageError(f"there is no format `{form}`", hint=f"one of: {', '.join(FORMATS)}")
    packet = _preview(gate, event)
    from sds.grammars.emit import json_schema, lark  # noqa: PLC0415
    from sds.grammars.emit.gbnf import to_gbnf  # noqa: PLC0415
    from sds.grammars.language import Language, language  # noqa: PLC0415

    said = language(packet.envelope, packet.snapshot.id)
    if form == "json-schema":
        typer.echo(json.dumps(json_schema.emit(said), indent=2))
    else:
        typer.echo({"regex": Language.regex, "lark": lark.emit, "gbnf": to_gbnf}[form](said))


def _preview(gate: str, event: str) -> DecisionPacket:
    folder = folder_of(gate)
    text = read_event_text(event)
    from sds.gates.refund import gate as desk  # noqa: PLC0415

    with desk.preview_kernel(folder) as kernel:
        return kernel.preview(intake.parse_event(kernel.contract, text))


def _envelope_table(found: DecisionEnvelope) -> Table:
    table = Table(title=f"what may be decided now (envelope {found.hash[:12]})", title_justify="left")
    for heading in ("decision", "the model chooses", "the kernel fills in", "reasons"):
        table.add_column(heading, overflow="fold")
    for kind in found.kinds:
        table.add_row(
            kind.kind,
            ", ".join(_range(name, bound) for name, bound in kind.params),
            ", ".join(f"{name} {format_literal(value, scale)}" for name, value, scale in kind.fills),
            "\n".join(kind.reasons),
        )
    return table


def _range(name: str, allowed: Any) -> str:
    low, high = format_literal(allowed.lo, allowed.scale), format_literal(allowed.hi, allowed.scale)
    step = f" in steps of {format_literal(allowed.step, allowed.scale)}" if allowed.step > 1 else ""
    return f"{name} {low} to {high}{step}" if allowed.lo < allowed.hi else f"{name} {low}"
