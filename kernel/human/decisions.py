"""The decisions of humans, as the record holds them.

A flow has one DECIDED entry, which is the agent's. A human's decision about it is one row of `human_decisions` and one
HUMAN entry, which seals that row. An order that follows from it is reserved and settled like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sds.kernel.canonical import canonical, sha256_hex
from sds.kernel.contract.human_terms import Impact
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.flow.decision_record import seal
from sds.kernel.flow.states import NOT_DECIDED, SAGA_DIRTY, State, move_on
from sds.kernel.human.cases import Case, Decision
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Store

ABORT_TAG = "HUMAN_ABORTED"
TAGS: Mapping[Decision, str] = {"ABORT": ABORT_TAG, "RETURN": NOT_DECIDED}  # of a flow that ends without an order
SEALED_HUMAN = {"human_decisions": "*"}


@dataclass(frozen=True, slots=True)
class HumanDecision:
    """Who decided what about a case, why, and on which state. `packet`: None for RETURN and ABORT, which need none.

    `seen`: the id of the snapshot or of the live state that the human has looked at.
    """

    decision: Decision
    who: str
    reason: str
    impact: Impact
    acknowledged: bool
    seen: str
    contract_hash: str
    lease_until_ms: int
    packet: DecisionPacket | None = None
    data: bytes = b""
    action: str | None = None
    numbers: tuple[tuple[str, int], ...] = ()
    justification: str | None = None


def write_human(store: Store, case: Case, made: HumanDecision, *, state: State, now_ms: int) -> None:
    """Write a human's decision and its HUMAN entry, and move the flow, in the caller's transaction."""
    tag = TAGS.get(made.decision)
    tag = SAGA_DIRTY if case.tag == SAGA_DIRTY else tag  # the tag stays, because some of the saga's steps stand
    envelope = canonical(made.packet.envelope.as_data()) if made.packet else None
    facts: dict[str, Any] = {
        "decision": made.decision,
        "who": made.who,
        "reason": made.reason,
        "impact": made.impact,
        "acknowledged": int(made.acknowledged),
        "policy_kind": made.action,
        "params": canonical(dict(made.numbers)).decode() if made.packet else None,
        "justification": made.justification,
        "seen": made.seen,
        "snapshot_id": made.packet.snapshot.id if made.packet else None,
        "envelope_hash": sha256_hex(envelope) if envelope else None,
        "contract_hash": made.contract_hash,
    }
    store.insert(
        "human_decisions",
        dfid=case.dfid,
        **facts,
        proposal=made.data,
        snapshot=made.packet.snapshot.body.decode() if made.packet else None,
        envelope=envelope.decode() if envelope else None,
        lease_until_ms=made.lease_until_ms,
        decided_at_ms=now_ms,
    )
    move_on(store, "decision_flows", case.dfid, state, was=(case.state,), tag=tag)
    body = {
        **facts,
        "agent_id": case.agent_id,
        "outcome": "ACCEPTED" if made.packet else "REJECTED",
        "proposal_sha256": sha256_hex(made.data),
        "state": state,
        "tag": tag,
        "rows": seal(store, case.dfid, SEALED_HUMAN),
    }
    ledger.append(store, now_ms, "HUMAN", case.dfid, body)
