"""The labels of the fraud gate: every text of the corpus, and every generated payment with its outcome.

A text alone has the value it was written for. A payment also has whether it was fraud, which a real bank learns days later.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sds.definitions.definition import LabelledCase

from .adjudication import Truth, expected_kind
from .rows import DAYS, Row, rows
from .world.texts import read_corpus


def labelled(folder: Path) -> Iterator[LabelledCase]:  # noqa: ARG001  it needs nothing of the gate's own folder
    """Yield the texts of the three parts, then their payments by time."""
    for part in DAYS:
        for notes in read_corpus(part).values():
            for note in notes:
                yield LabelledCase(note.text, {}, {"note": note.value}, style=note.style, part=part)
    yield from map(labelled_case, rows(*DAYS))


def labelled_case(row: Row) -> LabelledCase:
    return LabelledCase(
        row.text,
        row.fields,
        {"note": row.note, "risk": "1" if row.label else "0"},
        decision=expected_kind(row.fields, truth_of(row)),
        style=row.style,
        amount_minor=row.amount_minor,
        part=row.part,
    )


def truth_of(row: Row) -> Truth:
    return Truth(row.scenario, row.note, row.amount_minor)
