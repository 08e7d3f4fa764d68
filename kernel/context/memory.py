"""The context store (DIR 3.2a, 3.4): what a model is told, in four layers. Only the kernel writes any of them.

    session    this flow's rejected attempts and why   `attempts`; told only while the flow is open
    state      what the decision rests on              `context_snapshots`, sealed with the decision
    memory     what became of earlier decisions        derived from the sealed record: nothing is kept twice
    artifacts  reference texts by name                 `kernel.artifacts`

Session and memory are told in codes and numbers of the contract alone. No key, no rationale, no word of a customer,
a model or an executor is ever part of them, so they cannot carry an instruction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sds.kernel.context import artifacts
from sds.kernel.context.artifacts import DAY_MS, CountTokens, Swept, counted
from sds.kernel.contract.schema import Contract, KindSpec, MemorySpec
from sds.kernel.envelope.bounds import MAGNITUDE_MAX, format_literal, parse_literal
from sds.kernel.envelope.envelope import ESCALATE
from sds.kernel.envelope.proposal import parse_recorded
from sds.kernel.errors import StoreError
from sds.kernel.storage.store import Reader, Row, Store
from sds.kernel.storage.vault import ATTEMPT, PROPOSAL, Texts

SCAN_MAX = 64  # of one key's newest decisions, how many are looked at: gates that share a record may share keys
CODES_MAX = 4
_CODE = re.compile("[A-Z][A-Z0-9_]{0,63}")
_HEADS = {"key": "Decided before, newest first:", "agent": "Decided before, any case, newest first:"}
_NEWEST = {
    "key": "SELECT dfid, rowid AS n FROM context_snapshots"
    " WHERE CASE WHEN json_valid(body) THEN body ->> '$.key' END = ? ORDER BY rowid DESC LIMIT ?",
    "agent": "SELECT dfid, rowid AS n FROM policy_proposals WHERE agent_id = ? ORDER BY rowid DESC LIMIT ?",
}
_MEMORY = """
SELECT f.dfid, f.contract_hash, f.state, v.outcome, v.reason_code, p.proposal, p.policy_kind, p.params,
       e.kind, e.params, e.status
FROM ({newest}) s
JOIN policy_proposals p ON p.dfid = s.dfid
JOIN decision_flows f ON f.dfid = s.dfid
JOIN dim_validations v ON v.dfid = s.dfid
LEFT JOIN execution_log e ON e.dfid = s.dfid
WHERE p.agent_id = ? AND f.gate = ? AND v.evaluated_at_ms >= ?
ORDER BY s.n DESC LIMIT ?
"""
_SESSION = """
SELECT a.proposal, a.reasons FROM decision_flows f JOIN attempts a ON a.dfid = f.dfid
WHERE f.dfid = ? AND f.state = 'ACTIVE' ORDER BY a.attempt_number
"""


def memory(store: Reader, contract: Contract, key: str, *, now_ms: int) -> tuple[str, ...]:
    """Return one line for each earlier decision that is remembered, newest first.

    Raises StoreError, ValueError or TypeError when the record cannot be read.
    """
    spec = contract.memory
    if not spec.entries_max or not spec.tokens_max:
        return ()
    newest = (key, SCAN_MAX) if spec.scope == "key" else (contract.agent_id, spec.entries_max)
    since_ms = now_ms - spec.days_max * DAY_MS
    rows = store.rows(
        _MEMORY.format(newest=_NEWEST[spec.scope]),
        (*newest, contract.agent_id, contract.gate, since_ms, spec.entries_max),
    )
    return tuple(_entry(contract, Texts(store, row[0], shown=True), row[1:]) for row in rows)


def memory_text(spec: MemorySpec, entries: tuple[str, ...], count_tokens: CountTokens) -> str:
    """Return as many of the newest entries as the budget holds, as the model reads them; none, no text."""
    for kept in range(len(entries), 0, -1):
        text = "".join((f"{_HEADS[spec.scope]}\n", *(f"- {entry}\n" for entry in entries[:kept])))
        if counted(count_tokens, text) <= spec.tokens_max:
            return text
    return ""


def session(store: Reader, contract: Contract, dfid: str) -> str:
    """Return what an open flow has had rejected so far, as the model reads it; nothing once the flow has ended.

    Raises StoreError.
    """
    try:
        texts = Texts(store, dfid)
        attempts = [
            f"{_claimed(contract, texts.data(ATTEMPT, said))} ({_codes(why)})"
            for said, why in store.rows(_SESSION, (dfid,))
        ]
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError("the attempts of this flow cannot be read", dfid=dfid) from error
    return f"Rejected before: {'; '.join(attempts)}" if attempts else ""


def rejected(store: Reader, dfid: str) -> tuple[frozenset[bytes], int]:
    """Return the proposals a flow has had rejected, and the tokens they took."""
    rows, texts = store.rows("SELECT proposal, tokens FROM attempts WHERE dfid = ?", (dfid,)), Texts(store, dfid)
    return frozenset(texts.data(ATTEMPT, row[0]) for row in rows), sum(row[1] for row in rows)


def sweep(store: Store, *, who: str, reason: str, now_ms: int) -> Swept:
    """Remove what is past its time and nothing proves: reference texts long out of force.

    Sealed rows stay. The time is the longest that any contract in force remembers.
    """
    days = store.rows(
        "SELECT json_extract(c.body, '$.memory.days_max') FROM agents a JOIN contracts c ON c.hash = a.contract_hash"
    )
    usual = MemorySpec().days_max  # a contract that was registered before there was memory
    days_max = max((usual if found is None else int(found) for (found,) in days), default=usual)
    return artifacts.sweep(store, days_max=days_max, who=who, reason=reason, now_ms=now_ms)


def _entry(contract: Contract, texts: Texts, row: Row) -> str:
    made_under, state, outcome, reason_code, data, kind, params, sent_kind, sent_params, status = row
    numbers = json.loads(sent_params if status else params)
    if made_under != contract.hash:  # its amounts have the scale of another contract
        said = _kind(contract, sent_kind or kind)
    elif status or numbers:
        said = _decision(contract, sent_kind or kind, numbers)
    else:
        said = _claimed(contract, texts.data(PROPOSAL, data))
    return f"{said}: {_became(contract, sent_kind, state, outcome, reason_code, status)}"


def _became(contract: Contract, kind: str | None, state: str, outcome: str, code: str | None, status: str) -> str:
    if status:
        spec = _spec(contract, kind)
        done = "paid" if spec and spec.spends else "done"
        return {"SUCCESS": done, "FAILED": "failed", "DIRTY": "contradicted"}.get(status, "not known yet")
    if outcome == "ESCALATED":
        return "human"
    return "decided" if state == "CLOSED" else f"rejected, {_code(code)}"


def _claimed(contract: Contract, data: bytes) -> str:
    """Tell proposal bytes in the contract's own words; what it has no word for is not repeated."""
    parsed = parse_recorded(data)
    if isinstance(parsed, str):
        return "no proposal"
    params = spec.params if (spec := _spec(contract, parsed.action)) else {}
    numbers = {n: parse_literal(t, params[n].scale) for n, t in parsed.params if n in params}
    return _decision(contract, parsed.action, numbers)


def _decision(contract: Contract, kind: str | None, numbers: Mapping[str, Any]) -> str:
    spec = _spec(contract, kind)
    if spec is None:
        return _kind(contract, kind)
    known = [(n, numbers[n], spec.scale(n)) for n in sorted({*spec.params, *spec.fills}) if n in numbers]
    if len(known) == 1:
        return f"{kind} {_number(*known[0][1:])}"
    return ", ".join((f"{kind}", *(f"{n} {_number(value, scale)}" for n, value, scale in known)))


def _kind(contract: Contract, kind: str | None) -> str:
    return f"{kind}" if kind == ESCALATE or _spec(contract, kind) else "another kind"


def _spec(contract: Contract, kind: str | None) -> KindSpec | None:
    return contract.kinds.get(kind or "") or contract.human.kinds.get(kind or "")


def _number(value: object, scale: int) -> str:
    return format_literal(value, scale) if type(value) is int and abs(value) <= MAGNITUDE_MAX else "?"


def _codes(reasons: str) -> str:
    codes = dict.fromkeys(_code(code) for _, code, _ in json.loads(reasons))
    return ", ".join(list(codes)[:CODES_MAX])


def _code(code: object) -> str:
    return code if isinstance(code, str) and _CODE.fullmatch(code) else "NO_CODE"
