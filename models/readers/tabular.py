"""Reads a row of fields, and other readers' probabilities, with boosted trees: one score in [0, 1].

A row becomes numbers in the order of the declared inputs. A whole number or a boolean is itself; a category is one number
for each of its values; a reading is the probability of each of its values. Trees compare in 32 bits, as in the fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sds.models.readers.artifact import MODEL, Artifact, Input
from sds.models.readers.calibration import calibrated_score
from sds.models.readers.protocol import NO_FIELDS, NO_READINGS, SCORE, Field, Fields, ReaderError, Reading, Readings
from sds.models.readers.session import Session

WHOLE_MAX = 1 << 63  # larger fields are refused
_HINT = "give every input that the reader was fitted on"


class TableReader:
    kind = "tabular"
    values: tuple[str, ...] = (SCORE,)

    def __init__(self, artifact: Artifact) -> None:
        self.sha256 = artifact.sha256
        self._inputs = artifact.manifest.inputs
        self._calibration = artifact.manifest.calibration
        self._session = Session(artifact.files[MODEL], threads=1)

    def read(self, text: str, fields: Fields = NO_FIELDS, readings: Readings = NO_READINGS) -> Reading:  # noqa: ARG002 — a row is all that it reads
        row = row_numbers(self._inputs, fields, readings)
        (logit,) = self._session.run(["logit"], {"row": row[None]})
        score = calibrated_score(self._calibration, logit[0].astype(np.float64))
        return Reading({SCORE: float(score.item())}, is_within(self._inputs, fields))

    def close(self) -> None:
        self._session.close()


def row_numbers(inputs: Sequence[Input], fields: Fields, readings: Readings) -> NDArray[np.float32]:
    """Return the numbers of one row. Raises ReaderError where an input is missing or mistyped."""
    numbers: list[float] = []
    for given in inputs:
        if given.type == "reading":
            numbers += _shares(given, readings)
        elif given.type == "category":
            found = _field(given, fields)
            numbers += [float(found == value) for value in given.values]
        else:
            numbers.append(float(_field(given, fields)))
    return np.array(numbers, np.float32)


def is_within(inputs: Sequence[Input], fields: Fields) -> bool:
    """Return whether every category was fitted, and every whole number is not far beyond the fitted ones."""
    for given in inputs:
        if given.type == "category" and fields[given.name] not in given.values:
            return False
        if given.type == "int":
            span = max(given.high - given.low, 1)
            if not given.low - span <= int(fields[given.name]) <= given.high + span:
                return False
    return True


def _field(given: Input, fields: Fields) -> Field:
    kind = {"int": int, "bool": bool, "category": str}[given.type]
    found = fields.get(given.name)
    if found is None or type(found) is not kind or (isinstance(found, int) and abs(found) > WHOLE_MAX):
        raise ReaderError(f"the field `{given.name}` is absent, or is not of type {given.type}", hint=_HINT)
    return found


def _shares(given: Input, readings: Readings) -> list[float]:
    found = readings.get(given.name, {})
    shares = [found.get(value, -1.0) for value in given.values]
    if not all(isinstance(share, float) and 0.0 <= share <= 1.0 for share in shares):
        raise ReaderError(f"the reading `{given.name}` is absent, or has other values", hint=_HINT)
    return shares
