"""The contracts a record knows: which versions there were, and which one is in force."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import EventSpec
from sds.kernel.errors import ContractError, StoreError, reading
from sds.kernel.storage.store import Reader, Row

VERSIONS_MAX = 1000

ContractStanding = Literal["in force", "superseded", "revoked"]

_NO_ENTRY: tuple[int, dict[str, Any]] = (0, {})  # stands for the entry of a contract that the ledger does not know


@dataclass(frozen=True, slots=True)
class Version:
    """One registered contract. `who` and `reason` are "" when none was given."""

    gate: str
    agent_id: str
    version: str
    contract_hash: str
    standing: ContractStanding
    registered_at_ms: int
    who: str
    reason: str


def versions(store: Reader) -> list[Version]:
    """Return the latest VERSIONS_MAX registered contracts, oldest first. Raises StoreError when they cannot be read."""
    rows = store.rows(
        "SELECT c.gate, c.agent_id, c.version, c.hash, a.contract_hash IS NOT NULL, c.registered_at_ms"
        " FROM contracts c LEFT JOIN agents a ON a.contract_hash = c.hash"
    )
    with reading(contracts_unreadable()):
        entered, revoked = _by_hash(store, "CONTRACT"), _by_hash(store, "REVOKED")
        rows.sort(key=lambda row: entered.get(row[3], _NO_ENTRY)[0])
        return [_version(row, entered.get(row[3], _NO_ENTRY)[1], row[3] in revoked) for row in rows[-VERSIONS_MAX:]]


def contracts_unreadable() -> StoreError:
    return StoreError("the contracts in the record cannot be read", hint="sds ledger verify")


def _by_hash(store: Reader, kind: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return the index and body of the ledger's entries of one kind about contracts, by the contract's hash."""
    rows = store.rows("SELECT idx, body FROM ledger WHERE dfid = '' AND kind = ?", (kind,))
    return {body["hash"]: (idx, body) for idx, text in rows for body in (json.loads(text),)}


def _version(row: Row, body: dict[str, Any], revoked: bool) -> Version:
    gate, agent_id, version, contract_hash, current, at_ms = row
    standing: ContractStanding = "revoked" if revoked else "in force" if current else "superseded"
    who, reason = str(body.get("who", "")), str(body.get("reason", ""))
    return Version(gate, agent_id, version, contract_hash, standing, at_ms, who, reason)


def recorded_contract(body: str) -> Contract:
    """Return a contract as it was registered. Raises ContractError when it cannot be read.

    Before proposal schema 2 a rationale had a length and no order.
    """
    with reading(ContractError("a registered contract cannot be read by this program", hint="sds ledger verify")):
        data: dict[str, Any] = json.loads(body)
        if longest := data.pop("rationale_chars_max", 0):
            data["rationale"] = {"order": "before", "chars_max": longest}
        return Contract.model_validate_json(json.dumps(data))


def registered_contract(store: Reader, gate: str) -> Contract | None:
    """Return the contract registered last for a gate, revoked or not. Raises ContractError when it cannot be read."""
    body = store.value(
        "SELECT c.body FROM agents a JOIN contracts c ON c.hash = a.contract_hash WHERE a.gate = ?", (gate,)
    )
    return None if body is None else recorded_contract(body)


def event_fields(store: Reader, dfid: str) -> EventSpec | None:
    """Return which fields of a flow's trigger are id, key and evidence; None if no registered contract's form fits.

    The form of the flow's own contract comes first. Another fits when a process with an older contract began the flow.
    """
    found = store.row("SELECT gate, event_id, trigger_event, contract_hash FROM decision_flows WHERE dfid = ?", (dfid,))
    if found is None:
        return None
    gate, event_id, trigger, contract_hash = found
    body = json.loads(trigger)
    forms = store.rows(
        "SELECT body -> '$.event' FROM contracts WHERE gate = ? ORDER BY hash = ? DESC, registered_at_ms DESC, hash",
        (gate, contract_hash),
    )
    specs = (EventSpec.model_validate_json(form) for (form,) in forms)
    return next((spec for spec in specs if _is_form(spec, body, event_id)), None)


def _is_form(spec: EventSpec, body: Mapping[str, object], event_id: str) -> bool:
    named = {name for name in (spec.id, spec.key, spec.evidence) if name}
    return named == body.keys() - {"saga"} and body[spec.id] == event_id
