"""The language as JSON Schema 2020-12: the same values, for consumers that do not read bytes.

A schema describes values, so it cannot fix the order of the fields or the number of decimals: `150`, `150.0` and
`150.00` are one value to it. It is made from the envelope, not from the regular expression. Numbers stand in the
document as exact decimals; a reader that turns them into binary floats loses the precision of `multipleOf`.
"""

from __future__ import annotations

from typing import Any

from sds.grammars.language import Language
from sds.kernel.envelope.envelope import Bound, KindBound
from sds.kernel.errors import LanguageError

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ENUM_VALUES_MAX = 4096
_SHORT_ENUM_VALUES = 64


def emit(language: Language) -> dict[str, Any]:
    """Return the schema as JSON data.

    Raises LanguageError for a bound with more than ENUM_VALUES_MAX values and a residue other than 0: JSON Schema only
    has "multiple of", and a schema must not permit more than the envelope.
    """
    longest = language.envelope.rationale_chars_max
    first = {"rationale": _text(longest)} if longest else {}
    last = {"context_ref": {"const": language.context_ref}}
    return {"$schema": DIALECT, "anyOf": [_kind(kind, first, last) for kind in language.envelope.kinds]}


def _kind(kind: KindBound, first: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    params = {"params": _object({name: _number(name, allowed) for name, allowed in kind.params})} if kind.params else {}
    return _object(
        {
            **first,
            "action": {"const": kind.kind},
            **params,
            "reason": {"enum": list(kind.reasons)},
            **last,
        }
    )


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _number(name: str, allowed: Bound) -> dict[str, Any]:
    values = range(allowed.lo, allowed.hi + 1, allowed.step)
    if len(values) <= (ENUM_VALUES_MAX if allowed.residue else _SHORT_ENUM_VALUES):
        return {"enum": [_decimal(value, allowed.scale) for value in values]}
    if allowed.residue:
        raise LanguageError(f"`{name}` has no JSON Schema: it has over {ENUM_VALUES_MAX} values and a residue")
    return {
        "type": "number",
        "minimum": _decimal(allowed.lo, allowed.scale),
        "maximum": _decimal(allowed.hi, allowed.scale),
        "multipleOf": _decimal(allowed.step, allowed.scale),
    }


def _decimal(value: int, scale: int) -> int | float:
    """Return a number whose JSON text is exact: the shortest form of a float keeps 15 digits."""
    unit: int = 10**scale
    return value / unit if value % unit else value // unit


def _text(chars_max: int) -> dict[str, Any]:
    # A pattern under `not`, because `$` also matches before a last newline in some engines.
    return {"type": "string", "maxLength": chars_max, "not": {"pattern": r"[^ !#-\[\]-~]"}}
