"""`envelope(contract, snapshot)`: the contract's rules, compiled once, applied to one typed snapshot. Pure.

A snapshot has exactly the declared fields, each of its declared type, in one canonical form. Every failure (a missing or
mistyped field, an expression that raises, a bound beyond the limits) gives `ESCALATE_ONLY`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sds.kernel.canonical import canonical, sha256_hex, unaccented
from sds.kernel.contract.expressions import BOOL, INT, STRING, Checked, Kind, Tree, cel, typed_expression, variable
from sds.kernel.contract.sections import ContractFields, KindSpec
from sds.kernel.contract.types import Levels
from sds.kernel.envelope.envelope import (
    ESCALATE_ONLY,
    MAGNITUDE_MAX,
    Bound,
    DecisionEnvelope,
    KindBound,
    bound,
    envelope_of,
    format_literal,
    within_limits,
)
from sds.kernel.envelope.state import Fields, Value

Path = tuple[str, ...]
STRING_CHARS_MAX = 256
_UNSTORABLE = re.compile("[\ud800-\udfff]")  # half of a UTF-16 pair has no UTF-8
_SHOWN = re.compile(r"[^ !#-\[\]-~]")


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One declared field. `scale`: the decimals of a fixed-point number, else 0. `kind`: holds an enumeration's values."""

    path: str
    kind: Kind
    scale: int = 0

    @property
    def recurs(self) -> bool:
        """Whether it has few values, so that the model has often read the same text of it before."""
        return self.kind.name == "bool" or bool(self.kind.values)


def parse_type(path: str, text: str) -> FieldSpec:
    """Read a declared type: bool, int, string, timestamp, fixed(2), enum(a, b)."""
    if text == "bool":
        return FieldSpec(path, BOOL)
    if text == "string":
        return FieldSpec(path, STRING)
    if text.startswith("enum("):
        values = frozenset(v.strip() for v in text[5:-1].split(","))
        return FieldSpec(path, Kind("string", values))
    return FieldSpec(path, INT, int(text[6:-1]) if text.startswith("fixed(") else 0)


def faults(specs: tuple[FieldSpec, ...], fields: Fields) -> list[str]:
    """Return what is wrong with `fields`: missing or not of the declared type, range included; empty when nothing is."""
    found: list[str] = []
    for spec in specs:
        value = fields.get(spec.path)
        if value is None:
            found.append(f"`{spec.path}` is missing")
        elif not _fits(spec, value):
            found.append(f"`{spec.path}` is not of its declared type")
    return found


def well_typed(specs: tuple[FieldSpec, ...], fields: Fields) -> dict[str, Value]:
    """Return the declared fields that are of their type; every other field counts as missing."""
    return {s.path: fields[s.path] for s in specs if s.path in fields and _fits(s, fields[s.path])}


def _fits(spec: FieldSpec, value: Value) -> bool:
    """Tell whether a value is of a field's declared type, and within the limits of that type."""
    kind = type(value)  # not `isinstance`, which a foreign object can answer as it likes
    if spec.kind.name == "bool":
        return kind is bool
    if spec.kind.name == "int":
        return kind is int and -MAGNITUDE_MAX <= value <= MAGNITUDE_MAX  # type: ignore[operator]  # int, just checked
    if kind is not str or not isinstance(value, str) or len(value) > STRING_CHARS_MAX:
        return False
    if spec.kind.values:
        return value in spec.kind.values
    return not _UNSTORABLE.search(value)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The declared fields as they were read. `id`: SHA-256 of the canonical bytes, `body`; a proposal refers to it."""

    id: str
    body: bytes
    fields: Mapping[str, Value]
    version: str
    taken_at_ms: int


def take_snapshot(specs: tuple[FieldSpec, ...], key: str, fields: Fields, version: str, now_ms: int) -> Snapshot:
    """Freeze the declared fields that are of their type. Nothing undeclared or mistyped reaches the model or the record."""
    kept = well_typed(specs, fields)
    body = canonical({"key": key, "fields": kept, "version": version, "taken_at_ms": now_ms})
    return Snapshot(sha256_hex(body), body, kept, version, now_ms)


def show(spec: FieldSpec, value: Value) -> str:
    """Return a value as the model reads it: fixed-point with its decimals, text in printable ASCII."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format_literal(value, spec.scale)
    return _SHOWN.sub("?", unaccented(value))


def level(levels: Levels, value: Value) -> str:
    """Return the word that stands for a number: the last word whose least value the number reaches."""
    reached = sum(isinstance(least, int) and isinstance(value, int) and value >= least for least in levels)
    return str(levels[2 * reached])


class Program:
    """All checked expressions of a contract as one CEL list. They are evaluated together: if one fails, all have failed."""

    def __init__(self, expressions: tuple[Checked, ...]) -> None:
        self._functions = {"min": min, "max": max}
        self._variables = sorted({(variable(path), path) for each in expressions for path in each.reads})
        self._program = cel.compile(f"[{', '.join(each.cel for each in expressions)}]")

    def evaluate(self, fields: Fields) -> list[object]:
        """Return one value for each expression. Raises whatever CEL raises; the caller fails closed."""
        variables = {name: fields[path] for name, path in self._variables}
        values: list[object] = self._program.execute(cel.Context(variables, self._functions))
        return values


class Rules:
    """A contract's expressions, type-checked and compiled. Raises ContractError with a `path` attribute.

    `authority`: the kinds that are permitted, for one step of a saga; None: those of the contract.
    """

    def __init__(self, contract: ContractFields, *, authority: tuple[str, ...] | None = None) -> None:
        self.contract = contract
        self.fields = tuple(parse_type(path, text) for path, text in contract.snapshot.items())
        named = contract.authority if authority is None else authority
        self._kinds = {name: contract.kinds[name] for name in sorted({*named, contract.refusal})}
        self._compiled = [_CompiledKind(name, kind) for name, kind in self._kinds.items()]
        self._recurring: set[tuple[str, str]] = set()
        self._program = Program(tuple(self._checked()))

    def _checked(self) -> list[Checked]:
        """Type-check every expression; return those of permitted kinds, in the order in which `envelope` needs them."""
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
            for compiled in self._compiled:
                kind = compiled.bound(values)
                if kind is not None and (eligible is True or compiled.name == self.contract.refusal):
                    kinds.append(kind)
        except Exception:  # noqa: BLE001  fail closed: when an expression raises, a human decides
            return ESCALATE_ONLY
        return envelope_of(kinds, self.contract.rationale_chars_max, refusal=self.contract.refusal)


def expressions_of(name: str, kind: KindSpec) -> list[tuple[Path, str, str]]:
    """Return the path, text and wanted type of a kind's expressions, in the order that `_CompiledKind.bound` needs."""
    at: Path = ("kinds", name)
    found: list[tuple[Path, str, str]] = [((*at, "when"), kind.when, "bool")]
    for param, spec in sorted(kind.params.items()):
        found += [((*at, "params", param, "lo"), spec.lo, "int"), ((*at, "params", param, "hi"), spec.hi, "int")]
    found += [((*at, "fills", fill, "value"), spec.value, "int") for fill, spec in sorted(kind.fills.items())]
    return found


def _has_few_values(tree: Tree) -> bool:
    """Tell whether an expression is a number, or a condition between such. What is computed may be any number."""
    return tree.op == "literal" or (tree.op == "?" and all(map(_has_few_values, tree.parts[1:])))


class _CompiledKind:
    """What stays the same of a kind in every envelope, sorted once."""

    def __init__(self, name: str, spec: KindSpec) -> None:
        self.name, self._reasons = name, tuple(sorted(set(spec.reasons)))
        self._params, self._fills = sorted(spec.params.items()), sorted(spec.fills.items())

    def bound(self, values: Iterator[Any]) -> KindBound | None:
        """Take this kind's values, sorted by name. None: it is not permitted, or a parameter has no value left."""
        permitted = next(values) is True
        params: list[tuple[str, Bound]] = []
        for param, p in self._params:
            allowed = bound(next(values), next(values), step=p.step, residue=p.residue, scale=p.scale)
            permitted = permitted and allowed is not None
            if allowed is not None:
                params.append((param, allowed))
        fills = [(fill, within_limits(next(values)), f.scale) for fill, f in self._fills]
        return KindBound(self.name, self._reasons, tuple(params), tuple(fills)) if permitted else None
