"""Fits the readers of a contract on labels and writes the folder that the engine opens, whole or not at all.

Fitting, calibration and thresholds use different cases. The train part fits. A share of the calibration part calibrates
the readers and proposes the sequence of thresholds; the rest tests these (`thresholds`). The test part only gives
scores. A score that reads an enumeration learns from probabilities of readers that did not learn the text in question.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sds.definitions.definition import LabelledCase
from sds.host import paths
from sds.judgement.asking import AskedModel
from sds.judgement.bounds import chosen
from sds.judgement.cross_fitting import cross_fitted
from sds.judgement.distractions import distractions
from sds.judgement.fitting import SEED, Fitters, Input, Progress, Row, versions
from sds.judgement.judging import Judge, Judged, Readings, labelled, likeliest
from sds.judgement.labels import NO, YES, labels_hash, parted, split_hash
from sds.judgement.scoring import decision_scores, reading_scores, texts_of
from sds.kernel.canonical import digest
from sds.kernel.contract.compiler import parse_type
from sds.kernel.contract.readings import ROOT
from sds.kernel.contract.schema import Contract
from sds.kernel.errors import UsageError, cause_of
from sds.kernel.storage.private_files import working_folder
from sds.models.protocol import BackendError
from sds.models.readers.protocol import Reader
from sds.policy.judgement import (
    CHECKSUM,
    FILE,
    Manifest,
    ModelCalibration,
    Threshold,
    checksum_line,
    readings_hash,
    rules_hash,
)
from sds.policy.readers import as_read

LABELS_MIN = 8  # of each value, in the train part
TUNING_MIN = 20  # cases to calibrate a reading on
MANY = 1_000  # of more calibration cases a half calibrates the readers, of fewer a fifth
_FEW_SHARE, _MANY_SHARE = 0.2, 0.5


@dataclass(frozen=True, slots=True)
class Parts:
    """The cases by purpose: `tuning` calibrates readers, `held_out` tests thresholds, `test` only gives scores."""

    train: list[LabelledCase]
    tuning: list[LabelledCase]
    held_out: list[LabelledCase]
    test: list[LabelledCase]

    @property
    def counts(self) -> dict[str, int]:
        return {name: len(getattr(self, name)) for name in ("train", "tuning", "held_out", "test")}


def divided(contract: Contract, cases: Sequence[LabelledCase]) -> Parts:
    """Return the cases by purpose."""
    cases = parted(contract, cases)
    calibrate = [case for case in cases if case.part == "calibrate"]
    tuning = _tuning(contract, calibrate)
    return Parts(
        train=[case for case in cases if case.part == "train"],
        tuning=[case for case in calibrate if _key(contract, case) in tuning],
        held_out=[case for case in calibrate if _key(contract, case) not in tuning],
        test=[case for case in cases if case.part == "test"],
    )


def learned(contract: Contract, parts: Parts, name: str) -> list[LabelledCase]:
    """Return one case for each text that an enumeration's reader learns: texts of the train part that are in no other part."""
    later = {_text(contract, case) for case in (*parts.tuning, *parts.held_out, *parts.test)}
    return [case for case in texts_of(contract, parts.train, name) if _text(contract, case) not in later]


def labelled_texts(contract: Contract, cases: Sequence[LabelledCase], name: str) -> tuple[list[str], list[str]]:
    """Return the cases' texts as a reader gets them, and the label of each for a reading."""
    return [_text(contract, case) for case in cases], [case.readings[name] for case in cases]


def input_of(contract: Contract, path: str) -> Input:
    """Return an input of a score in the form that the fit takes."""
    if path.startswith(f"{ROOT}."):
        name = path.removeprefix(f"{ROOT}.")
        return Input(name, "reading", tuple(contract.readings[name].values))
    kind = parse_type(path, contract.snapshot[path]).kind
    return Input(path, {"string": "category"}.get(kind.name, kind.name), tuple(sorted(kind.values)))


def _text(contract: Contract, case: LabelledCase) -> str:
    return as_read(contract, case.text)


def _key(contract: Contract, case: LabelledCase) -> str:
    return digest(["tuning", _text(contract, case) or dict(case.fields)])


def _tuning(contract: Contract, calibrate: Sequence[LabelledCase]) -> set[str]:
    """Return the keys of the cases that calibrate the readers: all of them, where no threshold is tested."""
    keys = sorted({_key(contract, case) for case in calibrate})
    if contract.max_error is None:
        return set(keys)
    share = _MANY_SHARE if len(calibrate) > MANY else _FEW_SHARE
    return set(keys[: max(TUNING_MIN, round(share * len(keys)))])


def fit_gate(
    contract: Contract,
    cases: Sequence[LabelledCase],
    fitters: Fitters,
    *,
    out: Path,
    on_progress: Progress,
) -> Manifest:
    """Fit every reading of a contract, choose its thresholds, and put the folder at `out`, replacing an earlier one. Return
    what its manifest says.

    Raises UsageError, in one line, for labels that are too few or one-sided, and where `out` holds something else.
    """
    parts = check_labels(contract, cases, learns=not fitters.asked)
    _refuse_other_folder(out)
    paths.make_private(
        out.parent, hint="name a place that can be written with --out; without it, $SDS_HOME must be writable"
    )
    with working_folder(out.parent, f".{out.name}-") as folder:
        try:
            fitting = _Fitting(contract, parts, fitters, folder, on_progress)
            manifest = fitting.run(labels=labels_hash(cases), split=split_hash(parted(contract, cases)))
        except BackendError as error:
            raise UsageError(f"the readers cannot be fitted: {error}", hint=error.hint) from error
        _write(folder, manifest)
        _publish(folder, out)
    return manifest


def check_labels(contract: Contract, cases: Sequence[LabelledCase], *, learns: bool = True, gate: str = "") -> Parts:
    """Return the cases by purpose. Raises UsageError where they make no reader. `learns`: False where readers only ask.

    `gate`: as a command names it, for the hint; by default by its name.
    """
    _refuse_without_policy(contract)
    parts = divided(contract, cases)
    for name in contract.readings:
        learned_here = learns or not contract.readings[name].values
        _refuse_one_sided(contract, parts, name, learns=learned_here, gate=gate or contract.gate)
    return parts


class _Fitting:
    """One fit. Enumerations come first, because scores may read them."""

    def __init__(self, contract: Contract, parts: Parts, fitters: Fitters, folder: Path, on_progress: Progress) -> None:
        self._contract, self._parts, self._fitters, self._folder = contract, parts, fitters, folder
        self._progress = on_progress
        self._readers, self._sha256 = dict[str, Reader](), dict[str, str]()
        self._counts, self._models = dict[str, dict[str, int]](), dict[str, ModelCalibration]()

    def run(self, *, labels: str, split: str) -> Manifest:
        try:
            for name in sorted(self._contract.readings, key=lambda name: bool(self._contract.readings[name].score)):
                if self._contract.readings[name].values:
                    self._fit_text(name)
                else:
                    self._fit_table(name)
            return self._manifest(labels, split)
        finally:
            for reader in self._readers.values():
                reader.close()

    def _export(self, name: str, fitted: Any) -> None:
        """Write a fitted reader and open it again, so that all further measurements are of what was written."""
        if isinstance(fitted, AskedModel):
            self._models[name], self._readers[name] = fitted.calibration, fitted.reader()
            return
        self._sha256[name] = fitted.export(self._folder / name)
        self._readers[name] = self._fitters.open(self._folder / name, sha256=self._sha256[name])

    def _learned(self, name: str) -> tuple[list[str], list[str]]:
        return labelled_texts(self._contract, learned(self._contract, self._parts, name), name)

    def _tuning(self, name: str) -> tuple[list[str], list[str]]:
        return labelled_texts(self._contract, texts_of(self._contract, self._parts.tuning, name), name)

    def _fit_text(self, name: str) -> None:
        texts, values = self._learned(name)
        tuning = self._tuning(name)
        self._counts[name] = {"train": len(texts), "tuning": len(tuning[0])}
        names = tuple(self._contract.readings[name].values)
        fitted = self._fitters.asked.get(name, self._fitters.text)(
            texts,
            values,
            names=names,
            seed=SEED,
            distractions=distractions(self._contract, name, texts=len(texts)),
            on_progress=_named(self._progress, name),
        )
        self._export(name, fitted.calibrated(*tuning))

    def _fit_table(self, name: str) -> None:
        spec = self._contract.readings[name]
        inputs = [input_of(self._contract, path) for path in spec.score]
        train, tuning = (
            [case for case in each if name in case.readings and case.fields]
            for each in (self._parts.train, self._parts.tuning)
        )
        self._counts[name] = {"train": len(train), "tuning": len(tuning)}
        rows = self._rows(train, inputs, learned=True)
        fitted = self._fitters.table(
            rows, _truth(train, name), inputs=inputs, seed=SEED, on_progress=_named(self._progress, name)
        )
        self._export(name, fitted.calibrated(self._rows(tuning, inputs, learned=False), _truth(tuning, name)))

    def _rows(self, cases: Sequence[LabelledCase], inputs: Sequence[Input], *, learned: bool) -> list[Row]:
        """Return rows of fields and readings; `learned` texts are read by readers that have not learned them."""
        readings = Readings(self._contract, self._readers)
        shares = dict[str, Mapping[str, Mapping[str, float]]]()
        for each in inputs:
            if each.type == "reading":
                texts = sorted({_text(self._contract, case) for case in cases})
                known = self._cross_fitted(each.name) if learned else {}
                unknown = (text for text in texts if text not in known)
                shares[each.name] = {
                    **known,
                    **{text: readings.of_text(each.name, text).probabilities for text in unknown},
                }
        return [
            (case.fields, {name: found[_text(self._contract, case)] for name, found in shares.items()})
            for case in cases
        ]

    def _cross_fitted(self, name: str) -> dict[str, Mapping[str, float]]:
        train = self._learned(name)
        return cross_fitted(
            replace(self._fitters, text=self._fitters.asked.get(name, self._fitters.text)),
            train,
            self._tuning(name),
            names=tuple(self._contract.readings[name].values),
            seed=SEED,
            distractions=distractions(self._contract, name, texts=len(train[0])),
            on_progress=_named(self._progress, f"{name}, for scores"),
        )

    def _manifest(self, labels: str, split: str) -> Manifest:
        readings = Readings(self._contract, self._readers)
        judge = Judge(self._contract, readings)
        tuning, held_out, test = (
            judge.all(cases, self._progress, what)
            for cases, what in (
                (self._parts.tuning, "the sequence of thresholds"),
                (self._parts.held_out, "thresholds"),
                (self._parts.test, "the test part"),
            )
        )
        thresholds = chosen(self._contract, tuning, held_out)
        return Manifest(
            schema=1,
            gate=self._contract.gate,
            readings=readings_hash(self._contract),
            rules=rules_hash(self._contract),
            readers=self._sha256,
            models=self._models,
            thresholds=thresholds,
            shares=self._shares(readings),
            provenance=self._provenance(labels, split, [tuning, held_out, test]),
            scores=self._scores(readings, held_out, test, thresholds),
        )

    def _provenance(self, labels: str, split: str, judged: Sequence[Sequence[Judged]]) -> dict[str, Any]:
        decided = dict(zip(("tuning", "held_out", "test"), map(len, judged), strict=True))
        return {
            "fitted": self._fitters.kind,
            "base": dict(self._fitters.base),
            "contract": {"hash": self._contract.hash, "version": self._contract.version},
            "labels_sha256": labels,
            "split_sha256": split,
            "seed": SEED,
            "versions": versions(),
            "counts": {"cases": self._parts.counts, "readings": self._counts, "decisions": decided},
        }

    def _scores(
        self,
        readings: Readings,
        held_out: Sequence[Judged],
        test: Sequence[Judged],
        thresholds: Mapping[str, Threshold],
    ) -> dict[str, Any]:
        calibrate = [*self._parts.tuning, *self._parts.held_out]
        return {
            part: {
                "readings": reading_scores(self._contract, readings, cases, part),
                "decisions": decision_scores(self._contract, judged, thresholds),
            }
            for part, cases, judged in (("calibrate", calibrate, held_out), ("test", self._parts.test, test))
        }

    def _shares(self, readings: Readings) -> dict[str, dict[str, float]]:
        """Return how often each value of an enumeration is the likeliest in held-out cases, which a monitor expects."""
        cases = [*self._parts.tuning, *self._parts.held_out]
        found = dict[str, dict[str, float]]()
        for name, spec in self._contract.readings.items():
            said = labelled(cases, name, "calibrate")
            if spec.values and said:
                likely = [likeliest(readings.of_text(name, case.text)) for case in said]
                found[name] = {value: round(likely.count(value) / len(likely), 6) for value in spec.values}
        return found


def _named(progress: Progress, name: str) -> Progress:
    return lambda done, total, what: progress(done, total, f"{name}: {what}")


def _truth(cases: Sequence[LabelledCase], name: str) -> list[bool]:
    return [case.readings[name] == YES for case in cases]


def _refuse_without_policy(contract: Contract) -> None:
    if not contract.policy:
        raise UsageError(
            f"the contract of gate `{contract.gate}` has no readings to fit",
            hint="judgement.md of the documentation says how to declare readings and a policy",
        )


def _refuse_other_folder(out: Path) -> None:
    if out.exists() and not (out.is_dir() and ((out / FILE).exists() or not any(out.iterdir()))):
        raise UsageError(f"`{out}` exists, but holds no fitted readers", hint="name another folder with --out")


def _refuse_one_sided(contract: Contract, parts: Parts, name: str, *, learns: bool, gate: str) -> None:
    """Raise UsageError for labels that make no reader: too few of some value, or too few to calibrate on."""
    train, tuning = (_usable_labels(contract, parts, name, part) for part in ("train", "tuning"))
    values = tuple(contract.readings[name].values) or (YES, NO)
    few = [f"{value} {train.count(value)}" for value in values if learns and train.count(value) < LABELS_MIN]
    if few or len(tuning) < TUNING_MIN:
        what = "different texts" if contract.readings[name].values else "cases with all fields"
        why = f"to learn {', '.join(few)}" if few else f"to calibrate {len(tuning)}"
        raise UsageError(
            f"`{name}` has too few labels {why}",
            hint=f"label {LABELS_MIN} or more {what} of each value to learn, {TUNING_MIN} or more to calibrate:"
            f" sds label {gate} --reading {name}",
        )


def _usable_labels(contract: Contract, parts: Parts, name: str, part: Literal["train", "tuning"]) -> list[str]:
    """Return the usable labels of a reading: one for each text, or for a score one for each case with fields."""
    if not contract.readings[name].values:
        cases = parts.train if part == "train" else parts.tuning
        return [case.readings[name] for case in cases if name in case.readings and case.fields]
    texts = learned(contract, parts, name) if part == "train" else texts_of(contract, parts.tuning, name)
    return [case.readings[name] for case in texts]


def _write(folder: Path, manifest: Manifest) -> None:
    data = f"{json.dumps(manifest.model_dump(mode='json', by_alias=True), indent=1, sort_keys=True)}\n".encode()
    for name, content in ((FILE, data), (CHECKSUM, checksum_line(data))):
        with (folder / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _publish(folder: Path, out: Path) -> None:
    """Move the folder to `out`. An earlier one is removed only after that."""
    before = folder.with_name(folder.name + ".before")
    folder.chmod(0o755)
    try:
        if out.exists():
            out.rename(before)
        folder.rename(out)
    except OSError as error:
        if before.exists() and not out.exists():
            before.rename(out)
        raise UsageError(f"`{out}` cannot be written: {cause_of(error)}") from error
    shutil.rmtree(before, ignore_errors=True)
