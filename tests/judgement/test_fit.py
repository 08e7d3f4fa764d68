"""A fit gives one folder that the engine opens, made of what its labels say and of nothing it should not have seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sds.definitions.definition import LabelledCase
from sds.judgement.fit import TUNING_MIN, divided, fit_gate
from sds.judgement.labels import parted
from sds.kernel.errors import UsageError
from sds.models.readers.protocol import ReaderError
from sds.policy import judgement
from sds.policy.judgement import FILE, open_judgement, read_manifest
from sds.policy.readers import as_read
from tests.judgement.claims import CLAIMS, Calls, cases, contract, fitters, opened, quiet, scored


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open what these fitters export where the engine opens readers."""
    monkeypatch.setattr(judgement, "open_reader", opened)


def test_what_was_fitted_is_opened_by_the_engine_with_its_thresholds(tmp_path: Path) -> None:
    made = fit_gate(contract(), cases(1600, noise=0.01), fitters(), out=tmp_path / "out", on_progress=quiet)
    found = open_judgement(tmp_path / "out", contract())
    assert {"cause"} == set(found.readers)
    assert {"PAY", "DENY"} == set(found.thresholds or {})
    assert (found.thresholds or {})["PAY"].least is not None
    assert made.scores["test"]["decisions"]["error"] <= 0.05
    assert 0.2 < made.shares["cause"]["storm"] < 0.5


def test_the_same_labels_give_the_same_folder_to_the_byte(tmp_path: Path) -> None:
    for name in ("one", "two"):
        fit_gate(contract(), cases(400), fitters(), out=tmp_path / name, on_progress=quiet)
    assert (tmp_path / "one" / FILE).read_bytes() == (tmp_path / "two" / FILE).read_bytes()


def test_where_it_comes_from_is_told(tmp_path: Path) -> None:
    fit_gate(contract(), cases(400), fitters(), out=tmp_path / "out", on_progress=quiet)
    said = read_manifest(tmp_path / "out")[0].provenance
    assert contract().hash == said["contract"]["hash"]
    assert {"name": "words", "sha256": "0" * 64} == said["base"]
    assert {"labels_sha256", "split_sha256", "seed", "versions", "counts", "fitted"} <= said.keys()
    assert 400 == sum(said["counts"]["cases"].values())


def test_what_tests_thresholds_neither_learned_nor_calibrated_and_the_test_part_did_nothing(tmp_path: Path) -> None:
    calls, given = Calls(), cases(800)
    fit_gate(contract(), given, fitters(calls), out=tmp_path / "out", on_progress=quiet)
    parts = divided(contract(), given)
    learned = set(calls.texts[0])
    texts = [{as_read(contract(), case.text) for case in part} for part in (parts.tuning, parts.held_out, parts.test)]
    assert learned == {as_read(contract(), case.text) for case in parts.train}
    assert all(not learned & each for each in texts)
    assert not texts[0] & texts[1]
    assert len(texts[0]) >= TUNING_MIN


def test_many_cases_of_few_texts_are_halved_text_by_text() -> None:
    """Payments share their texts: it is the cases that are many enough to calibrate on half of them."""
    few = [replace(case, part="calibrate") for case in cases(60)]
    parts = divided(contract(), [replace(case, decision=kind) for case in few for kind in ("PAY", "DENY") * 10])
    texts = [{as_read(contract(), case.text) for case in each} for each in (parts.tuning, parts.held_out)]
    assert not texts[0] & texts[1]
    assert abs(len(texts[0]) - len(texts[1])) <= 1


def test_a_text_that_is_in_a_later_part_is_not_learned_though_its_row_is(tmp_path: Path) -> None:
    calls, given = Calls(), parted(scored(), cases(400, risk=True))
    again = next(case for case in given if case.part == "train")
    fit_gate(
        scored(),
        [*given, replace(again, part="test", fields={})],
        fitters(calls),
        out=tmp_path / "o",
        on_progress=quiet,
    )
    assert as_read(scored(), again.text) not in calls.texts[0]
    assert len(calls.rows[0]) == len([case for case in given if case.part == "train"]) == len(calls.texts[0]) + 1


def test_a_score_learns_from_readings_of_texts_that_their_reader_has_not_learned(tmp_path: Path) -> None:
    calls = Calls()
    fit_gate(scored(), cases(900, risk=True), fitters(calls), out=tmp_path / "out", on_progress=quiet)
    whole, *folds = calls.texts
    assert 3 == len(folds)
    assert all(len(fold) < len(whole) for fold in folds)
    assert set(whole) == set().union(*folds)
    learned, calibrated = calls.rows[0], calls.tuned[0]
    assert {("trip.delay_min", "int", ()), ("cause", "reading", ("fault", "storm", "none"))} == set(calls.inputs[0])
    assert all({"fault", "storm", "none"} == set(readings["cause"]) for _, readings in [*learned, *calibrated])
    certain = [max(readings["cause"].values()) for _, readings in learned]
    assert min(certain) < 1.0


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (cases(10), "`cause` has too few labels to learn"),
        ([replace(case, readings={"cause": "fault"}) for case in cases(400)], "to learn storm 0, none 0"),
        ([replace(case, readings={}, decision="PAY") for case in cases(50)], "to learn fault 0, storm 0, none 0"),
        ([replace(case, part="train") for case in cases(400)], "to calibrate 0"),
    ],
)
def test_labels_of_which_no_reader_can_be_made_are_refused(
    tmp_path: Path, labels: list[LabelledCase], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        fit_gate(contract(), labels, fitters(), out=tmp_path / "out", on_progress=quiet)
    assert "sds label claims --reading cause" in refused.value.hint
    assert [] == list(tmp_path.iterdir())


def test_a_contract_without_readings_is_refused(tmp_path: Path) -> None:
    text = CLAIMS.partition("readings:")[0]
    with pytest.raises(UsageError, match="has no readings to fit"):
        fit_gate(contract(text), cases(100), fitters(), out=tmp_path / "out", on_progress=quiet)


def test_with_too_few_labels_for_the_bound_it_fits_and_says_what_is_missing(tmp_path: Path) -> None:
    made = fit_gate(contract(), cases(300), fitters(), out=tmp_path / "out", on_progress=quiet)
    assert [None, None] == [each.least for each in made.thresholds.values()]
    assert all(each.missing > 0 for each in made.thresholds.values())


def test_an_earlier_folder_is_replaced_and_something_else_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for count in (300, 400):
        fit_gate(contract(), cases(count), fitters(), out=out, on_progress=quiet)
    assert 400 == sum(read_manifest(out)[0].provenance["counts"]["cases"].values())
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("one")
    with pytest.raises(UsageError, match="holds no fitted readers"):
        fit_gate(contract(), cases(300), fitters(), out=other, on_progress=quiet)
    assert ["chapter.txt"] == [each.name for each in other.iterdir()]
    assert {"out", "thesis"} == {each.name for each in tmp_path.iterdir()}


def test_a_fit_that_fails_leaves_the_earlier_folder_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fit_gate(contract(), cases(300), fitters(), out=out, on_progress=quiet)
    before = (out / FILE).read_bytes()

    def fails(*given: object, **how: object) -> object:
        raise ReaderError("the encoder is not here", hint="install it")

    with pytest.raises(UsageError, match="cannot be fitted: the encoder is not here") as refused:
        fit_gate(contract(), cases(300), replace(fitters(), text=fails), out=out, on_progress=quiet)  # type: ignore[arg-type]
    assert "install it" == refused.value.hint
    assert before == (out / FILE).read_bytes()
    assert ["out"] == [each.name for each in tmp_path.iterdir()]


def test_what_a_killed_fit_left_is_gone_after_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / ".out-abcd1234"
    left.mkdir()
    (left / "model.onnx").write_bytes(b"half of it")
    fit_gate(contract(), cases(300), fitters(), out=tmp_path / "out", on_progress=quiet)
    assert ["out"] == [each.name for each in tmp_path.iterdir()]


def test_one_byte_of_a_reader_that_changed_is_refused(tmp_path: Path) -> None:
    fit_gate(contract(), cases(300), fitters(), out=tmp_path / "out", on_progress=quiet)
    reader = tmp_path / "out" / "cause" / "reader.json"
    reader.write_bytes(reader.read_bytes().replace(b"brake", b"brakf", 1))
    with pytest.raises(UsageError, match="is not what was fitted") as refused:
        open_judgement(tmp_path / "out", contract())
    assert refused.value.hint
