"""What a human types: a name and a reason, the id of a state, and another decision than the agent's. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from sds.kernel.canonical import digest, one_line, person, reason_line
from sds.kernel.decision import jit
from sds.kernel.decision.jit import Tolerance
from sds.kernel.envelope.proposal import Proposal, parse_proposal, write_proposal
from sds.kernel.envelope.state import Fields, Value
from sds.kernel.errors import UsageError
from sds.kernel.flow.intake import once
from sds.kernel.human.cases import Case

CHANGE_CHARS_MAX = 4_096
SEEN_CHARS_MAX = 4_096
WHO_CHARS_MAX = 200

_SEEN = re.compile(r"[0-9a-f]{64}(?::(?:-?[0-9]{1,19}|None))*")
_FORM = '{"action": "KIND", "params": {"amount": 1.00}, "reason": "CODE"}'


def said(what: str, text: str) -> str:
    """Return a name or a reason as the record keeps it. Raises UsageError when nothing of it can be seen, or it is too long."""
    kept = reason_line(text) if what == "reason" else person(text, WHO_CHARS_MAX)
    if not kept:
        raise UsageError(f"a {what} is needed, for the record")
    return kept


def looked_at(seen: str, dfid: str) -> str:
    """Return the id of a state of a case in the form of `seen_id`, or "" when none is given. Raises UsageError."""
    if seen and not (len(seen) <= SEEN_CHARS_MAX and _SEEN.fullmatch(seen)):
        hint = f"sds escalations show {dfid} prints it"
        raise UsageError(f"`{one_line(seen, 80)}` is not the id of a state", hint=hint, dfid=dfid)
    return seen


def unacknowledged(dfid: str, message: str) -> UsageError:
    """Return the error for a decision of HIGH impact that has not been acknowledged."""
    hint = "if that is what you want, repeat it with --acknowledge"
    return UsageError(message, reason_code="ACKNOWLEDGEMENT_REQUIRED", hint=hint, dfid=dfid)


def seen_id(policy: tuple[Tolerance, ...], case: Case, fields: Fields, contract_hash: str) -> str:
    """Return the id of a state that a human looks at, under a contract: a hash, then the values that may move within a
    tolerance.

    These values stand in the id, so that tolerances hold for what a human has seen as for what an agent has seen. To look
    at a state writes nothing.
    """
    loose = _tolerant_paths(policy)
    return _id_of(case, fields, loose, [fields.get(path) for path in loose], contract_hash)


def moved_since(
    policy: tuple[Tolerance, ...], seen: str, case: Case, fields: Fields, contract_hash: str
) -> tuple[str, ...]:
    """Return what moved beyond its tolerance since `seen` named the state. The contract and all fields that may not move are
    one line.
    """
    loose = _tolerant_paths(policy)
    texts = seen.split(":")[1:] if len(seen) <= SEEN_CHARS_MAX else []
    values: list[Value | None] = [
        int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None for text in texts
    ]
    if len(values) != len(loose) or seen != _id_of(case, fields, loose, values, contract_hash):
        return ("the contract or a field that must not move changed after you saw the case",)
    known = {path: value for path, value in zip(loose, values, strict=True) if value is not None}
    return jit.drift(policy, {**_strict_fields(fields, loose), **known}, fields)


def _tolerant_paths(policy: tuple[Tolerance, ...]) -> list[str]:
    return sorted(path for path, absolute, percent in policy if absolute > 0 or percent > 0)


def _id_of(case: Case, fields: Fields, loose: list[str], values: list[Value | None], contract_hash: str) -> str:
    named = digest([case.dfid, case.key, contract_hash, _strict_fields(fields, loose), values])
    return ":".join([named, *(str(value) for value in values)])


def _strict_fields(fields: Fields, loose: list[str]) -> dict[str, Value]:
    return {path: value for path, value in fields.items() if path not in loose}


class Number(str):
    """A JSON number as it was written: 150.00 keeps its two decimals, which a float loses."""

    __slots__ = ()


def parse_change(text: str, context_ref: str) -> Proposal:
    """Read `{"action": .., "params": {..}, "reason": ..}`. Numbers are written as in a proposal: 150.00.

    Raises UsageError that says what is wrong. The kernel's gates find whether the decision is permitted.
    """
    if not isinstance(text, str):  # of JSON data the decimals of a number would be lost
        raise UsageError("the decision is not JSON text", hint=_FORM)
    if len(text) > CHANGE_CHARS_MAX:
        raise UsageError(f"the decision has more than {CHANGE_CHARS_MAX} characters")
    try:
        data = json.loads(text, object_pairs_hook=once, parse_float=Number, parse_int=Number, parse_constant=Number)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the decision is not JSON: {one_line(error, 200)}", hint=_FORM) from error
    params = data.get("params", {}) if isinstance(data, Mapping) else None
    if not isinstance(params, Mapping) or not {*data} <= {"action", "params", "reason"}:
        raise UsageError("the decision is not an object of action, params and reason", hint=_FORM)
    if not all(isinstance(value, Number) for value in params.values()):
        raise UsageError("every parameter must be a number", hint=_FORM)
    wanted = Proposal(
        str(data.get("action", "")), tuple(sorted(params.items())), str(data.get("reason", "")), context_ref
    )
    try:
        whole = parse_proposal(write_proposal(wanted))
    except UnicodeEncodeError:
        whole = "not text"
    if whole != wanted:
        raise UsageError("the decision does not have the form of a proposal", reason_code="SCHEMA_INVALID", hint=_FORM)
    return wanted
