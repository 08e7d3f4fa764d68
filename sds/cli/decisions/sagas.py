"""`sds run --saga`: decide claims in several steps, and show what was done about those that were half settled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
PROMISES = ("out_of_envelope", "double_payouts", "record_faults")


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
    judge(gate, report, chaos, (*PROMISES, "compensated_but_paid"))
    refuse_waiting(gate, report, chaos)


def refuse_waiting(gate: GateDefinition, report: dict[str, Any], chaos: str | None) -> None:
    """Raise WorldError where cases were not decided and wait, unless the run was disturbed on purpose."""
    if report["waiting"] and chaos is None:
        what = f"{report['waiting']} of {counted(report['decisions'], gate.demo.case)}"
        raise WorldError(f"{what} were not decided: they wait", hint=f"sds flows --undecided{gate.option}")


def outcome_table(case: str, rows: Iterable[str], outcomes: Mapping[str, int]) -> Table:
    """Return how many cases had each outcome."""
    table = Table()
    table.add_column("outcome")
    table.add_column(f"{case}s", justify="right")
    for name in rows:
        table.add_row(name.replace("_", " "), str(outcomes.get(name, 0)))
    return table


def _table(gate: GateDefinition, report: dict[str, Any], console: Console) -> None:
    case = gate.demo.case
    console.print(
        f"{counted(report['decisions'], case)} in the steps of {report['saga']}, decided by {report['model']}"
    )
    console.print(outcome_table(case, ROWS, report["outcomes"]))
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


def judge(gate: GateDefinition, report: dict[str, Any], chaos: str | None, promises: Sequence[str] = PROMISES) -> None:
    """Raise SdsError where a promise was broken, the model decided nothing, or the chaos did not happen."""
    happened = gate.demo.chaos[chaos] if chaos else None
    if broken := [name for name in (*promises, *(happened.promises if happened else ())) if report.get(name)]:
        shown = [*report["double_payout_faults"][:1], *report["record_faults"][:1]]
        raise SdsError(f"a promise was broken: {', '.join(broken + shown)}", reason_code="PROMISE_BROKEN")
    if report["decisions"] and not report["decided_by_model"]:
        codes = ", ".join(sorted(report.get("model_failed", ()))) or "all of them are waiting"
        why = f": {codes}" if "model_failed" in report else ""
        none = f"none of {counted(report['decisions'], gate.demo.case)} was decided by {report['model']}{why}"
        raise ModelError(none, hint="run sds doctor with the same options, then `sds models check PATH`")
    if happened and (missing := happened.missing(report)):
        raise UsageError(f"no {missing}, so this run proves nothing", hint="raise --limit")
