"""`envelope(contract, snapshot)`: the contract's rules, compiled once, applied to one snapshot. Pure.

Whatever fails (a missing or mistyped field, an expression, a bound beyond the limits) gives `ESCALATE_ONLY`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sds.kernel.contract.expressions import Checked, Program, Tree, typed_expression
from sds.kernel.contract.sections import ContractFields, KindSpec
from sds.kernel.contract.snapshot import faults, parse_type
from sds.kernel.envelope.envelope import (
    ESCALATE_ONLY,
    Bound,
    DecisionEnvelope,
    KindBound,
    bound,
    envelope_of,
    within_limits,
)
from sds.kernel.envelope.state import Fields

Path = tuple[str, ...]


class Rules:
    """A contract's expressions, type-checked and compiled. Raises ContractError with a `path` attribute.

    `authority`: the kinds of a mandate within the contract, as one step of a saga has; None: the agent's own.
    """

    def __init__(self, contract: ContractFields, *, authority: tuple[str, ...] | None = None) -> None:
        self.contract = contract
        self.fields = tuple(parse_type(path, text) for path, text in contract.snapshot.items())
        named = contract.authority if authority is None else authority
        self._kinds = {name: contract.kinds[name] for name in sorted({*named, contract.refusal})}
        self._forms = [_CompiledKind(name, kind) for name, kind in self._kinds.items()]
        self._recurring: set[tuple[str, str]] = set()
        self._program = Program(tuple(self._checked()))

    def _checked(self) -> list[Checked]:
        """Type-check every expression; return those of permitted kinds, in the order `envelope` consumes them."""
        types = {spec.path: spec.kind for spec in self.fields}
        wanted: list[tuple[Path, str, str]] = [(("when",), self.contract.when, "bool")]
        for name, kind in sorted(self.contract.kinds.items()):
            wanted += expressions_of(name, kind)
        checked: list[Checked] = []
        for path, text, want in wanted:
            found = typed_expression(path, text, types, want)
            if path[2:3] == ("fills",) and _has_few_values(found.tree):
                self._recurring.add((path[1], path[3]))
            if len(path) == 1 or path[1] in self._kinds:
                checked.append(found)
        return checked

    def recurs(self, kind: str, fill: str) -> bool:
        """Tell whether a fill is always one of the few numbers that its expression names."""
        return (kind, fill) in self._recurring

    def faults(self, fields: Fields) -> list[str]:
        return faults(self.fields, fields)

    def envelope(self, fields: Fields) -> DecisionEnvelope:
        """Return the contract's own envelope for these fields."""
        if self.faults(fields):
            return ESCALATE_ONLY
        try:
            values = iter(self._program.evaluate(fields))
            eligible = next(values)
            kinds = []
            for form in self._forms:
                kind = form.bound(values)
                if kind is not None and (eligible is True or form.name == self.contract.refusal):
                    kinds.append(kind)
        except Exception:  # noqa: BLE001  fail closed: whatever an expression raises, a human decides
            return ESCALATE_ONLY
        return envelope_of(kinds, self.contract.rationale_chars_max, refusal=self.contract.refusal)


def expressions_of(name: str, kind: KindSpec) -> list[tuple[Path, str, str]]:
    at: Path = ("kinds", name)
    found: list[tuple[Path, str, str]] = [((*at, "when"), kind.when, "bool")]
    for param, spec in sorted(kind.params.items()):
        found += [((*at, "params", param, "lo"), spec.lo, "int"), ((*at, "params", param, "hi"), spec.hi, "int")]
    found += [((*at, "fills", fill, "value"), spec.value, "int") for fill, spec in sorted(kind.fills.items())]
    return found


def _has_few_values(tree: Tree) -> bool:
    """A number, or a condition between such; what is computed may be any number."""
    return tree.op == "literal" or (tree.op == "?" and all(map(_has_few_values, tree.parts[1:])))


class _CompiledKind:
    """What is the same of a kind in every envelope, sorted once."""

    def __init__(self, name: str, spec: KindSpec) -> None:
        self.name, self._reasons = name, tuple(sorted(set(spec.reasons)))
        self._params, self._fills = sorted(spec.params.items()), sorted(spec.fills.items())

    def bound(self, values: Iterator[Any]) -> KindBound | None:
        """Consume this kind's values, sorted by name; None when it is not permitted or a parameter has no value left."""
        permitted = next(values) is True
        params: list[tuple[str, Bound]] = []
        for param, p in self._params:
            allowed = bound(next(values), next(values), step=p.step, residue=p.residue, scale=p.scale)
            permitted = permitted and allowed is not None
            if allowed is not None:
                params.append((param, allowed))
        fills = [(fill, within_limits(next(values)), f.scale) for fill, f in self._fills]
        return KindBound(self.name, self._reasons, tuple(params), tuple(fills)) if permitted else None
