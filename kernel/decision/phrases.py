"""Decisions in words that a model may read: codes, kinds and numbers of the contract, and nothing else.

They contain no key, no rationale, and no words of a customer, a model or an executor: so they cannot carry an instruction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import KindSpec
from sds.kernel.envelope.envelope import ESCALATE, MAGNITUDE_MAX, format_literal, parse_literal
from sds.kernel.envelope.proposal import parse_recorded

CODES_MAX = 4
_CODE = re.compile("[A-Z][A-Z0-9_]{0,63}")


def claimed(contract: Contract, data: bytes) -> str:
    """Return proposal bytes in the contract's own words. What the contract has no word for is left out."""
    parsed = parse_recorded(data)
    if isinstance(parsed, str):
        return "no proposal"
    params = spec.params if (spec := kind_spec(contract, parsed.action)) else {}
    amounts = {n: parse_literal(t, params[n].scale) for n, t in parsed.params if n in params}
    return decision(contract, parsed.action, amounts)


def decision(contract: Contract, kind: str | None, amounts: Mapping[str, Any]) -> str:
    """Return a decision in words. `amounts`: in minor units; they are written with their decimals."""
    spec = kind_spec(contract, kind)
    if spec is None:
        return kind_name(contract, kind)
    known = [(n, amounts[n], spec.scale(n)) for n in sorted({*spec.params, *spec.fills}) if n in amounts]
    if len(known) == 1:
        return f"{kind} {_number(*known[0][1:])}"
    return ", ".join((f"{kind}", *(f"{n} {_number(value, scale)}" for n, value, scale in known)))


def kind_name(contract: Contract, kind: str | None) -> str:
    return f"{kind}" if kind == ESCALATE or kind_spec(contract, kind) else "another kind"


def kind_spec(contract: Contract, kind: str | None) -> KindSpec | None:
    return contract.kinds.get(kind or "") or contract.human.kinds.get(kind or "")


def _number(value: object, scale: int) -> str:
    return format_literal(value, scale) if type(value) is int and abs(value) <= MAGNITUDE_MAX else "?"


def reason_codes(reasons: str) -> str:
    codes = dict.fromkeys(reason_code(code) for _, code, _ in json.loads(reasons))
    return ", ".join(list(codes)[:CODES_MAX])


def reason_code(code: object) -> str:
    return code if isinstance(code, str) and _CODE.fullmatch(code) else "NO_CODE"
