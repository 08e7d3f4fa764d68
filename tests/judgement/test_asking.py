"""The language model as a reader that labels calibrate: what a fit finds, and what is then opened."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from sds.definitions.definition import LabelledCase
from sds.judgement.asking import asking, calibrated_readers
from sds.judgement.fit import check_labels, fit_gate
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import UsageError
from sds.policy.judgement import Manifest, open_judgement
from sds.policy.opening import open_policy
from tests.judgement.claims import cases, contract, fitters, quiet

VALUES = ("fault", "storm", "none")
SURE, RIGHT = 0.98, 0.7  # how certain the model says it is, and how often it is right


class Boasts:
    """A language model that reads the value its text names, and is always as certain. Of no text it says nothing; where it
    `measures` nothing, the last value.
    """

    def __init__(self, model: str = "boasts", *, measures: bool = True) -> None:
        self.model, self.measures, self.asked = model, measures, list[str]()

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        text = packet.texts[-1]
        self.asked.append(text)
        shares = {value.upper(): SURE if f"says {value} " in text else (1 - SURE) / 2 for value in VALUES}
        if "says" not in text:
            shares = dict.fromkeys(shares, 1 / 3)
        if not self.measures:
            said = max(reversed(shares), key=shares.__getitem__)
            return f'{{"action":"{said}","reason":"READ","context_ref":"{"0" * 64}"}}'.encode(), Decoding(
                alternatives=None
            )
        choice = {"choice": "action", "chosen": "x", "z": 1.0, "probabilities": shares}
        return b"", Decoding(alternatives=(choice,))

    def count_tokens(self, text: str) -> int:
        return len(text)

    def close(self) -> None: ...


def named(count: int) -> list[LabelledCase]:
    """Return labelled claims whose texts name their value as often as the model is right; none is for learning."""
    rng, found = Random(7), list[LabelledCase]()
    for number, case in enumerate(cases(count)):
        value = case.readings["cause"]
        said = value if rng.random() < RIGHT else rng.choice([each for each in VALUES if each != value])
        found.append(replace(case, text=f"{number} says {said} here", part="calibrate" if number % 2 else "test"))
    return found


def fitted(out: Path, given: list[LabelledCase], engine: Boasts) -> Manifest:
    return fit_gate(contract(), given, asking(fitters(), contract(), engine, now_ms=1), out=out, on_progress=quiet)


def test_labels_calibrate_what_the_model_says(tmp_path: Path) -> None:
    engine = Boasts()
    made = fitted(tmp_path / "out", named(800), engine)
    assert ({}, "boasts") == (made.readers, made.models["cause"].model)
    assert ("model", {"name": "boasts"}) == (made.provenance["fitted"], made.provenance["base"])
    assert made.models["cause"].temperature > 2
    scores = made.scores["test"]["readings"]["cause"]
    said = max(mean for mean, _, _ in scores["reliability"])  # all are as sure: bins differ by chance
    assert abs(said - scores["accuracy"]) < 0.1 < SURE - RIGHT  # which it would be as the model says it
    assert len(engine.asked) == len(set(engine.asked))  # each text once, and no text once


def test_what_is_calibrated_reads_with_its_thresholds_and_another_model_without(tmp_path: Path) -> None:
    fitted(tmp_path / "out", named(800), Boasts())
    for model, calibrated in (("boasts", True), ("another", False)):
        opened = open_policy(
            contract(), tmp_path / "out", open_model=lambda model=model: Boasts(model), now_ms=lambda: 1
        )
        with closing(opened) as engine:
            uncalibrated = "no reader is fitted for `cause`: the uncalibrated language model reads it (sds fit GATE)"
            assert calibrated == (uncalibrated not in engine.notices)
            assert calibrated == (engine._thresholds is not None)
            assert f"policy: cause by model:{model}" == engine.model


def test_an_evaluation_asks_the_model_that_was_calibrated_and_no_other(tmp_path: Path) -> None:
    fitted(tmp_path / "out", named(800), Boasts())
    with closing(open_judgement(tmp_path / "out", contract())) as judgement:
        (reader,) = calibrated_readers(contract(), judgement.manifest, Boasts(), now_ms=1).values()
        assert 0.5 < reader.read("it says storm here").probabilities["storm"] < SURE - 0.1
        with pytest.raises(
            UsageError, match="`boasts` was calibrated to read `cause`, but the model here is `another`"
        ):
            calibrated_readers(contract(), judgement.manifest, Boasts("another"), now_ms=1)


def test_to_calibrate_takes_no_label_to_learn_and_some_to_calibrate_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`cause` has too few labels to learn fault 0"):
        check_labels(contract(), named(100))
    check_labels(contract(), named(100), learns=False)
    with pytest.raises(UsageError, match="to calibrate 5"):
        fitted(tmp_path / "out", named(10), Boasts())


def test_one_that_measures_nothing_is_calibrated_by_what_it_says(tmp_path: Path) -> None:
    engine = Boasts(measures=False)
    fitted(tmp_path / "out", named(800), engine)
    with closing(open_judgement(tmp_path / "out", contract())) as judgement:
        (reader,) = calibrated_readers(contract(), judgement.manifest, engine, now_ms=1).values()
    storm, nothing = (reader.read(f"it says {value} here").probabilities for value in ("storm", "none"))
    assert abs(storm["storm"] - RIGHT) < 0.15
    assert [1 / 3] * 3 == pytest.approx(list(nothing.values()))  # it says that of no text, too
