"""The thresholds of a contract: which kinds share one, which cases choose it, and the message where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sds.judgement import thresholds
from sds.judgement.judging import Judged, decided_kinds
from sds.kernel.contract.schema import Contract
from sds.policy.judgement import Threshold


@dataclass(frozen=True, slots=True)
class Group:
    """Kinds under one bound: a kind named in `max_error` has its own, all others share that of the whole gate.

    `delta`: this group's part of the contract's, so that all groups hold together with probability 1 - delta (Bonferroni).
    """

    kinds: tuple[str, ...]
    alpha: float
    delta: float
    max_error: str

    def decides(self, judged: Judged) -> bool:
        return judged.decided is not None and judged.decided[0] in self.kinds


def groups_of(contract: Contract) -> list[Group]:
    """Return the groups of kinds that the policy decides and the contract bounds."""
    bounds = contract.max_error
    if bounds is None:
        return []
    alone = [(kind,) for kind in decided_kinds(contract) if kind in bounds.kinds]
    rest = tuple(kind for kind in decided_kinds(contract) if kind not in bounds.kinds and bounds.any is not None)
    groups = [*alone, *([rest] if rest else [])]
    return [
        Group(kinds, float(share), float(bounds.delta) / len(groups), str(share))
        for kinds in groups
        if (share := bounds.of(kinds[0])) is not None
    ]


def sequence_of(group: Group, tuning: Sequence[Judged], of_each: float) -> tuple[float, ...]:
    """Return the thresholds to test for a group, chosen from cases that will not be tested."""
    return thresholds.sequence(*_arrays(group, tuning), of_each, alpha=group.alpha, delta=group.delta)


def found_for(group: Group, held_out: Sequence[Judged], tested: Sequence[float]) -> thresholds.Found:
    """Return the result of learn-then-test for a group."""
    return thresholds.choose(*_arrays(group, held_out), tested, alpha=group.alpha, delta=group.delta)


def _arrays(group: Group, judged: Sequence[Judged]) -> tuple[thresholds.Floats, thresholds.Flags]:
    """Return the confidences of the cases that a group decides, and which of these are wrong."""
    decided = [each for each in judged if group.decides(each)]
    confidences = np.array([each.confidence for each in decided], dtype=np.float64)
    return confidences, np.array([each.wrong for each in decided], dtype=np.bool_)


def chosen(contract: Contract, tuning: Sequence[Judged], held_out: Sequence[Judged]) -> dict[str, Threshold]:
    """Return the threshold of every bounded kind."""
    of_each = len(held_out) / len(tuning) if tuning else 0.0
    result = dict[str, Threshold]()
    for group in groups_of(contract):
        found = found_for(group, held_out, sequence_of(group, tuning, of_each))
        one = Threshold(
            max_error=group.max_error,
            least=found.least,
            accepted=found.accepted,
            wrong=found.wrong,
            missing=found.missing,
        )
        result |= dict.fromkeys(group.kinds, one)
    return result


def in_words(thresholds_: Mapping[str, Threshold]) -> list[str]:
    """Return a line for each kind: the confidence from which it is decided, or what is missing."""
    return [f"{kind}: {_line(threshold)}" for kind, threshold in sorted(thresholds_.items())]


def _line(of: Threshold) -> str:
    seen = f"{of.wrong} wrong of {of.accepted} held-out cases"
    if of.least is not None:
        return f"decided from confidence {of.least:.4f} on ({seen}; max_error {of.max_error})"
    if of.missing:
        return (
            f"always escalates: it needs at least {of.missing} more held-out cases with fields for max_error"
            f" {of.max_error} ({seen}; a quarter of the labels without `part` is held out)"
        )
    return f"always escalates: it is wrong more often than max_error {of.max_error}, and more labels alone will not change that ({seen})"


def is_decided(judged: Judged, chosen_: Mapping[str, Threshold], contract: Contract) -> bool:
    """Return whether a case is decided under thresholds: its kind has no bound, or it is certain enough."""
    if judged.decided is None:
        return False
    kind, bounds = judged.decided[0], contract.max_error
    if bounds is None or bounds.of(kind) is None:
        return True
    threshold = chosen_.get(kind)
    return threshold is not None and threshold.least is not None and judged.confidence >= threshold.least
