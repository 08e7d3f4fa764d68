"""Scores fitted readers and their decisions on labelled cases: turns cases into arrays for `metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sds.definitions.definition import LabelledCase
from sds.judgement import metrics
from sds.judgement.bounds import is_decided
from sds.judgement.judging import Judged, Readings, labelled, likeliest, score_of, true_values
from sds.judgement.labels import YES
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.policy import policy_rules
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import ESCALATE
from sds.policy.judgement import Threshold
from sds.policy.readers import as_read

GROUPED_ON = 500  # at most so many cases are used to group values
PAID, REFUSED = "wrongly_paid_minor", "wrongly_refused_minor"


def texts_of(contract: Contract, cases: Sequence[LabelledCase], name: str) -> list[LabelledCase]:
    """Return one case for each text with a label for an enumeration."""
    found = {as_read(contract, case.text): case for case in cases if name in case.readings}
    return list(found.values())


def enumeration_scores(
    contract: Contract, readings: Readings, cases: Sequence[LabelledCase], name: str
) -> dict[str, Any]:
    """Return the measures of an enumeration on texts, each counted once, and those of each style."""
    values, said = tuple(contract.readings[name].values), texts_of(contract, cases, name)
    if not said:
        return {"cases": 0}
    found = [readings.of_text(name, case.text) for case in said]
    probabilities = np.array([[each.probabilities[value] for value in values] for each in found])
    truth = [case.readings[name] for case in said]
    read = [likeliest(each) for each in found]
    right = np.array([each == value for each, value in zip(read, truth, strict=True)])
    familiar = np.array([each.familiar for each in found])
    styles = np.array([case.style for case in said])
    return {
        **metrics.of_enumeration(truth, probabilities, values),
        **_of_groups(same_to_the_policy(contract, name, cases), truth, read),
        "values": list(values),
        "familiar": round(float(familiar.mean()), 4),
        "accuracy_of_familiar": round(float(right[familiar].mean()), 4) if familiar.any() else None,
        "styles": {style: _of_style(right[styles == style]) for style in sorted(set(styles)) if style},
        "reliability": metrics.bins_of(probabilities.max(axis=1), right),
    }


def same_to_the_policy(contract: Contract, name: str, cases: Sequence[LabelledCase]) -> list[list[str]]:
    """Return the values of an enumeration in groups: the policy decides the same for all values of a group on these cases."""
    rules, found, fields = policy_rules(contract), dict[tuple[object, ...], list[str]](), Rules(contract)
    said = (case for case in cases if case.fields and all(each in case.readings for each in contract.readings))
    known = [case for case in said if not fields.faults(case.fields)]
    for value in contract.readings[name].values:
        decisions = tuple(
            rules.propose(case.fields, true_values(contract, case) | {name: value}).decision
            for case in known[:GROUPED_ON]
        )
        found.setdefault(decisions, []).append(value)
    return list(found.values()) if known else []


def _of_groups(groups: Sequence[Sequence[str]], truth: Sequence[str], read: Sequence[str]) -> dict[str, Any]:
    if not groups:
        return {}
    group_of = {value: place for place, group in enumerate(groups) for value in group}
    right = [group_of[each] == group_of[value] for each, value in zip(read, truth, strict=True)]
    return {"groups": [list(group) for group in groups], "accuracy_of_groups": round(float(np.mean(right)), 4)}


def _of_style(right: NDArray[np.bool_]) -> dict[str, Any]:
    return {"cases": len(right), "accuracy": round(float(right.mean()), 4)}


def score_scores(readings: Readings, cases: Sequence[LabelledCase], name: str) -> dict[str, Any]:
    """Return the measures of a score on cases with fields."""
    said = [case for case in cases if name in case.readings and case.fields]
    if not said:
        return {"cases": 0}
    scores = np.array([score_of(readings.of_case(case)[name]) for case in said])
    return of_scores(said, scores, name)


def of_scores(cases: Sequence[LabelledCase], scores: NDArray[np.float64], name: str) -> dict[str, Any]:
    """Return the measures of given scores of cases."""
    truth = np.array([case.readings[name] == YES for case in cases])
    amounts = np.array([case.amount_minor for case in cases], dtype=np.float64)
    lost = metrics.money_lost(truth, scores, amounts)
    return {
        **metrics.of_score(truth, scores),
        "lost_minor_at_1pct_held": round(lost),
        "at_stake_minor": round(float(amounts[truth].sum())),
        "reliability": metrics.bins_of(scores, truth),
    }


def decision_scores(
    contract: Contract, judged: Sequence[Judged], thresholds: Mapping[str, Threshold]
) -> dict[str, Any]:
    """Return the measures of decisions: how many are made, and how many of these are wrong, in cases and in money."""
    if not judged:
        return {"cases": 0}
    made = [each for each in judged if is_decided(each, thresholds, contract)]
    wrong = [each for each in made if each.wrong]
    return {
        "cases": len(judged),
        "decided": len(made),
        "coverage": _share(len(made), len(judged)),
        "coverage_95": metrics.interval(len(made), len(judged)),
        "wrong": len(wrong),
        "error": _share(len(wrong), len(made)),
        "error_95": metrics.interval(len(wrong), len(made)),
        "agreement": _share(sum(each.right for each in judged), len(judged)),
        "agreement_95": metrics.interval(sum(each.right for each in judged), len(judged)),
        "escalated": _reasons(contract, judged, thresholds),
        "kinds": _of_kinds(made),
        **money(contract, [(each.decided[0] if each.decided else ESCALATE, each) for each in wrong]),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _reasons(contract: Contract, judged: Sequence[Judged], thresholds: Mapping[str, Threshold]) -> dict[str, int]:
    why = [each.why or "UNCERTAIN" for each in judged if not is_decided(each, thresholds, contract)]
    return {code: why.count(code) for code in sorted(set(why))}


def _of_kinds(made: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    kinds = [each.decided[0] for each in made if each.decided]
    wrong = [each.decided[0] for each in made if each.decided and each.wrong]
    return {
        kind: {
            "decided": kinds.count(kind),
            "wrong": wrong.count(kind),
            "error": _share(wrong.count(kind), kinds.count(kind)),
        }
        for kind in sorted(set(kinds))
    }


def money(contract: Contract, wrong: Sequence[tuple[str, Judged]]) -> dict[str, int]:
    """Return the cost of wrong decisions in minor units: wrong payments, and refusals of cases that should have been paid.

    `wrong`: the wrong kind, with its case. A case's `amount_minor` is the amount at stake.
    """
    pays = {name for name, kind in contract.kinds.items() if kind.spends is not None}
    return {
        PAID: sum(each.case.amount_minor for kind, each in wrong if kind in pays),
        REFUSED: sum(
            each.case.amount_minor for kind, each in wrong if kind == contract.refusal and each.truth[0] in pays
        ),
    }


def reading_scores(contract: Contract, readings: Readings, cases: Sequence[LabelledCase], part: str) -> dict[str, Any]:
    """Return the measures of every reading on one part."""
    return {
        name: enumeration_scores(contract, readings, labelled(cases, name, part), name)
        if spec.values
        else score_scores(readings, labelled(cases, name, part), name)
        for name, spec in contract.readings.items()
    }
