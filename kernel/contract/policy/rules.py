"""A contract's policy, type-checked and compiled once, applied to fields and readings. Pure; it permits nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sds.kernel.contract.expressions import SCORE, Checked, Kind, Program, typed_expression
from sds.kernel.contract.readings import ROOT, PolicyLine, ReadingSpec
from sds.kernel.envelope.envelope import ESCALATE
from sds.kernel.envelope.state import Fields, Value
from sds.kernel.errors import ContractError


@dataclass(frozen=True, slots=True)
class Proposed:
    """What the policy makes of one combination of readings. `params`: sorted, in minor units; `line`: counted from 0.

    `action` is a kind, ESCALATE, or MODEL where the language model chooses within the envelope.
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
    """Raises ContractError with a `path` attribute where an expression is not of its type or names what is not there."""

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
        """Return what the first line says whose `when` holds. `readings`: by name, a score in millionths.

        Raises whatever an expression raises; the caller fails closed.
        """
        values = {**fields, **{f"{ROOT}.{name}": value for name, value in readings.items()}}
        for index, (line, holds) in enumerate(zip(self.lines, self._whens.evaluate(values), strict=True)):
            if holds is not True:
                continue
            if line.kind is None or line.reason is None:
                return Proposed(line.otherwise or ESCALATE, "", (), index)
            names, program = self._params[index]
            return Proposed(
                line.kind, line.reason, tuple(zip(names, _whole(program.evaluate(values)), strict=True)), index
            )
        raise ContractError("no line of the policy holds, and none says what is done otherwise")


def kind_of(spec: ReadingSpec) -> Kind:
    """Return the type of a reading in expressions."""
    return Kind("string", frozenset(spec.values)) if spec.values else SCORE


def _whole(values: Sequence[object]) -> list[int]:
    if not all(type(value) is int for value in values):
        raise ContractError("a parameter of the policy is no whole number")
    return [value for value in values if isinstance(value, int)]
