"""What `sds eval` measures, beside what, and that it says what it cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sds.judgement.evaluation import baselines
from sds.judgement.evaluation import evaluate as evaluation
from sds.judgement.evaluation import page as pages
from sds.judgement.evaluation.evaluate import OTHER_LABELS, Beside, evaluate
from sds.judgement.evaluation.page import page
from sds.judgement.evaluation.splits import held
from sds.judgement.fit import divided, fit_gate, learned
from sds.kernel.errors import UsageError
from sds.models.readers.protocol import ReaderError, Reading
from sds.policy import judgement
from sds.policy.judgement import Judgement, open_judgement
from tests.judgement.claims import CLAIMS, Calls, cases, contract, fitters, opened, quiet, scored

GIVEN = cases(1200, noise=0.02)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judgement]:
    out = tmp_path_factory.mktemp("fitted") / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(judgement, "open_reader", opened)
        fit_gate(contract(), GIVEN, fitters(), out=out, on_progress=quiet)
        yield open_judgement(out, contract())


@pytest.fixture(scope="module")
def document(fitted: Judgement) -> dict[str, Any]:
    return evaluate(contract(), fitted, GIVEN, part="test", beside=Beside(), on_progress=quiet)


def test_readings_are_measured_beside_simpler_readers(document: dict[str, Any]) -> None:
    found = document["readings"]["cause"]
    assert {"fitted", "majority", "tfidf"} == found.keys()
    assert found["fitted"]["accuracy"] > 0.95
    assert found["majority"]["accuracy"] < 0.45
    assert {"plain", "typos"} == found["fitted"]["styles"].keys()
    assert {document["cases"]} == ({each["cases"] for each in found.values()})


def test_values_that_no_decision_tells_apart_are_one_group(fitted: Judgement) -> None:
    alike = CLAIMS.replace("'reading.cause == \"storm\"'", "\"reading.cause in ['storm', 'none']\"")
    terms = contract(alike)
    same = replace(fitted, thresholds=None)
    found = evaluate(terms, same, GIVEN, part="test", beside=Beside(), on_progress=quiet)["readings"]["cause"]["fitted"]
    assert [["fault"], ["storm", "none"]] == found["groups"]
    assert found["accuracy_of_groups"] >= found["accuracy"]


def test_decisions_are_measured_with_the_thresholds_and_beside_paying_always(document: dict[str, Any]) -> None:
    found = document["decisions"]
    assert {"fitted", "fitted_unbounded", "tfidf", "always_pay", "majority"} == found.keys()
    assert found["fitted"]["error"] <= 0.05
    assert found["fitted"]["agreement"] > found["always_pay"]["agreement"] + 0.06
    assert found["always_pay"]["wrongly_paid_minor"] == 1000 * found["always_pay"]["wrong"]
    assert 1.0 == found["always_pay"]["coverage"]
    assert found["fitted"]["coverage"] + sum(found["fitted"]["escalated"].values()) / found["fitted"][
        "cases"
    ] == pytest.approx(1, abs=1e-3)


def test_decisions_and_their_money_are_measured_by_style_and_by_what_is_stated(
    fitted: Judgement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    given = cases(300, seed=9, noise=0.6)
    found = evaluate(contract(), fitted, given, part="all", beside=Beside(), on_progress=quiet)["decisions"]["fitted"]
    assert ({"plain", "typos"}, {"fault", "storm", "none"}) == (set(found["styles"]), set(found["classes"]["cause"]))
    for parts in (found["styles"], found["classes"]["cause"]):
        for measure in ("cases", "wrong", "wrongly_paid_minor", "wrongly_refused_minor"):
            assert found[measure] == sum(each[measure] for each in parts.values())
    assert min(found["wrongly_paid_minor"], found["wrongly_refused_minor"]) > 0


def test_the_bound_is_kept_in_as_many_random_splits_as_is_stated(document: dict[str, Any]) -> None:
    (found,) = document["splits"]
    assert (200, "0.05", ["DENY", "PAY"]) == (found["splits"], found["max_error"], found["kinds"])
    assert found["held"] >= 0.95
    assert found["coverage_mean"] > 0.8


def test_thresholds_chosen_anew_never_decide_where_readings_are_no_better_than_chance(
    fitted: Judgement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)  # TF-IDF takes its time
    given = cases(800, noise=0.6)
    found = evaluate(contract(), fitted, given, part="test", beside=Beside(), on_progress=quiet)
    assert 200 == found["splits"][0]["without_threshold"]


def test_without_cases_to_choose_on_nothing_is_split() -> None:
    found = held(contract(), [], [], 0, seed=1, splits=3)
    assert [(1.0, 3)] == [(each["held"], each["without_threshold"]) for each in found]


def test_labels_other_than_those_of_the_fit_are_said_to_be_others(fitted: Judgement, document: dict[str, Any]) -> None:
    assert [] == document["notices"]
    found = evaluate(contract(), fitted, cases(200, seed=9), part="all", beside=Beside(), on_progress=quiet)
    assert OTHER_LABELS in found["notices"]


def test_labels_without_fields_say_nothing_of_decisions(fitted: Judgement) -> None:
    texts = [replace(case, fields={}) for case in cases(100, seed=9)]
    found = evaluate(contract(), fitted, texts, part="all", beside=Beside(), on_progress=quiet)
    assert ({}, []) == (found["decisions"], found["splits"])
    assert 100 == found["readings"]["cause"]["fitted"]["cases"]


def test_a_part_without_labels_is_refused(fitted: Judgement) -> None:
    train = [replace(case, part="train") for case in cases(100)]
    with pytest.raises(UsageError, match="no label is in part `test`"):
        evaluate(contract(), fitted, train, part="test", beside=Beside(), on_progress=quiet)


def test_a_score_is_measured_beside_boosting_over_the_fields_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judgement, "open_reader", opened)
    given = cases(900, risk=True)
    fit_gate(scored(), given, fitters(), out=tmp_path / "out", on_progress=quiet)
    with_fields = open_judgement(tmp_path / "out", scored())
    found = evaluate(scored(), with_fields, given, part="test", beside=Beside(table=fitters().table), on_progress=quiet)
    measured = found["readings"]["risk"]
    assert 1.0 == measured["fitted"]["average_precision"]
    assert measured["boosting"]["average_precision"] < 0.7
    assert measured["fitted"]["lost_minor_at_1pct_held"] < measured["boosting"]["lost_minor_at_1pct_held"]


def test_a_head_on_the_encoder_as_it_is_learns_the_texts_of_the_fit(
    fitted: Judgement,
) -> None:
    calls = Calls()
    beside = Beside(head=fitters(calls).text)
    found = evaluate(contract(), fitted, GIVEN, part="test", beside=beside, on_progress=quiet)
    assert found["readings"]["cause"]["fitted"]["accuracy"] == found["readings"]["cause"]["head"]["accuracy"]
    assert found["decisions"]["fitted_unbounded"] == found["decisions"]["head"]
    (texts,) = calls.texts
    assert set(texts) == {case.text for case in learned(contract(), divided(contract(), GIVEN), "cause")}


def test_labels_that_nothing_can_be_fitted_on_are_measured_without_what_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judgement, "open_reader", opened)

    def too_few(*given: Any, **how: Any) -> Any:
        raise ReaderError("they are too few")

    fit_gate(scored(), cases(900, risk=True), fitters(), out=tmp_path / "out", on_progress=quiet)
    with_fields = open_judgement(tmp_path / "out", scored())
    beside = Beside(table=too_few, head=too_few)
    found = evaluate(scored(), with_fields, cases(40, risk=True), part="all", beside=beside, on_progress=quiet)
    assert 40 == found["readings"]["cause"]["fitted"]["cases"]
    assert ["fitted"] == list(found["readings"]["risk"])
    assert [
        "the baseline of a head on the unchanged encoder is not measured: they are too few",
        OTHER_LABELS,
        "the baseline of boosting is not measured: they are too few",
    ] == found["notices"]


def test_the_language_model_reads_the_same_texts_where_it_is_asked_for(fitted: Judgement) -> None:
    class Answers:
        name = "model"

        def answer(self, packet: Any, found: Any) -> Reading:
            said = packet.texts[-1]
            share = 0.8 if "engine" in said else 0.1
            return Reading({"fault": share, "storm": (1 - share) / 2, "none": (1 - share) / 2}, familiar=True)

    beside = Beside(model=lambda: {"cause": Answers()}, now_ms=1)
    found = evaluate(contract(), fitted, cases(60, seed=4), part="all", beside=beside, on_progress=quiet)
    assert 60 == found["readings"]["cause"]["model"]["cases"]
    assert "model" in found["decisions"]


def test_without_scikit_learn_one_line_says_what_is_not_measured(
    fitted: Judgement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    found = evaluate(contract(), fitted, GIVEN, part="test", beside=Beside(), on_progress=quiet)
    assert [baselines.NO_SKLEARN] == found["notices"]
    assert "tfidf" not in found["readings"]["cause"]


def test_paying_always_chooses_the_first_kind_of_the_authority_that_is_permitted() -> None:
    from sds.kernel.contract.compiler import Rules

    rules, fields = Rules(contract()), {"trip.delay_min": 90, "trip.open_minor": 5000, "trip.known": True}
    assert "PAY" == baselines.always_pay(contract(), rules.envelope(fields))
    assert "DENY" == baselines.always_pay(contract(), rules.envelope(fields | {"trip.known": False}))
    assert "ESCALATE" == baselines.always_pay(contract(), rules.envelope({}))


def test_the_document_is_json_and_the_page_is_one_file_that_asks_no_network(document: dict[str, Any]) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    text = page(json.loads(json.dumps(document)))
    assert 3 == text.count("<svg")
    links = [part for part in ("<script", "<link", "<img", "@import", 'src="') if part in text]
    assert [] == links
    assert "held in" in text
    assert 2 <= text.count("<tr><td>typos</td>")  # of readings, of decisions


def test_without_the_extra_the_page_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--html needs `jinja2`"):
        pages.check_place(Path("page.html"))
