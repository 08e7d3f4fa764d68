"""Measures fitted readers and the decisions that follow from them on labels, compared with simpler ways."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from sds.definitions.definition import LabelledCase
from sds.judgement import metrics
from sds.judgement.asking import language_model
from sds.judgement.evaluation import baselines
from sds.judgement.evaluation.baselines import NO_SKLEARN
from sds.judgement.evaluation.injections import injected
from sds.judgement.evaluation.splits import held
from sds.judgement.fit import Parts, divided, input_of, labelled_texts, learned
from sds.judgement.fitting import SEED, FitsTable, FitsText, Progress, Row
from sds.judgement.judging import Judge, Judged, Readings, score_of
from sds.judgement.labels import PARTS, YES, labels_hash, parted
from sds.judgement.scoring import decision_scores, enumeration_scores, money, of_scores, score_scores, texts_of
from sds.kernel.contract.schema import Contract
from sds.kernel.errors import UsageError
from sds.models.protocol import BackendError
from sds.models.readers.protocol import Reader
from sds.policy.judgement import Judgement, Threshold
from sds.policy.readers import Answers

ALL = "all"
OTHER_LABELS = "the labels are not those of the fit: the reader may have learned some of these texts"
OTHER_THRESHOLDS = "there are no thresholds for this policy: kinds that max_error limits escalate"


@dataclass(frozen=True, slots=True)
class Beside:
    """Baselines, each of which may be missing. `table`: for boosting; `head`: the quick step of a fit, a head on the
    untuned encoder; `model`: the language model's answers by reading.
    """

    table: FitsTable | None = None
    head: FitsText | None = None
    model: Callable[[], Mapping[str, Answers]] | None = None
    now_ms: int = 0


def evaluate(
    contract: Contract,
    judgement: Judgement,
    cases: Sequence[LabelledCase],
    *,
    part: str,
    beside: Beside,
    on_progress: Progress,
) -> dict[str, Any]:
    """Return everything that `sds eval` shows, as JSON data. Raises UsageError where the part holds no label."""
    cases = parted(contract, cases)
    chosen = [case for case in cases if part in (ALL, case.part)]
    if not chosen:
        raise UsageError(f"no label is in part `{part}`", hint=f"--part {', '.join((*PARTS, ALL))}")
    return _Evaluation(contract, judgement, cases, chosen, part, beside, on_progress).document()


class _Evaluation:
    def __init__(
        self,
        contract: Contract,
        judgement: Judgement,
        cases: Sequence[LabelledCase],
        chosen: Sequence[LabelledCase],
        part: str,
        beside: Beside,
        on_progress: Progress,
    ) -> None:
        self._contract, self._judgement, self._all, self._cases = contract, judgement, cases, list(chosen)
        self._part, self._beside, self._progress = part, beside, on_progress
        self._parts: Parts = divided(contract, cases)
        self._readings = Readings(contract, judgement.readers)
        self._judge = Judge(contract, self._readings)
        self._thresholds: Mapping[str, Threshold] = judgement.thresholds or {}
        self._notices = list(judgement.notices)
        self._rivals = dict[str, Readings]()

    def document(self) -> dict[str, Any]:
        judged = self._judge.all(self._cases, self._progress, f"decisions: {self._part}")
        self._rivals = self._rival_readers()
        fitted_on = self._judgement.manifest.provenance.get("labels_sha256")
        if fitted_on != labels_hash(self._all):
            self._notices.append(OTHER_LABELS)
        if self._contract.max_error and self._judgement.thresholds is None:
            self._notices.append(OTHER_THRESHOLDS)
        return {
            "gate": self._contract.gate,
            "part": self._part,
            "cases": len(self._cases),
            "fitted": {"judgement": self._judgement.sha256, **self._judgement.manifest.provenance},
            "readings": self._of_readings(),
            "decisions": self._of_decisions(judged),
            "splits": self._splits(),
            "orders": injected(self._contract, self._judge, judged, self._thresholds, self._progress),
            "notices": self._notices,
        }

    def _labelled(self, cases: Sequence[LabelledCase], name: str) -> list[LabelledCase]:
        return [case for case in cases if name in case.readings]

    def _of_readings(self) -> dict[str, dict[str, Any]]:
        """Return the measures by reading and by reader, `fitted` first."""
        found = dict[str, dict[str, Any]]()
        for name, spec in self._contract.readings.items():
            cases = self._labelled(self._cases, name)
            if spec.values:
                found[name] = {
                    who: enumeration_scores(self._contract, readings, cases, name)
                    for who, readings in {"fitted": self._readings, **self._rivals}.items()
                }
            else:
                found[name] = self._of_score(name, cases)
        return found

    def _of_score(self, name: str, cases: Sequence[LabelledCase]) -> dict[str, Any]:
        found, said = {"fitted": score_scores(self._readings, cases, name)}, [case for case in cases if case.fields]
        boosted = self._boosting(name, said) if said else None
        return found if boosted is None else {**found, "boosting": boosted}

    def _boosting(self, name: str, cases: Sequence[LabelledCase]) -> dict[str, Any] | None:
        """Return the measures of boosting over the fields alone, on the same rows; None where it cannot be fitted here."""
        train, tuning = (
            [case for case in self._labelled(each, name) if case.fields]
            for each in (self._parts.train, self._parts.tuning)
        )
        if self._beside.table is None or not train or not tuning:
            return None
        inputs = [input_of(self._contract, path) for path in self._contract.readings[name].score]
        inputs = [each for each in inputs if each.type != "reading"]
        rows: list[Row] = [(case.fields, {}) for case in train]
        truth = [case.readings[name] == YES for case in train]
        try:
            fitted = self._beside.table(rows, truth, inputs=inputs, seed=SEED, on_progress=self._progress)
            reader = fitted.calibrated(
                [(case.fields, {}) for case in tuning], [case.readings[name] == YES for case in tuning]
            ).reader()
        except BackendError as error:
            self._notices.append(f"the baseline of boosting is not measured: {error}")
            return None
        scores = np.array([score_of(reader.read("", case.fields, {})) for case in cases])
        return of_scores(cases, scores, name)

    def _rival_readers(self) -> dict[str, Readings]:
        """Return the other readers of the enumerations. A score keeps its fitted reader, over what these read."""
        names = [name for name, spec in self._contract.readings.items() if spec.values]
        texts = {name: learned(self._contract, self._parts, name) for name in names}
        found = dict[str, dict[str, Reader]]()
        if names and all(len({case.readings[name] for case in texts[name]}) > 1 for name in names):
            found["majority"] = {name: baselines.majority(self._contract, texts[name], name) for name in names}
            if find_spec("sklearn") is None:
                self._notices.append(NO_SKLEARN)
            else:
                found["tfidf"] = {name: baselines.tfidf(self._contract, texts[name], name) for name in names}
            if self._beside.head is not None and (heads := self._heads(self._beside.head, texts)) is not None:
                found["head"] = heads
        if names and self._beside.model is not None:
            answers, now = self._beside.model(), self._beside.now_ms
            found["model"] = {name: language_model(self._contract, answers[name], name, now_ms=now) for name in names}
        return {who: Readings(self._contract, {**self._judgement.readers, **readers}) for who, readers in found.items()}

    def _heads(self, fit: FitsText, texts: Mapping[str, Sequence[LabelledCase]]) -> dict[str, Reader] | None:
        """Return a quick reader of each enumeration; None, and a notice, where there are too few labels for one."""
        try:
            return {name: self._head(fit, cases, name) for name, cases in texts.items()}
        except BackendError as error:
            self._notices.append(f"the baseline of a head on the unchanged encoder is not measured: {error}")
            return None

    def _head(self, fit: FitsText, cases: Sequence[LabelledCase], name: str) -> Reader:
        """Return a reader that is fitted in seconds, on the same texts as the fitted one, and calibrated on the same."""
        tuning = texts_of(self._contract, self._parts.tuning, name)
        fitted = fit(
            *labelled_texts(self._contract, cases, name),
            names=tuple(self._contract.readings[name].values),
            seed=SEED,
            on_progress=self._progress,
        )
        return fitted.calibrated(*labelled_texts(self._contract, tuning, name)).reader()

    def _of_decisions(self, judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
        """Return the measures by decider: the policy under its thresholds, the policy without bounds, and others."""
        if not judged:
            return {}
        unbounded = self._contract.model_copy(update={"max_error": None})
        found = {
            "fitted": {
                **decision_scores(self._contract, judged, self._thresholds),
                **_curves(judged),
                **self._divided(judged),
            },
            "fitted_unbounded": decision_scores(unbounded, judged, {}),
        }
        for who, readings in self._rivals.items():
            if who != "majority":
                others = Judge(self._contract, readings).all(self._cases, self._progress, f"decisions: {who}")
                found[who] = decision_scores(unbounded, others, {})
        most = Counter(each.truth[0] for each in judged).most_common(1)[0][0]
        pays = [baselines.always_pay(self._contract, self._judge.envelope(each.case)) for each in judged]
        found["always_pay"] = self._without_reading(judged, pays)
        found["majority"] = self._without_reading(judged, [most] * len(judged))
        return found

    def _divided(self, judged: Sequence[Judged]) -> dict[str, Any]:
        """Return the measures of the decisions by style, and by true value of each enumeration."""
        names = [name for name, spec in self._contract.readings.items() if spec.values]
        styles, classes = (
            defaultdict[str, list[Judged]](list),
            {name: defaultdict[str, list[Judged]](list) for name in names},
        )
        for each in judged:
            styles[each.case.style].append(each)
            for name in names:
                classes[name][each.case.readings.get(name, "")].append(each)
        return {"styles": self._each(styles), "classes": {name: self._each(found) for name, found in classes.items()}}

    def _each(self, groups: Mapping[str, Sequence[Judged]]) -> dict[str, dict[str, Any]]:
        named = {name: judged for name, judged in sorted(groups.items()) if name}
        return {name: decision_scores(self._contract, judged, self._thresholds) for name, judged in named.items()}

    def _without_reading(self, judged: Sequence[Judged], kinds: Sequence[str]) -> dict[str, Any]:
        """Return the measures of kinds that were chosen without reading anything."""
        wrong = [(kind, each) for kind, each in zip(kinds, judged, strict=True) if kind != each.truth[0]]
        rate = round(len(wrong) / len(judged), 4)
        return {
            "cases": len(judged),
            "decided": len(judged),
            "coverage": 1.0,
            "wrong": len(wrong),
            "error": rate,
            "agreement": round(1 - rate, 4),
            **money(self._contract, wrong),
        }

    def _splits(self) -> list[dict[str, Any]]:
        if self._contract.max_error is None:
            return []
        tuning, held_out, test = (
            self._judge.all(cases, self._progress, f"splits: {what}")
            for cases, what in (
                (self._parts.tuning, "to tune"),
                (self._parts.held_out, "held out"),
                (self._parts.test, "test"),
            )
        )
        if not held_out or not test:
            return []
        return held(self._contract, tuning, [*held_out, *test], len(held_out), seed=SEED)


def _curves(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return the risk-coverage curve and the bins of a reliability diagram, over the cases that would be decided."""
    decided = [each for each in judged if each.decided is not None]
    if not decided:
        return {"risk_coverage": [], "reliability": [], "ece": None}
    confidences = np.array([each.confidence for each in decided])
    wrong = np.array([each.wrong for each in decided], dtype=np.bool_)
    return {
        "risk_coverage": metrics.risk_coverage(confidences, wrong, len(judged)),
        "reliability": metrics.bins_of(confidences, ~wrong),
        **metrics.calibration_error(confidences, ~wrong),
    }
