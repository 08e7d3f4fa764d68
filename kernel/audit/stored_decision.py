"""A decision read back from the record, as the user space was asked and as it answered: what a replay needs.

It only reads. The packet is for reading, too: the record does not hold its situation, so that it permits nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sds.kernel.contract.compiler import Snapshot
from sds.kernel.decision.packet import ALTERNATIVES_UNAVAILABLE, DecisionPacket, Decoding
from sds.kernel.decision.safeguards import EnvelopeInputs
from sds.kernel.envelope.envelope import envelope_from_data
from sds.kernel.errors import NOT_AS_WRITTEN, UsageError, reading, unreadable
from sds.kernel.flow.decision_record import SEALED, seal
from sds.kernel.flow.states import ADOPTED
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Reader
from sds.kernel.storage.vault import FACTS, PROPOSAL, Texts

NOT_DECIDED = "NOT_DECIDED"
_AFTER = "SELECT dfid FROM decision_flows WHERE parent_dfid = ? ORDER BY created_at_ms, dfid LIMIT 1"
_COLUMNS = (
    *("f.event_id", "f.agent_id", "f.contract_hash", "c.mission_hash", "f.created_at_ms", "f.tag", "s.snapshot_id"),
    *("s.body", "s.envelope_hash", "s.envelope", "s.prompt", "s.security", "s.taken_at_ms", "p.proposal", "p.model"),
    *("p.confidence", "p.alternatives", "p.tokens", "p.passes", "p.duration_ms"),
)
_FROM = """
FROM decision_flows f LEFT JOIN contracts c ON c.hash = f.contract_hash
LEFT JOIN context_snapshots s ON s.dfid = f.dfid LEFT JOIN policy_proposals p ON p.dfid = f.dfid
WHERE f.dfid = ?
"""


@dataclass(frozen=True, slots=True)
class Decided:
    """What was asked, what was proposed, and what was measured. `schema`: the proposal schema of its contract, "" when that
    names none. `faults`: where the record is not what was sealed, one line each.
    """

    packet: DecisionPacket
    data: bytes
    decoding: Decoding
    schema: str
    faults: tuple[str, ...]


def read_decided(store: Reader, dfid: str) -> Decided:
    """Read the last proposal of a flow that has been decided.

    Raises UsageError when there is none, ErasedError when its texts were erased, StoreError when it cannot be read.
    """
    row = store.row(f"SELECT {', '.join(_COLUMNS)} {_FROM}", (dfid,))
    if row is None:
        raise UsageError(f"there is no flow `{dfid}` in the record", hint="sds flows", reason_code=NOT_DECIDED)
    found = {name.partition(".")[2]: value for name, value in zip(_COLUMNS, row, strict=True)}
    entry = store.row(f"SELECT {ledger.COLUMNS} FROM ledger WHERE dfid = ? AND kind = 'DECIDED'", (dfid,))
    if entry is None:
        adopted = found["tag"] == ADOPTED
        why = "was taken over from the outside, not decided here" if adopted else "is not decided yet"
        raise UsageError(f"flow `{dfid}` {why}", hint=f"sds audit {dfid}", dfid=dfid, reason_code=NOT_DECIDED)
    if not found["proposal"]:
        how = f" ({found['tag']})" if found["tag"] else ""
        after = store.value(_AFTER, (dfid,))
        raise UsageError(
            f"flow `{dfid}` ended without a proposal{how}",
            hint=f"name `{after}`, which is a step of it or followed it" if after else "",
            dfid=dfid,
            reason_code=NOT_DECIDED,
        )
    texts = Texts(store, dfid)
    with reading(unreadable(dfid)):
        body = json.loads(entry[4])
        found["prompt"], data = texts.prompt(found["prompt"]), texts.data(PROPOSAL, found["proposal"])
        decoding = _decoding(found, texts.fields(FACTS, body.get("decoding", {})))
        schema = _schema(store, found["contract_hash"])
        return Decided(_packet(dfid, found), data, decoding, schema, _faults(store, dfid, entry, body))


def _schema(store: Reader, contract_hash: str) -> str:
    body = store.value("SELECT body FROM contracts WHERE hash = ?", (contract_hash,))
    try:
        return str(json.loads(body or "{}").get("proposal_schema", ""))
    except NOT_AS_WRITTEN:  # the decision can be read all the same
        return ""


def _packet(dfid: str, found: Mapping[str, Any]) -> DecisionPacket:
    body = json.loads(found["body"])
    snapshot = Snapshot(
        found["snapshot_id"], found["body"].encode(), body["fields"], body["version"], found["taken_at_ms"]
    )
    return DecisionPacket(
        dfid=dfid,
        event_id=found["event_id"],
        key=body["key"],
        agent_id=found["agent_id"],
        contract_hash=found["contract_hash"],
        mission_hash=found["mission_hash"],
        snapshot=snapshot,
        situation=EnvelopeInputs(
            body["fields"], agent_active=False, in_effect=False, halted=True, spend_left=0, context_whole=False
        ),
        envelope=envelope_from_data(json.loads(found["envelope"]), found["envelope_hash"]),
        texts=found["prompt"],
        security=tuple(json.loads(found["security"])),
        notes=(),
        created_at_ms=found["created_at_ms"],
        expires_at_ms=0,
    )


def _decoding(found: Mapping[str, Any], facts: Mapping[str, object]) -> Decoding:
    measured = json.loads(found["alternatives"])
    names = ("model", "confidence", "tokens", "passes", "duration_ms")
    return Decoding(
        **{name: found[name] for name in names},
        alternatives=None if measured == ALTERNATIVES_UNAVAILABLE else tuple(map(_alternative, measured)),
        facts=dict(facts),
    )


def _alternative(choice: Mapping[str, Any]) -> dict[str, object]:
    shares = {str(label): float(share) for label, share in choice["probabilities"].items()}
    return {"choice": choice["choice"], "chosen": choice["chosen"], "z": float(choice["z"]), "probabilities": shares}


def _faults(store: Reader, dfid: str, entry: tuple[Any, ...], body: Mapping[str, Any]) -> tuple[str, ...]:
    """Compare the flow's rows with their seals, and the ledger entry that holds the seals with its own hash."""
    now = seal(store, dfid, SEALED)
    altered = [f"table {name} differs from its seal" for name in SEALED if now[name] != body["rows"][name]]
    if ledger.entry_hash(*entry[:6]) != entry[6]:
        altered.append(f"ledger entry {entry[0]} does not match its hash")
    return tuple(altered)
