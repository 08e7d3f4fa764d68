"""`sds run`: decide the cases of a gate's queue, with a progress bar and a table of the outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sds.cli.common import ChosenGate, JsonFlag, operator
from sds.cli.decisions import sagas
from sds.cli.engines import NO_OPTIONS, EngineOptions, check_asked, opened_engine
from sds.cli.render import Console, counted, echo, print_json
from sds.definitions.definition import GateDefinition
from sds.engines.protocol import Engine
from sds.host.clock import now_ms
from sds.host.interrupt import EXIT_INTERRUPTED, ends_at_once
from sds.host.paths import decisions_path, gate_home, has_record, is_there, open_record, store_url
from sds.host.restoring import used_alone
from sds.kernel.envelope.envelope import format_literal
from sds.kernel.errors import StoreError, UsageError, WorldError, cause_of
from sds.kernel.flow.states import Answer
from sds.kernel.registry import registry
from sds.kernel.saga.state import spec_of
from sds.kernel.storage.store import Store

LIMIT_DEFAULT = 50
PARALLEL_MAX = 64
MANY = 1_000  # for fewer cases the engine's warm-up takes longer than it saves
OTHERWISE_SHOWN = 3  # decisions other than the rule's that are listed; `--json` names more
LAST_ROWS = ("aborted", "waiting", "unknown")  # outcomes that are shown only where there are any


Limit = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="The maximum number of cases.")]
Parallel = Annotated[
    int, typer.Option("--parallel", min=1, max=PARALLEL_MAX, help="The number of cases to decide at once.")
]
ChaosName = Annotated[
    Literal["drift", "agent-drift", "fail-second"] | None,
    typer.Option(
        "--chaos",
        help="A fault to cause. drift: the state moves before execution; agent-drift: the agent denies everyone, within its "
        "bounds, until a monitor stops it; fail-second: the rail declines the second step of a saga.",
    ),
]
SagaName = Annotated[
    str | None, typer.Option("--saga", help="Decide each case in the steps of this saga.", show_default=False)
]
Reset = Annotated[bool, typer.Option("--reset", help="Rename the gate's folder first, and start anew.")]


def run(
    gate: ChosenGate,
    limit: Limit = LIMIT_DEFAULT,
    as_json: JsonFlag = False,
    options: EngineOptions = NO_OPTIONS,
    parallel: Parallel = 1,
    chaos: ChaosName = None,
    saga: SagaName = None,
    reset: Reset = False,
) -> None:
    """Decide the next cases of a gate's queue. Without an engine option, the contract's policy decides if there is one.

    Example: sds run refund --limit 20 --chaos drift
    """
    _refuse_together(chaos, saga, parallel)
    definition = gate.find()
    contract, folder = definition.load_contract(), gate_home(definition.name)
    if saga is not None:
        spec_of(contract, saga)
    if chaos is not None and chaos not in definition.demo.chaos:
        raise UsageError(
            f"gate `{definition.name}` has no chaos `{chaos}`",
            hint=", or use ".join(["leave it out", *(f"--chaos {each}" for each in definition.demo.chaos)]),
        )
    _may_begin(definition, folder, anew=reset)

    @contextmanager
    def began() -> Iterator[Engine]:
        with opened_engine(options, brief=limit < MANY, parallel=parallel, gate=definition) as engine:
            check_asked(engine, contract)
            if reset and is_there(folder):  # the last step before the run, once all that it needs is there
                _set_aside(folder, definition.option)
            yield engine

    if saga is None:
        _run_decisions(definition, folder, limit, began, parallel=parallel, chaos=chaos, as_json=as_json)
        return
    with began() as engine:
        sagas.show(definition, folder, saga, limit, engine, chaos=chaos, as_json=as_json)


def _run_decisions(
    gate: GateDefinition,
    folder: Path,
    limit: int,
    began: Callable[[], AbstractContextManager[Engine]],
    *,
    parallel: int,
    chaos: str | None,
    as_json: bool,
) -> None:
    """Decide cases, one by one or several at once, and show the outcomes. Raises SdsError where a promise was broken."""
    from sds.gates import runner  # noqa: PLC0415  imports the model's libraries

    with _progress(gate, limit) as decided, began() as engine:
        report = runner.run(
            gate, folder, limit=limit, engine=engine, chaos=chaos, on_decided=decided, parallel=parallel
        )
    _table(gate, report, chaos, Console(highlight=False, stderr=as_json))
    if as_json:
        print_json(report)
    wanted = chaos is not None and gate.demo.chaos[chaos].stops
    sagas.judge(gate, report, chaos if wanted or not report["stopped"] else None)
    if report["stopped"] and not wanted:
        why, hint = report["stopped"]
        what = f"{report['decisions']} of {counted(limit, gate.demo.case)}"
        raise WorldError(f"stopped after {what}: {why}", hint=hint)
    sagas.refuse_waiting(gate, report, chaos)


def _refuse_together(chaos: str | None, saga: str | None, parallel: int) -> None:
    """Raise UsageError for options that exclude each other."""
    if (chaos == "fail-second") != (saga is not None) and chaos is not None:
        hint = "use --chaos fail-second" if saga else "add --saga REFUND_WITH_VOUCHER, or use --chaos drift"
        raise UsageError(f"--chaos {chaos} cannot be used {'with' if saga else 'without'} --saga", hint=hint)
    if parallel > 1 and (saga is not None or chaos is not None):
        raise UsageError(
            f"--parallel cannot be used with {'--saga' if saga else '--chaos'}, which decides one case at a time"
        )


@contextmanager
def _progress(gate: GateDefinition, limit: int) -> Iterator[Callable[[Answer], None]]:
    """Show a progress bar where standard error is a terminal; yield the function to call with each answer."""
    console = Console(stderr=True)
    shown = console.is_terminal  # elsewhere a bar is one line of noise before an error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task(f"loading the model and the {gate.demo.case}s", total=limit)
        loading = ExitStack()  # until the first decision
        loading.enter_context(ends_at_once())

        def decided(answer: Answer) -> None:
            loading.close()
            progress.update(task, advance=1, description=f"{answer.action or answer.state:<13}")

        try:
            yield decided
        except KeyboardInterrupt:
            done = int(progress.tasks[0].completed)
            console.print(sagas.STOPPED.format(counted(done, gate.demo.case)), markup=False)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        finally:
            loading.close()


def _may_begin(gate: GateDefinition, folder: Path, *, anew: bool) -> None:
    """Raise SdsError where a run could not begin, before the model is opened, which takes longer than this."""
    from sds.gates.runner import refuse_paused  # noqa: PLC0415  as above

    if not anew:
        refuse_paused(gate, folder)
    elif has_record(folder):
        _may_be_set_aside(folder, gate.option)


def _set_aside(folder: Path, gate: str = "") -> None:
    """Rename the gate's folder. Raises UsageError while a reset would lift a halt or forget an order in flight, and while
    other processes decide there: they would go on with the renamed record.

    `gate`: its option `--gate` for the commands in hints.
    """
    if store_url() is not None:
        hint = "when no order is in flight, ALTER SCHEMA ... RENAME TO ..., then rename the folder"
        raise UsageError("--reset does not rename a record in PostgreSQL", hint=hint)
    has = has_record(folder)
    if has:
        _may_be_set_aside(folder, gate, noted=True)
    kept = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.old-{n}")).exists())
    try:
        with used_alone(decisions_path(folder)) if has else nullcontext():
            folder.rename(kept)
    except OSError as error:
        raise StoreError(f"`{folder}` cannot be renamed: {cause_of(error)}") from error
    echo(f"the former folder is kept as `{kept}`", err=True)


def _may_be_set_aside(folder: Path, gate: str, *, noted: bool = False) -> None:
    """Raise UsageError where a record is still needed; else, with `noted`, write into it who sets it aside."""
    try:
        with closing(open_record(folder)) as store:
            _refuse_while_needed(store, folder, gate)
        if store_url() is None:
            with used_alone(decisions_path(folder)):
                pass
        if noted:
            with closing(open_record(folder)) as store:
                registry.write_act(store, "SET_ASIDE", who=operator(), reason="sds run --reset", now_ms=now_ms())
    except StoreError as error:
        hint = f"rename `{folder}` yourself, if you know that no orders are in flight"
        raise UsageError(str(error), hint=hint) from error


def _refuse_while_needed(store: Store, folder: Path, gate: str) -> None:
    if store.halted:
        raise UsageError(
            f"`{folder.name}` is halted, and a reset would lift the halt", hint=f'sds resume{gate} --reason "..."'
        )
    for agent in registry.agents(store):
        if not agent.active:
            hint = (
                f'sds agents reactivate {agent.agent_id}{gate} --reason "..."'
                if agent.status != "RETIRED"
                else f"rename `{folder}` yourself"
            )
            raise UsageError(f"agent `{agent.agent_id}` is {agent.status}, and a reset would make it active", hint=hint)
    if orders := store.value("SELECT count(*) FROM execution_log WHERE status IN ('PENDING', 'UNKNOWN')"):
        raise UsageError(f"a reset would forget {counted(orders, 'order')} in flight", hint=f"sds recover{gate}")
    if sagas := store.value("SELECT count(*) FROM sagas WHERE phase <> 'ENDED'"):
        raise UsageError(f"a reset would forget {counted(sagas, 'saga')} under way", hint=f"sds recover{gate}")


def _table(gate: GateDefinition, report: dict[str, Any], chaos: str | None, console: Console) -> None:
    from sds.gates.runner import outcome_rows  # noqa: PLC0415  as above

    case, rows = gate.demo.case, outcome_rows(gate)
    shown = [*rows, *(name for name in LAST_ROWS if name in report["outcomes"])]
    console.print(f"{counted(report['decisions'], case)}, decided by {report['model']}", soft_wrap=True)
    console.print(sagas.outcome_table(case, shown, report["outcomes"]))
    lines = [*_undecided_lines(case, report)]
    if report["decided_by_model"]:
        lines += _decided_lines(gate, report, chaos)
    for line in lines:
        console.print(line, soft_wrap=True)


def _undecided_lines(case: str, report: dict[str, Any]) -> Iterator[str]:
    decisions = counted(report["decisions"], case)
    if failed := report.get("model_failed"):
        why = ", ".join(f"{code} {count}" for code, count in sorted(failed.items()))
        yield f"not decided by the model, and now cases for a human: {sum(failed.values())} of {decisions} ({why})"
    if report.get("waiting"):
        yield f"not decided yet, and waiting (sds flows --undecided): {report['waiting']} of {decisions}"
    if elsewhere := report.get("decided_elsewhere"):
        yield f"decided by another process, and not counted here: {counted(elsewhere, case)}"


def _decided_lines(gate: GateDefinition, report: dict[str, Any], chaos: str | None) -> Iterator[str]:
    latency = report["latency_ms"]
    yield (
        f"decision latency, trigger to durable receipt: p50 {latency['p50']} ms, p95 {latency['p95']} ms, "
        f"p99 {latency['p99']} ms (N = {report['decided_by_model']})"
    )
    if gate.demo.currency and report["paid_minor"] is not None:
        yield f"money paid: {format_literal(report['paid_minor'], 2)} {gate.demo.currency}"
    if report["totals"]:
        yield totals_line(report["totals"], gate.demo.currency)
    if report["agreement"] is not None:
        yield f"agreement with the written adjudication rule: {_agreement(report)}"
    for each in report["otherwise"][:OTHERWISE_SHOWN]:
        why = f"sds audit {each['dfid']}{gate.option}"
        yield f"decided differently from the rule: {each['decided']} where {each['expected']} was right ({why})"
    yield (
        f"decisions outside the envelope: {report['out_of_envelope']}; double payouts: {report['double_payouts']}; "
        f"faults in the record: {len(report['record_faults'])}"
    )
    if report["paid_minor"] is None:
        yield "the executor offers no statement: its orders cannot be compared with the record"
    elif not report["double_payouts"]:
        yield f"the {gate.demo.executor}'s statement and the record agree, order by order"
    if chaos:
        yield gate.demo.chaos[chaos].summary(report)
    if gate.demo.note:
        yield gate.demo.note


def totals_line(totals: Mapping[str, int], currency: str) -> str:
    """Return the totals as one line: each one's count, and its amount where there is one, `NAME_minor`."""
    parts = []
    for name in (name for name in totals if not name.endswith("_minor")):
        amount = totals.get(f"{name}_minor")
        money = "" if amount is None else f" ({format_literal(amount, 2)} {currency})"
        parts.append(f"{name.replace('_', ' ')}: {totals[name]}{money}")
    return "; ".join(parts)


def _agreement(report: dict[str, Any]) -> str:
    """Return the agreement with the rule in words: of the cases decided without a human, and of all cases."""
    whole = f"{report['agreement']:.0%} of all, where an escalation agrees if one was due"
    alone = report["agreement_decided"]
    decided = "" if alone is None else f"{alone:.0%} of the {report['decided_alone']} decided without a human, "
    return f"{decided}{whole} (always paying what is permitted: {report['agreement_always_paying']:.0%})"
