"""What the readings and the policy of a contract must say together with the rest of it. Raises ContradictionError."""

from __future__ import annotations

from math import prod

from sds.kernel.contract.expressions import READING
from sds.kernel.contract.policy.rules import PolicyRules
from sds.kernel.contract.readings import COMBINATIONS_MAX, PolicyLine
from sds.kernel.contract.sections import ContractFields
from sds.kernel.contract.snapshot import parse_type
from sds.kernel.contract.types import ContradictionError
from sds.kernel.envelope.envelope import ESCALATE


def policy_rules(contract: ContractFields) -> PolicyRules:
    """Return the contract's policy, compiled. Raises ContractError with the `path` of the expression to mend."""
    types = {path: parse_type(path, text).kind for path, text in contract.snapshot.items()}
    return PolicyRules(types, contract.readings, contract.policy)


def check_policy(contract: ContractFields) -> None:
    """Readings have what they read, the policy ends, and proposes kinds, reasons and parameters that there are."""
    _check_readings(contract)
    if contract.readings and not contract.policy:
        raise ContradictionError(("readings",), "nothing follows from them: `policy` is missing")
    if contract.policy and not contract.readings:
        raise ContradictionError(
            ("policy",), "`readings` is missing: a rule over fields alone is no question for a model"
        )
    for index, line in enumerate(contract.policy):
        last = index == len(contract.policy) - 1
        if (line.otherwise is not None) != last:
            why = "is not the last line" if not last else "the last line says what is done `otherwise`"
            raise ContradictionError(("policy", index), why)
        if line.kind not in (None, ESCALATE):
            _check_line(contract, ("policy", index), line)
    _check_max_error(contract)
    if contract.policy and contract.rationale_chars_max:
        raise ContradictionError(
            ("rationale",), "a policy writes none before it decides: `order: after`, or leave it out"
        )


def _check_readings(contract: ContractFields) -> None:
    values = {name: spec.values for name, spec in contract.readings.items()}
    if prod(len(each) for each in values.values() if each) > COMBINATIONS_MAX:
        raise ContradictionError(("readings",), f"have more than {COMBINATIONS_MAX} combinations of values")
    taken = next((path for path in contract.snapshot if path.startswith(READING)), None)
    if contract.readings and taken:
        raise ContradictionError(("snapshot", taken), "has the root of readings")
    for name, spec in contract.readings.items():
        if spec.values and contract.event.evidence is None:
            raise ContradictionError(("readings", name), "reads the evidence, and `event.evidence` names none")
        for index, path in enumerate(spec.score):
            known = (
                bool(values.get(path.removeprefix(READING))) if path.startswith(READING) else path in contract.snapshot
            )
            if not known:
                what = (
                    "is no enumeration among the readings"
                    if path.startswith(READING)
                    else "is not a declared snapshot field"
                )
                raise ContradictionError(("readings", name, "score", index), f"`{path}` {what}")


def _check_line(contract: ContractFields, at: tuple[str | int, ...], line: PolicyLine) -> None:
    kind = contract.kinds.get(line.kind or "")
    if kind is None or line.kind not in (*contract.authority, contract.refusal):
        raise ContradictionError((*at, "kind"), f"`{line.kind}` is not in the authority")
    if line.reason not in kind.reasons:
        raise ContradictionError((*at, "reason"), f"`{line.reason}` is not a reason of `{line.kind}`")
    if missing := sorted(set(kind.params) - set(line.params)):
        raise ContradictionError(at, f"`{line.kind}` takes `{missing[0]}`, which `params` does not give")
    if strange := sorted(set(line.params) - set(kind.params)):
        raise ContradictionError((*at, "params", strange[0]), f"is no parameter of `{line.kind}`")


def _check_max_error(contract: ContractFields) -> None:
    bounds = contract.max_error
    if bounds is None:
        return
    if not contract.policy:
        raise ContradictionError(("max_error",), "bounds what a policy decides, and there is none")
    for name, share in [("any", bounds.any), *bounds.kinds.items(), ("delta", bounds.delta)]:
        if share is not None and not 0 < share < 1:
            raise ContradictionError(("max_error",), f"`{name}` must be more than 0 and less than 1")
    for name in bounds.kinds:
        if name not in contract.kinds:
            raise ContradictionError(("max_error", "kinds", name), f"`{name}` is not one of the kinds")
