"""The durable verdict: everything one decision rests on, written in the caller's one transaction, and sealed.

The DECIDED entry of the ledger carries a digest of every row written here; `audit.verify` computes them again. Texts
are sealed before they are written (`storage.vault`), so the digests are of ciphertexts: they hold when a key is destroyed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sds.kernel.canonical import canonical, sha256_hex
from sds.kernel.decision.packet import ALTERNATIVES_UNAVAILABLE, DecisionPacket
from sds.kernel.executor.protocol import ExecutionIntent
from sds.kernel.flow.attempts import Attempt, reasons_text
from sds.kernel.storage import ledger
from sds.kernel.storage.keyring import CaseKey
from sds.kernel.storage.store import Reader, Row, Store
from sds.kernel.storage.vault import JUSTIFICATION, PROMPT, PROPOSAL, Texts, key_digest, key_for_flow, seal_facts

STEP_ID = "execute"

CASE_KEY = "case_keys"  # among the seals of a flow: the digest of its case's wrapped key
DEADLINE = "flow_deadlines"  # the same, of a flow that has a deadline: the digest of its row

# Immutable columns of each sealed table, by flow. What may still change is derived from the ledger instead.
SEALED = {
    "decision_flows": "dfid, agent_id, trigger_event, parent_dfid, gate, event_id, contract_hash, restarts, created_at_ms, lease_until_ms",
    "context_snapshots": "*",
    "policy_proposals": "*",
    "dim_validations": "*",
    "attempts": "*",
}
RESERVED = {
    "execution_log": "dfid, idempotency_key, step_id, kind, params, resource_key, state_version, signature, reserved_at_ms",
    "reservations": "dfid, resource, amount",
    "spend": "dfid, scope, amount",
}
ADOPTED_ROWS = {"decision_flows": SEALED["decision_flows"], **RESERVED}
SAGA = {"decision_flows": SEALED["decision_flows"], "sagas": "dfid, name, steps, menu"}

_ORDER = "SELECT dfid, idempotency_key, kind, params, resource_key, state_version, signature FROM execution_log"


def seal(store: Reader, dfid: str, tables: Mapping[str, str]) -> dict[str, str]:
    """Return one digest for each table: of all rows of this flow, in key order; and of the key of its case and of its
    deadline, if it has them.
    """
    seals: dict[str, str] = {}
    if "decision_flows" in tables:
        if key := key_digest(store, dfid):
            seals[CASE_KEY] = key
        if rows := store.rows("SELECT dfid, deadline_ms FROM flow_deadlines WHERE dfid = ?", (dfid,)):
            seals[DEADLINE] = ledger.rows_digest(rows)
    for table, columns in tables.items():
        rows = store.rows(f"SELECT {columns} FROM {table} WHERE dfid = ? ORDER BY 1, 2", (dfid,))
        seals[table] = ledger.rows_digest(rows)
    return seals


def write_decision(
    store: Store, attempt: Attempt, *, state: str, tag: str | None, more: Mapping[str, Any] | None = None
) -> None:
    """Write snapshot, proposal and verdict of a flow's final attempt, and its one DECIDED entry with `more` in it."""
    packet, verdict = attempt.packet, attempt.verdict
    key = key_for_flow(store, packet.dfid)
    body: dict[str, Any] = {
        "outcome": verdict.outcome,
        "state": state,
        "tag": tag,
        "action": verdict.proposal.action if verdict.proposal else None,
        "params": dict(verdict.amounts_minor),
        "reason_code": verdict.reason_code,
        "agent_id": packet.agent_id,
        "contract_hash": packet.contract_hash,
        "snapshot_id": packet.snapshot.id,
        "envelope_hash": _write_snapshot(store, packet, key),
        "proposal_sha256": _write_proposal(store, attempt, key),
    }
    _write_verdict(store, attempt)
    body["rows"] = seal(store, packet.dfid, SEALED)  # of the rows above
    if packet.situation.artifacts:
        body["artifacts"] = [artifact.reference for artifact in packet.situation.artifacts]
    if attempt.decoding.facts:
        body["decoding"] = seal_facts(key, attempt.decoding.facts)
    ledger.append(store, attempt.now_ms, "DECIDED", packet.dfid, body | dict(more or {}))


def _write_snapshot(store: Store, packet: DecisionPacket, key: CaseKey) -> str:
    """Write what the decision rests on; return the SHA-256 of its envelope."""
    envelope = canonical(packet.envelope.as_data())
    envelope_hash = sha256_hex(envelope)
    store.insert(
        "context_snapshots",
        dfid=packet.dfid,
        snapshot_id=packet.snapshot.id,
        body=packet.snapshot.body.decode(),
        envelope_hash=envelope_hash,
        envelope=envelope.decode(),
        prompt=key.seal_text(PROMPT, canonical(packet.texts).decode()),
        security=canonical(packet.security).decode(),
        taken_at_ms=packet.snapshot.taken_at_ms,
    )
    return envelope_hash


def _write_verdict(store: Store, attempt: Attempt) -> None:
    verdict, report = attempt.verdict, attempt.report
    drift = report and {name: getattr(report, name) for name in ("ok", "age_ms", "drift", "objections", "code")}
    store.insert(
        "dim_validations",
        dfid=attempt.packet.dfid,
        outcome=verdict.outcome,
        gate_reached=verdict.gate_reached,
        reason_code=verdict.reason_code,
        reasons=reasons_text(verdict),
        drift=canonical(drift).decode() if drift else None,
        attempt_number=attempt.number,
        evaluated_at_ms=attempt.now_ms,
    )


def _write_proposal(store: Store, attempt: Attempt, key: CaseKey) -> str:
    """Write what was proposed and measured; return the SHA-256 of the sealed proposal."""
    proposal, decoding = attempt.verdict.proposal, attempt.decoding
    sealed = key.seal(PROPOSAL, attempt.data)
    rationale = key.seal_text(JUSTIFICATION, proposal.rationale) if proposal and proposal.rationale else ""
    justification = [proposal.reason_code, rationale] if proposal else []
    alternatives = ALTERNATIVES_UNAVAILABLE if decoding.alternatives is None else decoding.alternatives
    store.insert(
        "policy_proposals",
        dfid=attempt.packet.dfid,
        agent_id=attempt.packet.agent_id,
        policy_kind=proposal.action if proposal else None,
        params=canonical(dict(attempt.verdict.amounts_minor)).decode(),
        context_ref=proposal.context_ref if proposal else None,
        justification=": ".join(part for part in justification if part) or None,
        confidence=decoding.confidence,
        proposal=sealed,
        model=decoding.model,
        alternatives=canonical(alternatives).decode(),
        tokens=decoding.tokens,
        passes=decoding.passes,
        duration_ms=decoding.duration_ms,
    )
    return sha256_hex(sealed)


def write_reservation(store: Store, intent: ExecutionIntent, needs: Row, now_ms: int) -> None:
    """Write the order that is about to be sent, and its RESERVED entry."""
    store.insert(
        "execution_log",
        dfid=intent.dfid,
        idempotency_key=intent.idempotency_key,
        step_id=STEP_ID,
        kind=intent.kind,
        params=canonical(dict(intent.params)).decode(),
        resource_key=intent.resource_key,
        state_version=intent.state_version,
        signature=intent.signature,
        reserved_at_ms=now_ms,
        status="PENDING",
    )
    body = {"idempotency_key": intent.idempotency_key, "kind": intent.kind, "params": dict(intent.params)}
    ledger.append(
        store, now_ms, "RESERVED", intent.dfid, {**body, "needs": needs, "rows": seal(store, intent.dfid, RESERVED)}
    )


def is_ordered(store: Reader, key: str) -> bool:
    """Tell whether the record has an order under an idempotency key, of whatever flow."""
    return store.value("SELECT 1 FROM execution_log WHERE idempotency_key = ?", (key,)) is not None


def reserved_at_ms(store: Reader, dfid: str) -> int:
    """Return when a flow's order was reserved, by the clock inside that transaction."""
    return int(store.value("SELECT reserved_at_ms FROM execution_log WHERE dfid = ?", (dfid,)))


def read_order(store: Reader, dfid: str) -> ExecutionIntent | None:
    """Return a flow's order as it stands in the record; whoever acts on it verifies its signature first."""
    row = store.row(f"{_ORDER} WHERE dfid = ?", (dfid,))
    if row is None:
        return None
    dfid, key, kind, params, resource_key, version, signature = row
    return ExecutionIntent(dfid, key, kind, _numbers(params), resource_key, version, signature)


def _numbers(text: str) -> tuple[tuple[str, int], ...]:
    """Return an order's numbers; none when the row was altered beyond reading, which its signature then shows."""
    try:
        return tuple(sorted(json.loads(text).items()))
    except (AttributeError, TypeError, ValueError, RecursionError):
        return ()


def read_basis(store: Reader, dfid: str) -> tuple[bytes, tuple[tuple[str, int, str], ...]]:
    """Return what a decided flow proposed, b"" where it proposed nothing, and the references of the artifacts it read."""
    proposal = store.value("SELECT proposal FROM policy_proposals WHERE dfid = ?", (dfid,))
    data = Texts(store, dfid, shown=True).data(PROPOSAL, proposal) if isinstance(proposal, bytes) else b""
    read = store.value("SELECT body -> '$.artifacts' FROM ledger WHERE dfid = ? AND kind = 'DECIDED'", (dfid,))
    return data, tuple((name, version, sha256) for name, version, sha256 in json.loads(read or "[]"))
