"""`sds eval`: measure a gate's readers and decisions on labels they were not fitted on, beside simpler baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sds.cli.common import ChosenGate, JsonFlag, written
from sds.cli.engines import NO_OPTIONS, opened_engine
from sds.cli.judgement.common import LabelsPath, labels_of, progress_bar, table_lines
from sds.cli.render import echo, print_either
from sds.definitions.definition import GateDefinition
from sds.host.clock import now_ms
from sds.host.paths import fitted_readers
from sds.kernel.contract.schema import Contract
from sds.kernel.errors import SdsError, UsageError, cause_of

if TYPE_CHECKING:
    from sds.judgement.evaluation.evaluate import Beside
    from sds.policy.judgement import Judgement


PartName = Annotated[Literal["train", "calibrate", "test", "all"], typer.Option("--part", help="The labels to use.")]
WithModel = Annotated[bool, typer.Option("--with-model", help="Also ask the language model. This takes longer.")]
ReadersFolder = Annotated[
    Path | None,
    typer.Option("--readers", help="A folder of fitted readers. Default: those of the gate.", show_default=False),
]
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", help="Also write an HTML page with plots.", show_default=False, callback=written),
]


def evaluate(
    gate: ChosenGate,
    labels: LabelsPath = None,
    part: PartName = "test",
    readers: ReadersFolder = None,
    with_model: WithModel = False,
    html: HtmlFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure a gate's fitted readers. It also measures the decisions that follow, and compares both with simpler methods.

    Example: sds eval refund --html eval.html
    """
    definition = gate.find()
    contract = definition.load_contract()
    cases = labels_of(definition, contract, labels)
    from sds.judgement.evaluation.evaluate import evaluate as measured  # noqa: PLC0415  numpy loads when it is needed
    from sds.judgement.evaluation.page import check_place, page  # noqa: PLC0415

    if html is not None:
        check_place(html)
    with (
        _opened(definition, contract, readers) as judgement,
        _beside(contract, with_model) as beside,
        progress_bar() as report,
    ):
        document = measured(contract, judgement, cases, part=part, beside=beside, on_progress=report)
    for notice in document["notices"]:
        echo(notice, err=True)
    print_either(as_json, document, _lines(document))
    if html is not None:
        try:
            html.write_text(page(document), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"`{html}` cannot be written: {cause_of(error)}") from error


@contextmanager
def _opened(gate: GateDefinition, contract: Contract, folder: Path | None) -> Iterator[Judgement]:
    place = folder or fitted_readers(gate.name, gate.readers)
    if place is None:
        raise UsageError(f"no readers are fitted for gate `{gate.name}`", hint=f"sds fit {gate.argument}")
    from sds.policy.judgement import open_judgement  # noqa: PLC0415  its libraries load when they are needed

    judgement = open_judgement(place, contract)
    try:
        if missing := sorted(contract.readings.keys() - judgement.readers.keys() - judgement.manifest.models.keys()):
            raise UsageError(f"no reader is fitted for `{missing[0]}`", hint=f"sds fit {gate.argument}")
        if not judgement.manifest.models:
            yield judgement
            return
        from sds.judgement.asking import calibrated_readers  # noqa: PLC0415

        with opened_engine(NO_OPTIONS, brief=False) as engine:
            asked = calibrated_readers(contract, judgement.manifest, engine, now_ms=now_ms())
            yield replace(judgement, readers={**judgement.readers, **asked})
    finally:
        judgement.close()


@contextmanager
def _beside(contract: Contract, with_model: bool) -> Iterator[Beside]:
    """Yield the baselines that can be measured on this machine; what cannot is said on standard error."""
    from sds.judgement.evaluation.evaluate import Beside  # noqa: PLC0415
    from sds.judgement.fitting import open_fitters  # noqa: PLC0415

    beside, specs = Beside(), contract.readings.values()
    if any(spec.values for spec in specs):
        try:
            beside = replace(beside, head=open_fitters(head=True)[0].text)
        except SdsError as error:
            echo(f"the baseline of a head on the unchanged encoder is not measured: {error}", err=True)
    if any(spec.score for spec in specs):
        try:
            beside = replace(beside, table=open_fitters(texts=False)[0].table)
        except SdsError as error:
            echo(f"the baseline of boosting is not measured: {error}", err=True)
    if not with_model:
        yield beside
        return
    from sds.policy.readers import ModelReader  # noqa: PLC0415

    with opened_engine(NO_OPTIONS, brief=False) as engine:
        answers = {name: ModelReader(name, spec, engine) for name, spec in contract.readings.items() if spec.values}
        yield replace(beside, model=lambda: answers, now_ms=now_ms())


_READ = (
    "cases",
    "accuracy",
    "accuracy_of_groups",
    "macro_f1",
    "average_precision",
    "lost_minor_at_1pct_held",
    "ece",
    "ece_by_chance",
    "brier",
)
_DECIDED = (
    "cases",
    "agreement",
    "coverage",
    "error",
    "ece",
    "ece_by_chance",
    "wrongly_paid_minor",
    "wrongly_refused_minor",
)


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the results as lines: readings, their styles and values, decisions, and how often the bound held."""
    for name, readers in document["readings"].items():
        yield from _table(f"reading.{name}", readers, _READ)
        fitted = readers["fitted"]
        yield from _intervals(fitted, ("accuracy",))
        for what in ("styles", "classes"):
            if rows := fitted.get(what):
                yield ""
                yield from _table(what, rows, tuple(next(iter(rows.values()))))
        yield ""
    if decided := document["decisions"]:
        yield from _table("decisions", decided, _DECIDED)
        yield from _intervals(decided["fitted"], ("agreement", "coverage", "error"))
        escalated = ", ".join(f"{code} {count}" for code, count in decided["fitted"]["escalated"].items())
        yield f"escalated: {escalated or 'none'}"
        yield _of_orders(document["orders"])
    else:
        yield "no label of this part has both fields and a decision: decisions are not measured"
    for each in document["splits"]:
        yield (
            f"max_error {each['max_error']} of {', '.join(each['kinds'])}: held in {each['held']:.1%} of {each['splits']} random"
            f" splits, coverage {each['coverage_mean']:.3f}, error {each['error_mean']:.4f}; no threshold in {each['without_threshold']}"
        )


def _intervals(fitted: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Yield a line that says how exactly so many cases show the measures of the fitted readers."""
    said = [
        f"{name} {low:.3f} to {high:.3f}" for name in names for low, high in [fitted.get(f"{name}_95", (0, 0))] if high
    ]
    if said:
        yield f"fitted, with 95% confidence: {', '.join(said)}"


def _of_orders(found: Mapping[str, Any]) -> str:
    return (
        f"orders in {found['cases']} texts ({found['orders']} different): wrongly paid {found['paid_wrongly_with']}, without them"
        f" {found['paid_wrongly_without']}; turned towards paying {found['turned_towards_paying']}; unfamiliar {found['unfamiliar']}"
    )


def _table(head: str, rows: Mapping[str, Mapping[str, Any]], wanted: tuple[str, ...]) -> list[str]:
    keys = [key for key in wanted if any(isinstance(each.get(key), int | float) for each in rows.values())]
    return table_lines(
        (head, *(key.replace("_", " ") for key in keys)),
        [(who, *(each.get(key) for key in keys)) for who, each in rows.items()],
    )
