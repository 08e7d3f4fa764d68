"""The money in a run of the fraud gate: frauds, good payments, and payments left for people to review."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sds.definitions.definition import QueuedCase

from .adjudication import Truth

HELD = frozenset({"CHALLENGE", "BLOCK"})
NAMES = ("fraud_stopped", "fraud_let_through", "good_payments_held", "good_payments_passed", "left_to_review")


def in_money(decided: Iterable[tuple[QueuedCase, str | None]]) -> dict[str, int]:
    """Return count and sum in minor units of each outcome. A payment neither passed nor held is left to review."""
    sums = Counter[str]()
    for case, kind in decided:
        truth: Truth = case.label
        name = _name(truth, kind)
        sums[name] += 1
        sums[f"{name}_minor"] += truth.amount_minor
    return {name: sums[name] for each in NAMES for name in (each, f"{each}_minor")}


def _name(truth: Truth, kind: str | None) -> str:
    if kind == "ALLOW":
        return "fraud_let_through" if truth.fraud else "good_payments_passed"
    if kind in HELD:
        return "fraud_stopped" if truth.fraud else "good_payments_held"
    return "left_to_review"
