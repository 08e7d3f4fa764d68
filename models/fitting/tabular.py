"""Boosted trees over declared fields, by scikit-learn's histogram boosting, written as ONNX without any pickle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier

from sds.models.fitting.calibration import fit_score
from sds.models.fitting.examples import Progress, check_enough, nobody
from sds.models.fitting.fitted import Fitted
from sds.models.fitting.tree_graph import tree_graph
from sds.models.readers.artifact import INPUTS_MAX, MODEL, Input
from sds.models.readers.protocol import SCORE, VALUES_MAX, Fields, ReaderError, Readings
from sds.models.readers.session import Session
from sds.models.readers.tabular import row_numbers

Row = tuple[Fields, Readings]
CATEGORIES_MAX = 64  # of a field without declared values; rarer ones are unfamiliar
TREES_MAX = 300
RATE = 0.06
LEAVES = 15
LEAF_ROWS = 20
PENALTY = 1.0


@dataclass(frozen=True, slots=True)
class FittedTable(Fitted):
    inputs: tuple[Input, ...]

    def calibrated(self, rows: Sequence[Row], truth: Sequence[bool]) -> FittedTable:
        """Return this table, calibrated on rows that the fit never saw. Raises ReaderError."""
        _check(rows, truth)
        check_enough(len(rows))
        numbers = np.stack([row_numbers(self.inputs, *row) for row in rows])
        (logits,) = Session(self.files[MODEL]).run(["logit"], {"row": numbers})
        calibration = fit_score(logits[:, 0].astype(np.float64), np.array(truth, np.bool_))
        return replace(
            self, manifest={**self.manifest, "calibration": calibration.model_dump(), "calibrated": len(rows)}
        )


def fit_tabular(
    rows: Sequence[Row],
    truth: Sequence[bool],
    *,
    inputs: Sequence[Input],
    seed: int = 0,
    on_progress: Progress = nobody,
) -> FittedTable:
    """Fit the probability that a row is true. Raises ReaderError.

    `inputs`: the fields and readings of a row, in order; a category without values takes those of the rows. The result
    is not calibrated yet.
    """
    _check(rows, truth)
    if not 1 <= len(inputs) <= INPUTS_MAX:
        raise ReaderError(f"a table has 1 to {INPUTS_MAX} inputs")
    known = tuple(_completed(given, rows) for given in inputs)
    numbers = np.stack([row_numbers(known, *row) for row in rows])
    on_progress(0, 2, "fitting the trees")
    trees = HistGradientBoostingClassifier(
        max_iter=TREES_MAX,
        learning_rate=RATE,
        max_leaf_nodes=LEAVES,
        min_samples_leaf=LEAF_ROWS,
        l2_regularization=PENALTY,
        early_stopping=False,
        random_state=seed,
    )
    trees.fit(numbers, np.array(truth, np.int64))
    on_progress(1, 2, "writing the model")
    model = tree_graph(trees, numbers.shape[1])
    declared = [given.model_dump() for given in known]
    manifest = {"kind": "tabular", "values": [SCORE], "inputs": declared, "seed": seed, "fitted": len(rows)}
    on_progress(2, 2, "done")
    return FittedTable(manifest, {MODEL: model}, known)


def _check(rows: Sequence[Row], truth: Sequence[bool]) -> None:
    if len(rows) != len(truth):
        raise ReaderError(f"{len(rows)} rows have {len(truth)} answers", hint="give each row one answer")
    if not any(truth) or all(truth):
        raise ReaderError("the rows are all true or all false", hint="give both true and false rows")


def _completed(given: Input, rows: Sequence[Row]) -> Input:
    """Return an input with the rows' values, or their least and greatest number."""
    if given.type == "int":
        numbers = [fields.get(given.name) for fields, _ in rows]
        whole = [number for number in numbers if type(number) is int]
        return given.model_copy(update={"low": min(whole, default=0), "high": max(whole, default=0)})
    if given.type == "category" and not given.values:
        counts: dict[str, int] = {}
        for fields, _ in rows:
            found = fields.get(given.name)
            if isinstance(found, str):
                counts[found] = counts.get(found, 0) + 1
        kept = sorted(counts, key=lambda value: (-counts[value], value))[:CATEGORIES_MAX]
        return given.model_copy(update={"values": tuple(sorted(kept))})
    if given.type == "reading" and not 1 <= len(given.values) <= VALUES_MAX:
        raise ReaderError(
            f"the reading `{given.name}` must have 1 to {VALUES_MAX} values", hint="list them in the input"
        )
    return given
