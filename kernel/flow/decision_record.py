"""The durable verdict: everything one decision rests on, written in the caller's one transaction, and sealed.

The DECIDED entry of the ledger carries a digest of every row written here; `audit.verify` computes them again. Texts are
encrypted before they are written (`storage.vault`). The digests are of ciphertexts, so they hold when a key is destroyed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sds.kernel.canonical import canonical, sha256_hex
from sds.kernel.decision.dim import Verdict
from sds.kernel.decision.jit import JitReport
from sds.kernel.decision.packet import ALTERNATIVES_UNAVAILABLE, DecisionPacket, Decoding
from sds.kernel.errors import UsageError
from sds.kernel.executor.protocol import ExecutionIntent
from sds.kernel.flow.observe import FLOW, OpenFlow
from sds.kernel.storage import ledger
from sds.kernel.storage.keyring import CaseKey
from sds.kernel.storage.ledger import Head
from sds.kernel.storage.store import Reader, Row, Store
from sds.kernel.storage.vault import (
    ATTEMPT,
    JUSTIFICATION,
    PROMPT,
    PROPOSAL,
    Texts,
    key_digest,
    key_of_case,
    seal_facts,
)

STEP_ID = "execute"

CASE_KEY = "case_keys"  # under this name a flow's seals hold the digest of its case's wrapped key
DEADLINE = "flow_deadlines"  # and under this one, of a flow that has a deadline, the digest of that row

# The immutable columns of each sealed table. `audit` derives the columns that may change from the ledger.
SEALED = {
    "decision_flows": FLOW,
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

_IN_ORDER = "ORDER BY 1, 2"
_PLAIN = frozenset({int, str, bytes, type(None)})  # a column gives back a value of one of these types as it is
_ORDER = "SELECT dfid, idempotency_key, kind, params, resource_key, state_version, signature FROM execution_log"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One proposal for one packet, and what was found about it. `report` is None unless the proposal was accepted.

    `flow`: its open flow, inside the transaction that ends the attempt. None outside of it, and when a human decides.
    """

    packet: DecisionPacket
    data: bytes
    decoding: Decoding
    verdict: Verdict
    report: JitReport | None = None
    number: int = 1
    now_ms: int = 0
    flow: OpenFlow | None = None

    @property
    def open_flow(self) -> OpenFlow:
        """Return the attempt's flow. Raises UsageError outside the transaction that ends it."""
        if self.flow is None:
            raise UsageError("an attempt must end in a transaction that has read its flow", dfid=self.packet.dfid)
        return self.flow


def seal(store: Reader, dfid: str, tables: Mapping[str, str]) -> dict[str, str]:
    """Return one digest for each table, of all rows of this flow in key order; with the flow's own table, those of its case
    key and its deadline, if it has them.
    """
    seals: dict[str, str] = {}
    if "decision_flows" in tables:
        if key := key_digest(store, dfid):
            seals[CASE_KEY] = key
        if rows := store.rows("SELECT dfid, deadline_ms FROM flow_deadlines WHERE dfid = ?", (dfid,)):
            seals[DEADLINE] = ledger.rows_digest(rows)
    for table, columns in tables.items():
        rows = store.rows(f"SELECT {columns} FROM {table} WHERE dfid = ? {_IN_ORDER}", (dfid,))
        seals[table] = ledger.rows_digest(rows)
    return seals


def write_decision(
    store: Store, attempt: Attempt, *, state: str, tag: str | None, more: Mapping[str, Any] | None = None
) -> None:
    """Write snapshot, proposal and verdict of a flow's final attempt, and its one DECIDED entry with `more` in it.

    The digests are of what is written: reading it all back would take as long again.
    """
    packet, verdict, flow = attempt.packet, attempt.verdict, attempt.open_flow
    key, wrapped = key_of_case(store, flow.case)
    envelope, envelope_hash = _envelope(packet)
    proposal = key.seal(PROPOSAL, attempt.data)
    rows = {
        "context_snapshots": _write_snapshot(store, packet, key, envelope, envelope_hash),
        "policy_proposals": _write_proposal(store, attempt, key, proposal),
        "dim_validations": _write_verdict(store, attempt),
    }
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
        "envelope_hash": envelope_hash,
        "proposal_sha256": sha256_hex(proposal),
        "rows": rows | _seals_of_flow(store, flow, wrapped),
    }
    if packet.situation.artifacts:
        body["artifacts"] = [artifact.reference for artifact in packet.situation.artifacts]
    if attempt.decoding.facts:
        body["decoding"] = seal_facts(key, attempt.decoding.facts)
    ledger.append(store, attempt.now_ms, "DECIDED", packet.dfid, body | dict(more or {}), after=flow.head)


def _seals_of_flow(store: Reader, flow: OpenFlow, wrapped: bytes) -> dict[str, str]:
    """Return the seals of what was written before the last attempt, named as `seal` names them."""
    dfid = flow.row[0]
    earlier = store.rows(f"SELECT * FROM attempts WHERE dfid = ? {_IN_ORDER}", (dfid,)) if flow.attempts else []
    seals = {"decision_flows": ledger.rows_digest([flow.row]), "attempts": ledger.rows_digest(earlier)}
    if wrapped:
        seals[CASE_KEY] = sha256_hex(wrapped)
    if flow.deadline_ms is not None:
        seals[DEADLINE] = ledger.rows_digest([(dfid, flow.deadline_ms)])
    return seals


def _insert_sealed(store: Store, table: str, more: Mapping[str, Any] = MappingProxyType({}), **values: Any) -> str:
    """Insert one row: the sealed columns `values`, in their order, and `more`. Return the digest of the sealed columns."""
    kept = {name: as_kept(value) for name, value in values.items()}
    store.insert(table, **kept, **more)
    return ledger.rows_digest([tuple(kept.values())])


def as_kept(value: Any) -> Any:
    """Return a value as its column gives it back: plain int, float or str, whatever subclass it is here."""
    if type(value) in _PLAIN:
        return value
    match value:
        case bool() | int():
            return int(value)
        case float():  # SQLite has no NaN, and one zero
            return None if value != value else float(value) + 0.0  # noqa: PLR0124  as only NaN does
        case str():
            return str.__str__(value)
    return value


def _real(value: float | None) -> float | None:
    """Return a number as a float, for a column of fractions."""
    return None if value is None else float(value)


def _envelope(packet: DecisionPacket) -> tuple[str, str]:
    """Return the canonical JSON of a packet's envelope, and its SHA-256."""
    data = canonical(packet.envelope.as_data())
    return data.decode(), sha256_hex(data)


def _write_snapshot(store: Store, packet: DecisionPacket, key: CaseKey, envelope: str, envelope_hash: str) -> str:
    """Write what the decision rests on; return the digest of the row."""
    return _insert_sealed(
        store,
        "context_snapshots",
        dfid=packet.dfid,
        snapshot_id=packet.snapshot.id,
        body=packet.snapshot.body.decode(),
        envelope_hash=envelope_hash,
        envelope=envelope,
        prompt=key.seal_text(PROMPT, canonical(packet.texts).decode()),
        security=canonical(packet.security).decode(),
        taken_at_ms=packet.snapshot.taken_at_ms,
    )


def _write_verdict(store: Store, attempt: Attempt) -> str:
    """Write what was found about the proposal; return the digest of the row."""
    verdict, report = attempt.verdict, attempt.report
    drift = report and {name: getattr(report, name) for name in ("ok", "age_ms", "drift", "objections", "code")}
    return _insert_sealed(
        store,
        "dim_validations",
        dfid=attempt.packet.dfid,
        outcome=verdict.outcome,
        gate_reached=verdict.gate_reached,
        reason_code=verdict.reason_code,
        reasons=_reasons(verdict),
        drift=canonical(drift).decode() if drift else None,
        attempt_number=attempt.number,
        evaluated_at_ms=attempt.now_ms,
    )


def _reasons(verdict: Verdict) -> str:
    """Return a verdict's reasons as the record keeps them: canonical JSON of [gate, code, message]."""
    return canonical([[r.gate, r.code, r.message] for r in verdict.reasons]).decode()


def _write_proposal(store: Store, attempt: Attempt, key: CaseKey, sealed: bytes) -> str:
    """Write what was proposed (`sealed`: its ciphertext) and measured; return the digest of the row."""
    proposal, decoding = attempt.verdict.proposal, attempt.decoding
    rationale = key.seal_text(JUSTIFICATION, proposal.rationale) if proposal and proposal.rationale else ""
    justification = [proposal.reason_code, rationale] if proposal else []
    alternatives = ALTERNATIVES_UNAVAILABLE if decoding.alternatives is None else decoding.alternatives
    return _insert_sealed(
        store,
        "policy_proposals",
        dfid=attempt.packet.dfid,
        agent_id=attempt.packet.agent_id,
        policy_kind=proposal.action if proposal else None,
        params=canonical(dict(attempt.verdict.amounts_minor)).decode(),
        context_ref=proposal.context_ref if proposal else None,
        justification=": ".join(part for part in justification if part) or None,
        confidence=_real(decoding.confidence),
        proposal=sealed,
        model=decoding.model,
        alternatives=canonical(alternatives).decode(),
        tokens=decoding.tokens,
        passes=decoding.passes,
        duration_ms=_real(decoding.duration_ms),
    )


def write_attempt(store: Store, attempt: Attempt) -> None:
    """Keep a rejected attempt while the flow goes on."""
    store.insert(
        "attempts",
        dfid=attempt.packet.dfid,
        attempt_number=attempt.number,
        proposal=key_of_case(store, attempt.open_flow.case)[0].seal(ATTEMPT, attempt.data),
        reasons=_reasons(attempt.verdict),
        tokens=attempt.decoding.tokens,
        evaluated_at_ms=attempt.now_ms,
    )


def write_reservation(
    store: Store,
    intent: ExecutionIntent,
    needs: Row,
    taken: Mapping[str, list[Row]],
    now_ms: int,
    *,
    after: Head | None,
) -> Head:
    """Write the order that is about to be sent, and its RESERVED entry; return that. `taken`: the rows of what it takes."""
    order = _insert_sealed(
        store,
        "execution_log",
        {"status": "PENDING"},
        dfid=intent.dfid,
        idempotency_key=intent.idempotency_key,
        step_id=STEP_ID,
        kind=intent.kind,
        params=canonical(dict(intent.params)).decode(),
        resource_key=intent.resource_key,
        state_version=intent.state_version,
        signature=intent.signature,
        reserved_at_ms=now_ms,
    )
    rows = {"execution_log": order} | {table: ledger.rows_digest(rows) for table, rows in taken.items()}
    body = {"idempotency_key": intent.idempotency_key, "kind": intent.kind, "params": dict(intent.params)}
    return ledger.append(store, now_ms, "RESERVED", intent.dfid, {**body, "needs": needs, "rows": rows}, after=after)


def read_order(store: Reader, dfid: str) -> ExecutionIntent | None:
    """Return a flow's order as the record has it. Verify its signature before acting on it."""
    row = store.row(f"{_ORDER} WHERE dfid = ?", (dfid,))
    if row is None:
        return None
    dfid, key, kind, params, resource_key, version, signature = row
    return ExecutionIntent(dfid, key, kind, _numbers(params), resource_key, version, signature)


def _numbers(text: str) -> tuple[tuple[str, int], ...]:
    """Return an order's numbers; none when the row was altered beyond reading: then its signature does not fit either."""
    try:
        return tuple(sorted(json.loads(text).items()))
    except (AttributeError, TypeError, ValueError, RecursionError):
        return ()


def read_basis(store: Reader, dfid: str) -> tuple[bytes, tuple[tuple[str, int, str], ...]]:
    """Return what a decided flow proposed, b"" for nothing, and the references of the artifacts it read."""
    proposal = store.value("SELECT proposal FROM policy_proposals WHERE dfid = ?", (dfid,))
    data = Texts(store, dfid, shown=True).data(PROPOSAL, proposal) if isinstance(proposal, bytes) else b""
    read = store.value("SELECT body -> '$.artifacts' FROM ledger WHERE dfid = ? AND kind = 'DECIDED'", (dfid,))
    return data, tuple((name, version, sha256) for name, version, sha256 in json.loads(read or "[]"))
