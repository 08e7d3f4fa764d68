"""A contract's policy: the checks of policy and readings against the rest of the contract, and the policy compiled once and
applied to fields and readings. Pure; it permits nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from sds.kernel.contract.compiler import Program, parse_type
from sds.kernel.contract.expressions import READING, SCORE, Checked, Kind, typed_expression
from sds.kernel.contract.readings import COMBINATIONS_MAX, ROOT, PolicyLine, ReadingSpec
from sds.kernel.contract.sections import ContractFields
from sds.kernel.contract.types import ContradictionError
from sds.kernel.envelope.envelope import ESCALATE
from sds.kernel.envelope.state import Fields, Value
from sds.kernel.errors import ContractError


@dataclass(frozen=True, slots=True)
class Proposed:
    """What the policy makes of one combination of readings. `params`: sorted, in minor units. `line`: counted from 0.

    `action` is a kind, ESCALATE, or MODEL when the language model chooses within the envelope.
    """

    action: str
    reason: str
    params: tuple[tuple[str, int], ...]
    line: int

    @property
    def decision(self) -> tuple[str, tuple[tuple[str, int], ...]]:
        """What is decided, whichever line says so and for whatever reason."""
        return self.action, self.params


class PolicyRules:
    """A compiled policy. Raises ContractError with a `path` attribute: an expression has a wrong type or an unknown name."""

    def __init__(
        self, types: Mapping[str, Kind], readings: Mapping[str, ReadingSpec], policy: Sequence[PolicyLine]
    ) -> None:
        known = {**types, **{f"{ROOT}.{name}": kind_of(spec) for name, spec in readings.items()}}
        self.lines = tuple(policy)
        whens, params, self._params = list[Checked](), list[Checked](), list[tuple[tuple[str, ...], Program]]()
        for index, line in enumerate(policy):
            whens.append(typed_expression(("policy", index, "when"), line.when, known, "bool"))
            named = tuple(sorted(line.params))
            texts = [
                typed_expression(("policy", index, "params", name), line.params[name], known, "int") for name in named
            ]
            params += texts
            self._params.append((named, Program(tuple(texts))))
        self._whens = Program(tuple(whens))
        self.reads = frozenset(path for each in (*whens, *params) for path in each.reads)

    def propose(self, fields: Fields, readings: Mapping[str, Value]) -> Proposed:
        """Return what the first line whose `when` holds says. `readings`: by name; a score is in millionths.

        Raises whatever an expression raises; the caller fails closed.
        """
        values = {**fields, **{f"{ROOT}.{name}": value for name, value in readings.items()}}
        for index, (line, holds) in enumerate(zip(self.lines, self._whens.evaluate(values), strict=True)):
            if holds is not True:
                continue
            if line.kind is None or line.reason is None:
                return Proposed(line.otherwise or ESCALATE, "", (), index)
            names, program = self._params[index]
            params = tuple(zip(names, _whole_numbers(program.evaluate(values)), strict=True))
            return Proposed(line.kind, line.reason, params, index)
        raise ContractError("no line of the policy applies, and the policy has no `otherwise` line")


def kind_of(spec: ReadingSpec) -> Kind:
    """Return the type that a reading has in expressions."""
    return Kind("string", frozenset(spec.values)) if spec.values else SCORE


def _whole_numbers(values: Sequence[object]) -> list[int]:
    if not all(type(value) is int for value in values):
        raise ContractError("a parameter of the policy is not a whole number")
    return [value for value in values if isinstance(value, int)]


def policy_rules(contract: ContractFields) -> PolicyRules:
    """Return the contract's policy, compiled. Raises ContractError with the `path` of the wrong expression."""
    types = {path: parse_type(path, text).kind for path, text in contract.snapshot.items()}
    return PolicyRules(types, contract.readings, contract.policy)


def check_policy(contract: ContractFields) -> None:
    """Check that readings have what they read, that the policy ends, and that it proposes kinds, reasons and parameters
    that there are. Raises ContradictionError.
    """
    _check_readings(contract)
    if contract.readings and not contract.policy:
        raise ContradictionError(("readings",), "`policy` is missing: no decision follows from readings alone")
    if contract.policy and not contract.readings:
        raise ContradictionError(("policy",), "`readings` is missing: a policy decides on at least one reading")
    for index, line in enumerate(contract.policy):
        last = index == len(contract.policy) - 1
        if (line.otherwise is not None) != last:
            why = "only the last line may say `otherwise`" if not last else "the last line must say `otherwise`"
            raise ContradictionError(("policy", index), why)
        if line.kind not in (None, ESCALATE):
            _check_line(contract, ("policy", index), line)
    _check_max_error(contract)
    if contract.policy and contract.rationale_chars_max:
        raise ContradictionError(
            ("rationale",), "a policy gives its rationale afterwards: write `order: after`, or leave it out"
        )


def _check_readings(contract: ContractFields) -> None:
    values = {name: spec.values for name, spec in contract.readings.items()}
    if prod(len(each) for each in values.values() if each) > COMBINATIONS_MAX:
        raise ContradictionError(("readings",), f"have more than {COMBINATIONS_MAX} combinations of values")
    taken = next((path for path in contract.snapshot if path.startswith(READING)), None)
    if contract.readings and taken:
        raise ContradictionError(("snapshot", taken), "begins with `reading.`, which is kept for readings")
    for name, spec in contract.readings.items():
        if spec.values and contract.event.evidence is None:
            raise ContradictionError(("readings", name), "reads the evidence, but `event.evidence` names no field")
        for index, path in enumerate(spec.score):
            of_reading = path.startswith(READING)
            if not (values.get(path.removeprefix(READING)) if of_reading else path in contract.snapshot):
                what = "is not a reading with `values`" if of_reading else "is not a declared snapshot field"
                raise ContradictionError(("readings", name, "score", index), f"`{path}` {what}")


def _check_line(contract: ContractFields, at: tuple[str | int, ...], line: PolicyLine) -> None:
    kind = contract.kinds.get(line.kind or "")
    if kind is None or line.kind not in (*contract.authority, contract.refusal):
        raise ContradictionError((*at, "kind"), f"`{line.kind}` is not in `authority`")
    if line.reason not in kind.reasons:
        raise ContradictionError((*at, "reason"), f"`{line.reason}` is not a reason of `{line.kind}`")
    if missing := sorted(set(kind.params) - set(line.params)):
        raise ContradictionError(at, f"`{line.kind}` needs the parameter `{missing[0]}`, which `params` does not give")
    if strange := sorted(set(line.params) - set(kind.params)):
        raise ContradictionError((*at, "params", strange[0]), f"is not a parameter of `{line.kind}`")


def _check_max_error(contract: ContractFields) -> None:
    bounds = contract.max_error
    if bounds is None:
        return
    if not contract.policy:
        raise ContradictionError(("max_error",), "limits what a policy decides, but `policy` is missing")
    for name, share in [("any", bounds.any), *bounds.kinds.items(), ("delta", bounds.delta)]:
        if share is not None and not 0 < share < 1:
            raise ContradictionError(("max_error",), f"`{name}` must be more than 0 and less than 1")
    for name in bounds.kinds:
        if name not in contract.kinds:
            raise ContradictionError(("max_error", "kinds", name), f"`{name}` is not one of the kinds")
