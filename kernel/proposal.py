"""The one form of a proposal, read strictly: bytes in, a `Proposal` or a list of faults out, for any input.

    {"action":"REFUND_TICKET","params":{"amount":150.00},"reason_code":"CANCELLATION","context_ref":"<64 hex>"}

Compact, fixed order, an optional `"rationale"` before `action`. Free text is printable ASCII without the
quote and the backslash, so there is nothing to escape and one character is one byte. Numbers stay text here: how
many decimals they must show is the envelope's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PROPOSAL_BYTES_MAX = 64 * 1024
PARAMS_MAX = 16
TEXT_CHARS = r"[ !#-\[\]-~]"

_RATIONALE = rb'"rationale":"(' + TEXT_CHARS.encode() + rb'*)"'
_ACTION = re.compile(rb"\{(?:" + _RATIONALE + rb',)?"action":"([A-Z][A-Z0-9_]{0,63})","params":\{')
_PARAM = re.compile(rb'"([a-z][a-z0-9_]{0,63})":(-?[0-9][0-9.]{0,31})')
_REASON = re.compile(rb'\},"reason_code":"([A-Z][A-Z0-9_]{0,63})"')
_CONTEXT = re.compile(rb',"context_ref":"([0-9a-f]{64})"\}')
_SCHEMA_1 = re.compile(rb"\{(.*?)," + _RATIONALE + rb'(,"context_ref":"[0-9a-f]{64}"\})', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A well-formed claim. `params` are (name, number as written); nothing here has been judged yet."""

    action: str
    params: tuple[tuple[str, str], ...]
    reason_code: str
    context_ref: str
    rationale: str | None = None


def parse_proposal(data: bytes) -> Proposal | str:
    """Return the proposal, or one line that says where the bytes leave the form. Never raises, linear time."""
    if len(data) > PROPOSAL_BYTES_MAX:
        return f"{len(data)} bytes are more than {PROPOSAL_BYTES_MAX}"
    action = _ACTION.match(data)
    if action is None:
        return 'does not begin with {"action":"<KIND>","params":{ or a rationale before it'
    params: list[tuple[str, str]] = []
    at = action.end()
    while (param := _PARAM.match(data, at + 1 if params else at)) and (not params or data[at : at + 1] == b","):
        params.append((param[1].decode(), param[2].decode()))
        at = param.end()
        if len(params) > PARAMS_MAX:
            return f"more than {PARAMS_MAX} parameters"
    if len({name for name, _ in params}) != len(params):
        return "a parameter appears twice"
    reason = _REASON.match(data, at)
    if reason is None:
        return f'byte {at}: expected a parameter or }},"reason_code":"<CODE>"'
    context = _CONTEXT.match(data, reason.end())
    if context is None:
        return f'byte {reason.end()}: expected ,"context_ref":"<64 hex digits>"}}'
    if context.end() != len(data):
        return f"byte {context.end()}: more bytes after the end"
    rationale = None if action[1] is None else action[1].decode()
    return Proposal(action[2].decode(), tuple(params), reason[1].decode(), context[1].decode(), rationale)


def parse_recorded(data: bytes) -> Proposal | str:
    """Read what a record holds: what was accepted under schema 1 has its rationale before `context_ref`."""
    older = _SCHEMA_1.fullmatch(data)
    return parse_proposal(b'{"rationale":"%b",%b%b' % (older[2], older[1], older[3]) if older else data)


def write_proposal(proposal: Proposal) -> bytes:
    """Return the one byte form of a proposal; `parse_proposal` reads it back."""
    params = ",".join(f'"{name}":{text}' for name, text in proposal.params)
    rationale = "" if proposal.rationale is None else f'"rationale":"{proposal.rationale}",'
    return (
        f'{{{rationale}"action":"{proposal.action}","params":{{{params}}},"reason_code":"{proposal.reason_code}"'
        f',"context_ref":"{proposal.context_ref}"}}'
    ).encode()
