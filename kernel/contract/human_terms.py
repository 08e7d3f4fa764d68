"""The terms under which a human decides an escalated case, and what is of HIGH impact (DIR 4.7). Pure.

They are the agent's contract with what its section `human` replaces, and are checked like any other contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from sds.kernel.contract.monitors import AggregateThresholds
from sds.kernel.contract.sections import KINDS_MAX, ContractFields, HumanSpec
from sds.kernel.contract.types import ContradictionError

Impact = Literal["LOW", "HIGH"]
Terms = TypeVar("Terms", bound=ContractFields)


def human_contract(contract: Terms) -> Terms:
    """Return the contract a human decides under. It escalates nothing and asks for no rationale: the human gives a reason
    for the record.
    """
    return contract.model_copy(update=_changes(contract))


def _changes(contract: ContractFields) -> dict[str, Any]:
    """Return the fields in which a human's terms differ from the agent's contract."""
    human, watched = contract.human, contract.aggregate_thresholds  # monitors watch an agent, not a human
    kinds = {name: kind for name, kind in contract.kinds.items() if name not in human.kinds}
    return {
        "kinds": kinds | human.kinds,  # the human's come last: of two that disagree, the human's is reported
        "authority": human.authority or tuple(dict.fromkeys((*contract.authority, *human.kinds))),
        "when": contract.when if human.when is None else human.when,
        **({"aggregate_thresholds": AggregateThresholds()} if isinstance(watched, tuple) else {}),
        "escalation": contract.escalation.model_copy(update={"always": (), "confidence_min_pct": 0}),
        "human": HumanSpec(),
        "rationale": None,
        "readings": {},  # a human reads the evidence
        "policy": (),
        "max_error": None,
        "sagas": {},
    }


def check_human(contract: ContractFields, checks: Iterable[Callable[[ContractFields], None]]) -> None:
    """Apply the checks of a contract to its human section. Raises ContradictionError."""
    if contract.human == HumanSpec():
        return
    changes = _changes(contract)
    if len(changes["kinds"]) > KINDS_MAX:
        raise ContradictionError(("human", "kinds"), f"must be, with the agent's kinds, {KINDS_MAX} or fewer")
    _check_spends(contract)
    for index, code in enumerate(contract.human.authority):
        if code not in changes["kinds"]:
            raise ContradictionError(("human", "authority", index), f"`{code}` is not one of the kinds")
    whole = BaseModel.model_copy(contract, update=changes)  # unvalidated: the checks follow
    for check in checks:
        try:
            check(whole)
        except ContradictionError as error:
            raise ContradictionError(("human", *error.path), str(error)) from None


def _check_spends(contract: ContractFields) -> None:
    """Check that a human's kinds spend in the scale of the agent's, of those that they replace, too."""
    spent = {kind.scale(kind.spends) for kind in contract.kinds.values() if kind.spends}
    for name, kind in contract.human.kinds.items():
        if kind.spends and spent - {kind.scale(kind.spends)}:
            where = ("human", "kinds", name, "spends")
            raise ContradictionError(where, "must have the same scale as what other kinds spend, the agent's included")


def impact(contract: ContractFields, action: str, numbers: Mapping[str, int]) -> Impact:
    """Return what a decision means outside: HIGH when it cannot be undone or its amount is large.

    An amount that is not known counts as large, and a kind that is not known as HIGH.
    """
    spec = contract.kinds.get(action)
    if spec is None:
        return "HIGH"
    limit = contract.escalation.impact_high_minor
    named = [spec.spends, *spec.draws.values()]
    if limit is not None and any(numbers.get(name, limit) >= limit for name in named if isinstance(name, str)):
        return "HIGH"
    return spec.impact or ("HIGH" if spec.executes else "LOW")
