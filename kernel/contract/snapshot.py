"""The typed snapshot: exactly the declared fields, each of its declared type, in one canonical form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sds.kernel.canonical import canonical, sha256_hex
from sds.kernel.contract.expressions import BOOL, INT, STRING, Kind
from sds.kernel.contract.types import Levels
from sds.kernel.envelope.envelope import MAGNITUDE_MAX, format_literal
from sds.kernel.envelope.state import Fields, Value

STRING_CHARS_MAX = 256
_UNSTORABLE = re.compile("[\ud800-\udfff]")  # half of a UTF-16 pair: text that has no UTF-8
_SHOWN = re.compile(r"[^ !#-\[\]-~]")


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One declared field. `scale` is the decimals of a fixed-point value, `values` those of an enumeration."""

    path: str
    kind: Kind
    scale: int = 0

    @property
    def recurs(self) -> bool:
        """Tell whether it has few values, so that the model often reads of it what it has read before."""
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
    """Return what is wrong with `fields`: missing, mistyped or out of range; empty when all is well."""
    found: list[str] = []
    for spec in specs:
        value = fields.get(spec.path)
        if value is None:
            found.append(f"`{spec.path}` is missing")
        elif not _fits(spec, value):
            found.append(f"`{spec.path}` is not of its declared type")
    return found


def well_typed(specs: tuple[FieldSpec, ...], fields: Fields) -> dict[str, Value]:
    """Return the declared fields that are of their type; the others read as missing."""
    return {s.path: fields[s.path] for s in specs if s.path in fields and _fits(s, fields[s.path])}


def _fits(spec: FieldSpec, value: Value) -> bool:
    kind = type(value)  # and not `isinstance`, which asks the value: a source may return any object
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
    """Declared fields as they were read. `id` is the SHA-256 of the canonical bytes: what a proposal refers to."""

    id: str
    body: bytes
    fields: Mapping[str, Value]
    version: str
    taken_at_ms: int


def take_snapshot(specs: tuple[FieldSpec, ...], key: str, fields: Fields, version: str, now_ms: int) -> Snapshot:
    """Freeze the declared fields that are of their type. Nothing undeclared or mistyped reaches model or record."""
    kept = well_typed(specs, fields)
    body = canonical({"key": key, "fields": kept, "version": version, "taken_at_ms": now_ms})
    return Snapshot(sha256_hex(body), body, kept, version, now_ms)


def show(spec: FieldSpec, value: Value) -> str:
    """Return a value as the model reads it: fixed-point with its decimals, text reduced to printable ASCII."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format_literal(value, spec.scale)
    return _SHOWN.sub("?", value)


def level(levels: Levels, value: Value) -> str:
    """Return the word of a number: the last of those whose least value it reaches."""
    reached = sum(isinstance(least, int) and isinstance(value, int) and value >= least for least in levels)
    return str(levels[2 * reached])
