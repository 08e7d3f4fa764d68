"""Measures how often a `max_error` holds: thresholds are chosen on random halves and checked on the other half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sds.judgement import thresholds
from sds.judgement.bounds import Group, groups_of, sequence_of
from sds.judgement.judging import Judged
from sds.kernel.contract.schema import Contract

SPLITS = 200


def held(
    contract: Contract,
    tuning: Sequence[Judged],
    cases: Sequence[Judged],
    to_choose: int,
    *,
    seed: int,
    splits: int = SPLITS,
) -> list[dict[str, Any]]:
    """Return for each group of kinds the share of splits in which at most `max_error` of the decided rest was wrong.

    `cases`: the held-out and the test part. In each split, `to_choose` of them choose the threshold, which is checked
    on the rest. The rest is finite: where the true rate is near the bound, the rate of the rest is sometimes above it.
    `coverage`: the decided share of the rest's cases that the group would decide if they were certain enough.
    """
    found, of_each = list[dict[str, Any]](), to_choose / len(tuning) if tuning else 0.0
    for group in groups_of(contract):
        rates, covered, without = _over(group, cases, sequence_of(group, tuning, of_each), to_choose, seed, splits)
        found.append({
            "kinds": list(group.kinds),
            "max_error": group.max_error,
            "splits": splits,
            "held": float(np.mean([rate <= group.alpha for rate in rates])),
            "error_mean": round(float(np.mean(rates)), 4),
            "coverage_mean": round(float(np.mean(covered)), 4),
            "without_threshold": without,
        })  # fmt: skip
    return found


def _over(
    group: Group, cases: Sequence[Judged], tested: Sequence[float], to_choose: int, seed: int, splits: int
) -> tuple[list[float], list[float], int]:
    """Return for each split the wrong share of the decided rest and the decided share; and how many had no threshold."""
    rng, rates, covered, without = np.random.default_rng(seed), list[float](), list[float](), 0
    confidences = np.array([each.confidence for each in cases])
    wrong = np.array([each.wrong for each in cases], dtype=np.bool_)
    ours = np.array([group.decides(each) for each in cases], dtype=np.bool_)
    for _ in range(splits):
        order = rng.permutation(len(cases))
        chooses, rest = (part[ours[part]] for part in (order[:to_choose], order[to_choose:]))
        how = {"alpha": group.alpha, "delta": group.delta}
        least = thresholds.choose(confidences[chooses], wrong[chooses], tested, **how).least
        made = rest[confidences[rest] >= least] if least is not None else rest[:0]
        rates.append(float(wrong[made].mean()) if len(made) else 0.0)
        covered.append(len(made) / len(rest) if len(rest) else 0.0)
        without += least is None
    return rates, covered, without
