"""`sds fit`: fit a gate's readers, and choose the confidence thresholds from which its policy decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sds.cli.common import ChosenGate, JsonFlag, written
from sds.cli.engines import NO_OPTIONS, opened_engine
from sds.cli.judgement.common import LabelsPath, labels_of, progress_bar, table_lines
from sds.cli.render import echo, print_either
from sds.definitions.definition import LabelledCase
from sds.host.clock import now_ms
from sds.host.paths import fitted_home
from sds.kernel.contract.schema import Contract
from sds.kernel.errors import UsageError
from sds.policy.judgement import Manifest
from sds.policy.readers import as_read

if TYPE_CHECKING:
    from sds.judgement.fitting import Fitters

EXAMPLE_CHARS = 60
Head = Annotated[bool, typer.Option("--head", help="Fit only a head on the unchanged encoder: faster, less exact.")]
BaseEncoder = Annotated[
    Path | None,
    typer.Option(
        "--base",
        help="The encoder to start from: a folder with config.json, model.safetensors and tokenizer.json. Default: MiniLM.",
        show_default=False,
    ),
]
LanguageModelReads = Annotated[
    bool, typer.Option("--language-model", help="Fit no reader of texts; calibrate the language model instead.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="The folder to write. Default: $SDS_HOME/fitted/GATE.", show_default=False, callback=written
    ),
]


def fit(
    gate: ChosenGate,
    labels: LabelsPath = None,
    head: Head = False,
    base: BaseEncoder = None,
    language_model: LanguageModelReads = False,
    out: Out = None,
    as_json: JsonFlag = False,
) -> None:
    """Fit a gate's readers on labels. It also calibrates them and chooses the thresholds for the contract's `max_error`.

    Example: sds fit refund --labels labels.jsonl
    """
    definition = gate.find()
    contract = definition.load_contract()
    cases = labels_of(definition, contract, labels)
    from sds.judgement.fit import check_labels, fit_gate  # noqa: PLC0415  imports numpy and what fits
    from sds.judgement.fitting import open_fitters  # noqa: PLC0415

    if language_model and (head or base):
        other = "head" if head else "base"
        raise UsageError(f"--{other} and --language-model exclude each other", hint="use one of the two")
    check_labels(contract, cases, learns=not language_model, gate=definition.argument)
    texts = any(spec.values for spec in contract.readings.values())
    fitters, notices = open_fitters(head=head, texts=texts and not language_model, base=base)
    for notice in (*notices, *_lost_letters(contract, cases)):
        echo(notice, err=True)
    folder = out or fitted_home(definition.name)
    with _asking(fitters, contract, language_model and texts) as fitters, progress_bar() as report:
        fitted = fit_gate(contract, cases, fitters, out=folder, on_progress=report)
    data = {"folder": str(folder), **fitted.model_dump(mode="json", by_alias=True)}
    print_either(as_json, data, [*_lines(fitted), f"written to {folder}"])


def _lost_letters(contract: Contract, cases: Sequence[LabelledCase]) -> Iterator[str]:
    from sds.judgement.labels import with_lost_letters  # noqa: PLC0415

    if lost := with_lost_letters(contract, cases):
        example = as_read(contract, lost[0].text)[:EXAMPLE_CHARS]
        yield (
            f"{len(lost)} of {len(cases)} texts have letters that no reader sees, neither here nor in a decision: it reads"
            f" `{example}`"
        )


@contextmanager
def _asking(fitters: Fitters, contract: Contract, language_model: bool) -> Iterator[Fitters]:
    """Yield the fitters, or, with `language_model`, those that calibrate the language model for readings with values."""
    if not language_model:
        yield fitters
        return
    from sds.judgement.asking import asking  # noqa: PLC0415

    with opened_engine(NO_OPTIONS, brief=False) as engine:
        yield asking(fitters, contract, engine, now_ms=now_ms())


def _lines(made: Manifest) -> list[str]:
    from sds.judgement.bounds import in_words  # noqa: PLC0415

    head = ("reading", "part", "cases", "accuracy", "macro-F1", "average precision", "ECE", "Brier")
    keys = ("cases", "accuracy", "macro_f1", "average_precision", "ece", "brier")
    rows: list[list[Any]] = [
        [name, part, *(measured.get(key) for key in keys)]
        for part, scores in made.scores.items()
        for name, measured in scores["readings"].items()
    ]
    decided = made.scores["test"]["decisions"]
    lines = table_lines(head, rows)
    if decided["cases"]:
        lines.append(
            f"decided {decided['decided']} of {decided['cases']} test cases, {decided['wrong']} of them wrongly"
        )
    else:
        lines.append("no label of the test part has both fields and a decision: decisions are not measured")
    shares = (
        f"reading.{name} in held-out cases, as a monitor may expect it: {{{', '.join(f'{value}: {share:g}' for value, share in each.items())}}}"
        for name, each in made.shares.items()
    )
    return [*lines, *shares, *in_words(made.thresholds)]
