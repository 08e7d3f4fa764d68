"""`sds run --saga`: decide claims in several steps, and show what was done about those that were half settled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from sds.cli.render import Console, counted, print_json
from sds.definitions.definition import GateDefinition
from sds.engines.protocol import Engine
from sds.host.interrupt import EXIT_INTERRUPTED
from sds.kernel.envelope.envelope import format_literal
from sds.kernel.errors import ModelError, SdsError, UsageError, WorldError
from sds.kernel.saga.state import SagaAnswer

ROWS = ("complete", "nothing_done", "escalated", "compensated", "dirty_with_a_human", "waiting")
STOPPED = "stopped after {}; `sds recover` ends the flows that were under way"
PROMISES = ("out_of_envelope", "double_payouts", "record_faults", "compensated_but_paid")


def show(
    gate: GateDefinition, folder: Path, saga: str, limit: int, engine: Engine, *, chaos: str | None, as_json: bool
) -> None:
    """Run a saga over the next claims, and show the outcomes. Raises SdsError where a promise was broken."""
    from sds.gates import saga_runner  # noqa: PLC0415  imports the model's libraries

    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    done = 0

    def decided(answer: SagaAnswer) -> None:
        nonlocal done
        done += 1
        steps = ", ".join(f"{s.action or s.state} {s.execution or s.tag or ''}".strip() for s in answer.steps if s)
        said = f" -> {answer.compensation}" if answer.compensation else ""
        console.print(f"{answer.answer.event_id}  {steps}{said}  {answer.answer.state} {answer.answer.tag or ''}")

    try:
        report = saga_runner.run(gate, folder, saga=saga, limit=limit, engine=engine, chaos=chaos, on_decided=decided)
    except KeyboardInterrupt:
        console.print(STOPPED.format(counted(done, gate.demo.case)))
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _table(gate, report, Console(highlight=False, stderr=as_json, soft_wrap=True, markup=False))
    if as_json:
        print_json(report)
    _judge(gate, report, chaos)
    refuse_waiting(gate, report, chaos)


def refuse_waiting(gate: GateDefinition, report: dict[str, Any], chaos: str | None) -> None:
    """Raise WorldError where cases were not decided and wait, unless the run was disturbed on purpose."""
    if report["waiting"] and chaos is None:
        what = f"{report['waiting']} of {counted(report['decisions'], gate.demo.case)}"
        raise WorldError(f"{what} were not decided: they wait", hint=f"sds flows --undecided{gate.option}")


def _table(gate: GateDefinition, report: dict[str, Any], console: Console) -> None:
    case = gate.demo.case
    table = Table()
    table.add_column("outcome")
    table.add_column(f"{case}s", justify="right")
    for name in ROWS:
        table.add_row(name.replace("_", " "), str(report["outcomes"].get(name, 0)))
    console.print(
        f"{counted(report['decisions'], case)} in the steps of {report['saga']}, decided by {report['model']}"
    )
    console.print(table)
    chosen = ", ".join(f"{name} {count}" for name, count in sorted(report["compensations"].items())) or "nothing"
    console.print(f"half settled: {report['dirty']}; chosen from the menu: {chosen}")
    paid, back = (format_literal(report[name], 2) for name in ("paid_minor", "reversed_minor"))
    unit = f" {gate.demo.currency}" if gate.demo.currency else ""
    console.print(f"money paid: {paid}{unit}, taken back: {back}{unit} in {counted(report['reversals'], 'reversal')}")
    console.print(
        f"decisions outside the envelope: {report['out_of_envelope']}; double payouts: {report['double_payouts']}; "
        f"faults in the record: {len(report['record_faults'])}; "
        f"payments of compensated {case}s that still stand: {report['compensated_but_paid']}"
    )
    console.print(f"to see the whole record of the last one: sds audit {report['dfids'][-1]}{gate.option}")


def _judge(gate: GateDefinition, report: dict[str, Any], chaos: str | None) -> None:
    """Raise SdsError where a promise was broken, the model decided nothing, or the chaos did not happen."""
    broken = [name for name in PROMISES if report[name]]
    if broken:
        shown = [*report["double_payout_faults"][:1], *report["record_faults"][:1]]
        raise SdsError(f"a promise was broken: {', '.join(broken + shown)}", reason_code="PROMISE_BROKEN")
    if not report["decided_by_model"]:
        none = f"none of {counted(report['decisions'], gate.demo.case)} was decided by {report['model']}"
        raise ModelError(none, hint="run sds doctor with the same options, then `sds models check PATH`")
    if chaos and (missing := gate.demo.chaos[chaos].missing(report)):
        raise UsageError(f"no {missing}, so this run proves nothing", hint="raise --limit")
