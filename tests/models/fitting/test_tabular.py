"""Fitting boosted trees: the graph that is run says what scikit-learn's trees say."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

from sds.models.fitting.tabular import CATEGORIES_MAX, fit_tabular
from sds.models.fitting.tree_graph import rounded_down, tree_graph
from sds.models.readers.artifact import Input
from sds.models.readers.onnx_form import check_onnx
from sds.models.readers.opening import open_reader
from sds.models.readers.protocol import ReaderError
from sds.models.readers.session import Session
from tests.models.readers.rows import COUNTRIES, INPUTS, payments

ROWS, FRAUDS = payments(600, random.Random(3))


def test_the_graph_says_what_the_trees_say_to_the_last_threshold() -> None:
    """Numbers lie exactly on thresholds, and just beside them."""
    draw = np.random.default_rng(1)
    rows = draw.integers(0, 40, (800, 3)).astype(np.float32) / np.float32(10)
    trees = HistGradientBoostingClassifier(max_iter=20, random_state=0).fit(
        rows, rows.sum(1) + draw.standard_normal(800) > 6
    )
    beside = np.concatenate([rows, np.nextafter(rows, np.float32(9)), np.nextafter(rows, np.float32(-9))])
    model = tree_graph(trees, 3)
    check_onnx(model)
    (logits,) = Session(model).run(["logit"], {"row": beside})
    assert trees.decision_function(beside) == pytest.approx(logits[:, 0], abs=1e-5)


def test_a_threshold_is_rounded_down_so_that_no_number_changes_its_side() -> None:
    numbers = np.array([0.1, 1 / 3, 16777217.0, -0.1, 2.0])
    assert (rounded_down(numbers) <= numbers).all()
    assert (np.nextafter(rounded_down(numbers), np.float32(np.inf)) > numbers).all()


def test_what_is_written_separates_unseen_rows(tmp_path: Path) -> None:
    fitted = fit_tabular(ROWS, FRAUDS, inputs=INPUTS).calibrated(*payments(400, random.Random(4)))
    reader = open_reader(tmp_path / "risk", sha256=fitted.export(tmp_path / "risk"))
    assert ["model.onnx", "reader.json"] == sorted(file.name for file in (tmp_path / "risk").iterdir())
    rows, frauds = payments(400, random.Random(5))
    assert roc_auc_score(frauds, [reader.read("", *row).probabilities["score"] for row in rows]) > 0.7


def test_the_same_seed_gives_the_same_model() -> None:
    first, second = (fit_tabular(ROWS, FRAUDS, inputs=INPUTS, seed=3) for _ in range(2))
    assert first.files == second.files


def test_a_category_takes_its_values_and_a_number_its_range_from_the_rows() -> None:
    fitted = fit_tabular(ROWS, FRAUDS, inputs=INPUTS)
    amount, country, _, _ = fitted.inputs
    assert COUNTRIES == country.values
    amounts = [fields["amount_minor"] for fields, _ in ROWS]
    assert (min(amounts), max(amounts)) == (amount.low, amount.high)


def test_of_many_categories_the_frequent_ones_are_kept() -> None:
    rows: list[Any] = [({"shop": f"s{number % 100:02}" if number < 190 else "s99"}, {}) for number in range(300)]
    fitted = fit_tabular(rows, [number % 3 == 0 for number in range(300)], inputs=[Input(name="shop", type="category")])
    assert CATEGORIES_MAX == len(fitted.inputs[0].values)
    assert "s99" in fitted.inputs[0].values


def test_progress_is_told() -> None:
    told: list[int] = []
    fit_tabular(ROWS, FRAUDS, inputs=INPUTS, on_progress=lambda done, _total, _what: told.append(done))
    assert [0, 1, 2] == told


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one class only": ({"truth": [False] * 600}, "the rows are all true or all false"),
    "an answer too few": ({"truth": FRAUDS[1:]}, "600 rows have 599 answers"),
    "no rows": ({"rows": [], "truth": []}, "the rows are all true or all false"),
    "no inputs": ({"inputs": []}, "a table has 1 to 256 inputs"),
    "an input that no row has": (
        {"inputs": [Input(name="age", type="int")]},
        "the field `age` is absent, or is not of type int",
    ),
    "a reading without values": (
        {"inputs": [Input(name="note", type="reading")]},
        "the reading `note` must have 1 to 32 values",
    ),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_cannot_be_fitted_is_refused_in_one_line(refused: str) -> None:
    changes, expected = REFUSED[refused]
    options: dict[str, Any] = {"rows": ROWS, "truth": FRAUDS, "inputs": INPUTS, **changes}
    with pytest.raises(ReaderError) as raised:
        fit_tabular(options["rows"], options["truth"], inputs=options["inputs"])
    assert expected == str(raised.value)


def test_ten_rows_are_too_few_to_calibrate() -> None:
    fitted = fit_tabular(ROWS, FRAUDS, inputs=INPUTS)
    with pytest.raises(ReaderError, match="too few to calibrate"):
        fitted.calibrated(ROWS[:10], [True, False] * 5)
    with pytest.raises(ReaderError, match="is not calibrated"):
        fitted.reader()
