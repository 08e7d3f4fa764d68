"""The one form of a proposal, read strictly: bytes in; out comes a `Proposal` or a line that says what is wrong.

    {"action":"REFUND_TICKET","params":{"amount":150.00},"reason":"CANCELLATION","context_ref":"<64 hex>"}
    {"action":"DENY","reason":"NOT_ELIGIBLE","context_ref":"<64 hex>"}

Compact, in fixed order, `"params"` only where there are any, an optional `"rationale"` before `action`. Free text is
printable ASCII without the quote and the backslash: nothing needs escaping, and one character is one byte. Numbers stay
text here, because the envelope says how many decimals they must show.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PROPOSAL_BYTES_MAX = 64 * 1024
PARAMS_MAX = 16
TEXT_CHARS = r"[ !#-\[\]-~]"

_RATIONALE = rb'"rationale":"(' + TEXT_CHARS.encode() + rb'*)"'
_ACTION = re.compile(rb"\{(?:" + _RATIONALE + rb',)?"action":"([A-Z][A-Z0-9_]{0,63})"')
_PARAMS = b',"params":{'
_PARAM = re.compile(rb'"([a-z][a-z0-9_]{0,63})":(-?[0-9][0-9.]{0,31})')
_REASON = re.compile(rb',"reason":"([A-Z][A-Z0-9_]{0,63})"')
_CONTEXT = re.compile(rb',"context_ref":"([0-9a-f]{64})"\}')
_SCHEMA_1 = re.compile(rb"\{(.*?)," + _RATIONALE + rb'(,"context_ref":"[0-9a-f]{64}"\})', re.DOTALL)
_SCHEMA_2 = re.compile(b"(" + _ACTION.pattern + rb'),"params":\{\}')
_SCHEMA_3 = re.compile(rb'(.*),"reason_code":("[A-Z0-9_]*","context_ref":"[0-9a-f]{64}"\})', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A well-formed proposal, not judged yet. `params` are (name, number as written)."""

    action: str
    params: tuple[tuple[str, str], ...]
    reason_code: str
    context_ref: str
    rationale: str | None = None


def parse_proposal(data: bytes) -> Proposal | str:
    """Return the proposal, or one line that says where the bytes leave the form. Never raises; takes linear time."""
    if len(data) > PROPOSAL_BYTES_MAX:
        return f"the proposal has {len(data)} bytes, more than {PROPOSAL_BYTES_MAX}"
    action = _ACTION.match(data)
    if action is None:
        return 'does not begin with {"action":"<KIND>" or a rationale before it'
    read = _params(data, action.end())
    if isinstance(read, str):
        return read
    params, at = read
    reason = _REASON.match(data, at)
    if reason is None:
        expected = "" if params else ',"params":{ or '
        return f'byte {at}: expected {expected},"reason":"<CODE>"'
    context = _CONTEXT.match(data, reason.end())
    if context is None:
        return f'byte {reason.end()}: expected ,"context_ref":"<64 hex digits>"}}'
    if context.end() != len(data):
        return f"byte {context.end()}: more bytes after the end"
    rationale = None if action[1] is None else action[1].decode()
    return Proposal(action[2].decode(), params, reason[1].decode(), context[1].decode(), rationale)


def _params(data: bytes, at: int) -> tuple[tuple[tuple[str, str], ...], int] | str:
    """Return the parameters and the byte where they end; without any, `at`. A text says how they are malformed."""
    if not data.startswith(_PARAMS, at):
        return (), at
    at += len(_PARAMS)
    params: list[tuple[str, str]] = []
    while (param := _PARAM.match(data, at + 1 if params else at)) and (not params or data[at : at + 1] == b","):
        params.append((param[1].decode(), param[2].decode()))
        at = param.end()
        if len(params) > PARAMS_MAX:
            return f"more than {PARAMS_MAX} parameters"
    if len({name for name, _ in params}) != len(params):
        return "a parameter appears twice"
    if not params or data[at : at + 1] != b"}":
        return f"byte {at}: expected a parameter{' or }' if params else ''}"
    return tuple(params), at + 1


def parse_recorded(data: bytes) -> Proposal | str:
    """Read a proposal that the record holds. Schemas before 4 wrote `reason_code` for `reason`, those before 3 also an
    empty `"params":{}`, and schema 1 wrote the rationale last but one.
    """
    first = _SCHEMA_1.fullmatch(data)
    older = _SCHEMA_3.fullmatch(b'{"rationale":"%b",%b%b' % (first[2], first[1], first[3]) if first else data)
    if older is None:
        return parse_proposal(data)
    named = b'%b,"reason":%b' % (older[1], older[2])
    empty = _SCHEMA_2.match(named)
    return parse_proposal(empty[1] + named[empty.end() :] if empty else named)


def write_proposal(proposal: Proposal) -> bytes:
    """Return the one byte form of a proposal; `parse_proposal` reads it back."""
    numbers = ",".join(f'"{name}":{text}' for name, text in proposal.params)
    params = f'"params":{{{numbers}}},' if proposal.params else ""
    rationale = "" if proposal.rationale is None else f'"rationale":"{proposal.rationale}",'
    return (
        f'{{{rationale}"action":"{proposal.action}",{params}"reason":"{proposal.reason_code}"'
        f',"context_ref":"{proposal.context_ref}"}}'
    ).encode()
