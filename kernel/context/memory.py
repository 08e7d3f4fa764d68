"""The context store (DIR 3.2a, 3.4): what a model reads, in four layers. Only the kernel writes any of them.

    session    this flow's rejected attempts and why   `flow.observe`; only while the flow is open
    state      what the decision rests on              `context_snapshots`, sealed with the decision
    memory     what became of earlier decisions        here, derived from the sealed record: nothing is kept twice
    artifacts  reference texts by name                 `context.artifacts`

Session and memory contain only codes and numbers of the contract (`decision.phrases`). `RecordedContext` is the
`ContextReader` that a kernel is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from sds.kernel.canonical import in_words, one_line, sha256_hex
from sds.kernel.context import artifacts
from sds.kernel.context.artifacts import DAY_MS, Swept
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import MemorySpec
from sds.kernel.decision import phrases
from sds.kernel.decision.context import Artifact
from sds.kernel.decision.packet import artifacts_text
from sds.kernel.storage.store import Reader, Row, Store
from sds.kernel.storage.vault import PROPOSAL, Texts

CountTokens = Callable[[str], int]

_IN_FORCE = "SELECT 1 FROM artifacts WHERE name = ? AND version = ? AND sha256 = ? AND ended_at_ms IS NULL"

SCAN_MAX = 64  # newest snapshots of one key that are searched: gates that share a record may share keys
AHEAD_MS = 60_000  # how far another process's clock may be ahead; a later time is from before the clock was set back
ENTRIES_SCANNED_MAX = 50_000  # newest ledger entries searched for an agent's decisions: others may share the record
_HEADS = {"key": "Decided before, newest first:", "agent": "Decided before, any case, newest first:"}
_NEWEST = {
    "key": "SELECT c.dfid, l.idx AS n FROM (SELECT dfid FROM context_snapshots"
    " WHERE CASE WHEN json_valid(body) THEN body ->> '$.key' END = ?"
    " AND taken_at_ms <= ? ORDER BY taken_at_ms DESC LIMIT ?) c"
    " CROSS JOIN ledger l ON l.dfid = c.dfid AND l.kind = 'DECIDED'",
    "agent": "SELECT l.dfid, l.idx AS n FROM ledger l CROSS JOIN policy_proposals p ON p.dfid = l.dfid"
    f" WHERE l.idx > (SELECT MAX(idx) FROM ledger) - {ENTRIES_SCANNED_MAX} AND l.kind = 'DECIDED' AND p.agent_id = ?"
    " ORDER BY l.idx DESC LIMIT ?",
}
# CROSS JOIN makes a planner without statistics begin with the few newest rows, not with all proposals of an agent.
_MEMORY = """
SELECT f.dfid, f.contract_hash, f.state, v.outcome, v.reason_code, p.proposal, p.policy_kind, p.params,
       e.kind, e.params, e.status
FROM ({newest}) s
CROSS JOIN policy_proposals p ON p.dfid = s.dfid
CROSS JOIN decision_flows f ON f.dfid = s.dfid
CROSS JOIN dim_validations v ON v.dfid = s.dfid
LEFT JOIN execution_log e ON e.dfid = s.dfid
WHERE p.agent_id = ? AND f.gate = ? AND v.evaluated_at_ms >= ?
ORDER BY s.n DESC LIMIT ?
"""


def memory(store: Reader, contract: Contract, key: str, *, now_ms: int) -> tuple[str, ...]:
    """Return one line for each earlier decision that is remembered, newest first.

    Raises StoreError, ValueError or TypeError when the record cannot be read.
    """
    spec = contract.memory
    if not spec.entries_max or not spec.tokens_max:
        return ()
    newest = (key, now_ms + AHEAD_MS, SCAN_MAX) if spec.scope == "key" else (contract.agent_id, spec.entries_max)
    since_ms = now_ms - spec.days_max * DAY_MS
    rows = store.rows(
        _MEMORY.format(newest=_NEWEST[spec.scope]),
        (*newest, contract.agent_id, contract.gate, since_ms, spec.entries_max),
    )
    return tuple(_entry(contract, Texts(store, row[0], shown=True), row[1:]) for row in rows)


def memory_text(spec: MemorySpec, entries: tuple[str, ...], count_tokens: CountTokens) -> str:
    """Return as many of the newest entries as the token budget holds, as the model reads them; "" when none fits."""
    for kept in range(len(entries), 0, -1):
        text = "".join((f"{_HEADS[spec.scope]}\n", *(f"- {entry}\n" for entry in entries[:kept])))
        if counted(count_tokens, text) <= spec.tokens_max:
            return text
    return ""


def counted(count_tokens: CountTokens, text: str) -> int:
    """Return a text's length in tokens. Raises ValueError when `count_tokens` returns no count."""
    tokens = count_tokens(text)
    if type(tokens) is not int or tokens < 0:
        raise ValueError("the tokenizer gave no count")
    return tokens


def sweep(store: Store, *, who: str, reason: str, now_ms: int) -> Swept:
    """Remove reference texts that are long out of force, after the longest time that any contract in force remembers.

    Sealed rows stay.
    """
    days = store.rows(
        "SELECT json_extract(c.body, '$.memory.days_max') FROM agents a JOIN contracts c ON c.hash = a.contract_hash"
    )
    usual = MemorySpec().days_max  # for a contract that was registered before there was memory
    days_max = max((usual if found is None else int(found) for (found,) in days), default=usual)
    return artifacts.sweep(store, days_max=days_max, who=who, reason=reason, now_ms=now_ms)


def _entry(contract: Contract, texts: Texts, row: Row) -> str:
    """Return one earlier decision as the model reads it: what was decided, and what became of it."""
    made_under, state, outcome, reason_code, data, kind, params, sent_kind, sent_params, status = row
    numbers = json.loads(sent_params if status else params)
    if made_under != contract.hash:  # its amounts may have another scale
        said = phrases.kind_name(contract, sent_kind or kind)
    elif status or numbers:
        said = phrases.decision(contract, sent_kind or kind, numbers)
    else:
        said = phrases.claimed(contract, texts.data(PROPOSAL, data))
    return f"{said}: {_became(contract, sent_kind, state, outcome, reason_code, status)}"


def _became(contract: Contract, kind: str | None, state: str, outcome: str, code: str | None, status: str) -> str:
    if status:
        spec = phrases.kind_spec(contract, kind)
        done = "paid" if spec and spec.spends else "done"
        return {"SUCCESS": done, "FAILED": "failed", "DIRTY": "contradicted"}.get(status, "not known yet")
    if outcome == "ESCALATED":
        return "human"
    return "decided" if state == "CLOSED" else f"rejected, {phrases.reason_code(code)}"


def bytes_of(text: str) -> int:
    """Return a text's length in UTF-8 bytes: no byte-level tokenizer makes more tokens of it."""
    return len(text.encode())


class RecordedContext:
    """The context of a contract's decisions. `count_tokens`: a text's length in tokens of the model, or an upper bound. The
    tokens of the artifacts are counted once for each set of versions.
    """

    def __init__(self, record: Reader, contract: Contract, count_tokens: CountTokens = bytes_of) -> None:
        self._record, self._contract, self._count_tokens = record, contract, count_tokens
        self._names = tuple(dict.fromkeys(contract.artifacts.names))
        self._counted: tuple[tuple[Artifact, ...], int] = ((), 0)

    def artifacts(self) -> tuple[tuple[Artifact, ...], tuple[str, ...]]:
        """Return the texts in force in the contract's order, and (); or () and the reasons why there are none."""
        if not self._names:
            return (), ()
        try:
            found, faults = self._named()
            tokens = self._tokens(found)
        except Exception as error:  # noqa: BLE001  a foreign tokenizer may raise anything: a human decides then
            return (), (one_line(f"the artifacts cannot be read: {in_words(error)}", 200),)
        most = self._contract.artifacts.tokens_max
        if tokens > most:
            faults = (*faults, f"the artifacts are {tokens} tokens long, more than {most}")
        return (() if faults else found), faults

    def in_force(self, read: tuple[Artifact, ...]) -> bool:
        return all(self._record.row(_IN_FORCE, artifact.reference) is not None for artifact in read)

    def memory(self, key: str, now_ms: int) -> str:
        entries = memory(self._record, self._contract, key, now_ms=now_ms)
        return memory_text(self._contract.memory, entries, self._count_tokens)

    def _named(self) -> tuple[tuple[Artifact, ...], tuple[str, ...]]:
        """Return the artifacts in force that the contract names, and what is wrong with them."""
        names = self._names
        rows = self._record.rows(
            "SELECT name, version, sha256, text FROM artifacts WHERE ended_at_ms IS NULL"
            f" AND name IN ({', '.join('?' * len(names))})",
            names,
        )
        kept = {row[0]: Artifact(*row) for row in rows}
        faults = [f"artifact `{name}` is missing" for name in names if name not in kept]
        faults += [f"artifact `{a.name}` was altered" for a in kept.values() if sha256_hex(a.text.encode()) != a.sha256]
        return tuple(kept[name] for name in names if name in kept), tuple(faults)

    def _tokens(self, found: tuple[Artifact, ...]) -> int:
        if self._counted[0] != found:
            self._counted = found, counted(self._count_tokens, artifacts_text(found))
        return self._counted[1]
