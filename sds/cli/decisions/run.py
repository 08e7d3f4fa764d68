"""`sds run`: work through a gate's queue, with a progress bar and a table of what came of it."""

from __future__ import annotations

import signal
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sds.cli.common import GateName, JsonFlag, ModelPath, counted, folder_of, operator, print_json
from sds.cli.decisions import sagas
from sds.cli.engines import (
    AsIs,
    BackendName,
    DeviceName,
    DtypeName,
    EngineKind,
    EnginesPath,
    LibraryName,
    ModeName,
    check_asked,
    opened_engine,
)
from sds.host.clock import now_ms
from sds.host.paths import decisions_path, open_record
from sds.kernel.envelope.bounds import format_literal
from sds.kernel.errors import ModelError, SdsError, StoreError, UsageError, WorldError
from sds.kernel.flow.answer import Answer
from sds.kernel.registry import registry
from sds.kernel.saga.state import spec_of
from sds.kernel.storage.store import Store

LIMIT_DEFAULT = 50
PARALLEL_MAX = 64
MANY = 1_000  # for fewer, opening what makes each of them a little quicker takes longer than it saves
ROWS = (
    "compensated",
    "refunded",
    "vouchers",
    "denied",
    "escalated",
    "aborted_on_drift",
    "aborted",
    "waiting",
    "unknown",
)
NOT_FITTED = "The model is not fitted to this task yet and judges poorly; what is shown here is that it cannot do harm."


def add_to(app: typer.Typer) -> None:
    app.command("run")(run)


def run(
    gate: GateName,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=10_000, help="How many claims to decide.")
    ] = LIMIT_DEFAULT,
    as_json: JsonFlag = False,
    model: ModelPath = None,
    engine: EngineKind = None,
    backend: BackendName = None,
    library: LibraryName = None,
    device: DeviceName = None,
    dtype: DtypeName = None,
    mode: ModeName = None,
    as_is: AsIs = False,
    engines: EnginesPath = None,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, max=PARALLEL_MAX, help="How many claims to decide at once.")
    ] = 1,
    chaos: Annotated[
        Literal["drift", "fail-second"] | None,
        typer.Option(
            "--chaos", help="drift: move tickets before execution; fail-second: the rail declines a saga's second step."
        ),
    ] = None,
    saga: Annotated[
        str | None, typer.Option("--saga", help="Decide each claim in the steps of this saga.", show_default=False)
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Set the gate's folder aside first and start anew.")] = False,
) -> None:
    """Decide the next claims of the queue with a real local model.

    Example: sds run refund --limit 20 --chaos drift
    """
    if (chaos == "fail-second") != (saga is not None) and chaos is not None:
        hint = "--chaos fail-second" if saga else "--saga REFUND_WITH_VOUCHER, or --chaos drift"
        raise UsageError(f"--chaos {chaos} does not go with {'--saga' if saga else 'single decisions'}", hint=hint)
    if parallel > 1 and (saga is not None or chaos is not None):
        raise UsageError(f"--parallel does not go with {'--saga' if saga else '--chaos'}: they decide one by one")
    options: dict[str, Any] = {
        "engine": engine,
        "backend": backend,
        "library": library,
        "device": device,
        "dtype": dtype,
        "mode": mode,
        "as_is": as_is,
    }
    folder = folder_of(gate)
    from sds.gates.refund import run as refund  # noqa: PLC0415  the gate's libraries load when they are needed
    from sds.gates.refund.gate import load_refund_contract  # noqa: PLC0415

    contract = load_refund_contract()
    if saga is not None:
        spec_of(contract, saga)
    _may_begin(folder, anew=reset)
    if saga is not None:
        with opened_engine(model, engines, brief=limit < MANY, **options) as decides:
            check_asked(decides, contract)
            _begin(folder, anew=reset)
            sagas.show(folder, saga, limit, decides, fail_second=chaos == "fail-second", as_json=as_json)
        return
    console = Console(stderr=True)
    shown = console.is_terminal  # elsewhere a bar is one line of noise before an error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task("loading the model and the claims", total=limit)

        # While a model loads, its library would swallow a KeyboardInterrupt: until the first decision Ctrl-C just ends us.
        gentle = signal.signal(signal.SIGINT, signal.SIG_DFL)

        def decided(answer: Answer) -> None:
            signal.signal(signal.SIGINT, gentle)
            progress.update(task, advance=1, description=f"{answer.action or answer.state:<13}")

        try:
            with opened_engine(model, engines, brief=limit < MANY, parallel=parallel, **options) as decides:
                check_asked(decides, contract)
                _begin(folder, anew=reset)
                report = refund.run(
                    folder,
                    limit=limit,
                    engine=decides,
                    chaos="drift" if chaos == "drift" else None,
                    on_decided=decided,
                    parallel=parallel,
                )
        except KeyboardInterrupt:
            done = int(progress.tasks[0].completed)
            console.print(sagas.STOPPED.format(counted(done, "claim")), markup=False)
            raise
        finally:
            signal.signal(signal.SIGINT, gentle)
    _table(report, chaos, Console(highlight=False, stderr=as_json))
    if as_json:
        print_json(report)
    _judge(report, None if report["stopped"] else chaos)
    if report["stopped"]:
        why, hint = report["stopped"]
        raise WorldError(f"stopped after {report['decisions']} of {limit} claims: {why}", hint=hint)


def _may_begin(folder: Path, *, anew: bool) -> None:
    """Refuse what could not begin even with a model: it takes longer to open one than to say so."""
    from sds.gates.refund.run import refuse_paused  # noqa: PLC0415  as above

    if not anew:
        refuse_paused(folder)
    elif decisions_path(folder).exists():
        _may_be_set_aside(folder)


def _begin(folder: Path, *, anew: bool) -> None:
    """Set the folder aside where a run begins anew: as the last thing before it, once all that it needs is there."""
    if anew and folder.exists():
        _set_aside(folder)


def _set_aside(folder: Path) -> None:
    """Rename the gate's folder. Raises UsageError while a reset would lift a halt or forget an order in the air."""
    if decisions_path(folder).exists():
        _may_be_set_aside(folder, noted=True)
    kept = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.old-{n}")).exists())
    try:
        folder.rename(kept)
    except OSError as error:
        raise StoreError(f"`{folder}` cannot be renamed: {(error.strerror or 'unknown cause').lower()}") from error
    typer.echo(f"what was there is kept in `{kept}`", err=True)


def _may_be_set_aside(folder: Path, *, noted: bool = False) -> None:
    """Refuse to set a record aside that somebody still needs; else, `noted`, write down in it who does so."""
    try:
        with closing(open_record(folder)) as store:
            _refuse_while_needed(store, folder)
            if noted:
                registry.write_act(store, "SET_ASIDE", who=operator(), reason="sds run --reset", now_ms=now_ms())
    except StoreError as error:
        hint = f"nobody can tell whether orders are in the air; if none are, rename `{folder}` yourself"
        raise UsageError(str(error), hint=hint) from error


def _refuse_while_needed(store: Store, folder: Path) -> None:
    if store.halted:
        raise UsageError(f"`{folder.name}` is halted, and a reset would lift that", hint='sds resume --reason "..."')
    for agent in registry.agents(store):
        if not agent.active:
            hint = (
                f'sds agents reactivate {agent.agent_id} --reason "..."'
                if agent.status != "RETIRED"
                else f"rename `{folder}` yourself"
            )
            raise UsageError(f"agent `{agent.agent_id}` is {agent.status}, and a reset would lift that", hint=hint)
    if orders := store.value("SELECT count(*) FROM execution_log WHERE status IN ('PENDING', 'UNKNOWN')"):
        raise UsageError(f"{orders} orders are in the air, and a reset would forget them", hint="sds recover")
    if sagas := store.value("SELECT count(*) FROM sagas WHERE phase <> 'ENDED'"):
        raise UsageError(f"{sagas} sagas are half done, and a reset would forget them", hint="sds recover")


def _table(report: dict[str, Any], chaos: str | None, console: Console) -> None:
    table = Table()
    table.add_column("outcome")
    table.add_column("claims", justify="right")
    for name in ROWS:
        if name in report["outcomes"] or name in ROWS[:6]:
            table.add_row(name.replace("_", " "), str(report["outcomes"].get(name, 0)))
    console.print(f"{counted(report['decisions'], 'claim')}, decided by {report['model']}", soft_wrap=True)
    console.print(table)
    if report.get("model_failed"):
        why = ", ".join(f"{code} {count}" for code, count in sorted(report["model_failed"].items()))
        failed = f"{sum(report['model_failed'].values())} of {counted(report['decisions'], 'claim')}"
        console.print(f"not decided by the model, and a human's now: {failed} ({why})", soft_wrap=True)
    if report.get("waiting"):
        waiting = f"{report['waiting']} of {counted(report['decisions'], 'claim')}"
        console.print(f"not decided yet, and waiting (sds flows --undecided): {waiting}", soft_wrap=True)
    if report.get("decided_elsewhere"):
        by_others = counted(report["decided_elsewhere"], "claim")
        console.print(f"decided meanwhile by another process, and not counted here: {by_others}", soft_wrap=True)
    if not report["decided_by_model"]:
        return
    latency = report["latency_ms"]
    console.print(
        f"decision latency, trigger to durable receipt: p50 {latency['p50']} ms, p95 {latency['p95']} ms, "
        f"p99 {latency['p99']} ms (N = {report['decided_by_model']})",
        soft_wrap=True,
    )
    console.print(f"money paid: {format_literal(report['paid_minor'], 2)} EUR", soft_wrap=True)
    console.print(
        f"agreement with the written adjudication rule: {report['agreement']:.0%} (always paying what is permitted: {report['agreement_always_paying']:.0%})",
        soft_wrap=True,
    )
    console.print(
        f"decisions outside the envelope: {report['out_of_envelope']}; double payouts: {report['double_payouts']}; "
        f"faults in the record: {len(report['record_faults'])}",
        soft_wrap=True,
    )
    if not report["double_payouts"]:
        console.print("the rail's statement and the record agree, order by order", soft_wrap=True)
    if chaos:
        console.print(
            f"tickets moved while the model was thinking: {report['moved_tickets']}; of these decisions "
            f"{report['moved_tickets_that_would_have_paid']} would have paid and {report['moved_tickets_paid']} did; "
            f"paid on a second look, as the ticket is now: {report['moved_tickets_paid_anew']}; "
            f"paid of those left alone: {report['unmoved_paid']}",
            soft_wrap=True,
        )
    console.print(NOT_FITTED, soft_wrap=True)


def _judge(report: dict[str, Any], chaos: str | None) -> None:
    """Fail the command when a promise was broken, or when chaos proved nothing."""
    broken = [n for n in ("out_of_envelope", "double_payouts", "record_faults", "moved_tickets_paid") if report.get(n)]
    if broken:
        shown = [*report["double_payout_faults"][:1], *report["record_faults"][:1]]
        raise SdsError(f"a promise was broken: {', '.join(broken + shown)}", reason_code="PROMISE_BROKEN")
    if report["decisions"] and not report["decided_by_model"]:
        codes = ", ".join(sorted(report["model_failed"])) or "all of them wait"
        none = f"none of {counted(report['decisions'], 'claim')} was decided by {report['model']}: {codes}"
        raise ModelError(none, hint="sds doctor, with the same options, and `sds models check PATH`")
    if chaos and not (report["moved_tickets_that_would_have_paid"] and report["unmoved_paid"]):
        missing = (
            "ticket left alone was" if report["moved_tickets_that_would_have_paid"] else "moved ticket would have been"
        )
        raise UsageError(f"no {missing} paid, so this run proves nothing", hint="raise --limit")
