"""Everything the record knows of one agent: who answers for it, its status with its history, and the contracts it had.

It is read from the ledger, where every entry says who, when and why. Only the present is read from the tables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import EscalationSpec
from sds.kernel.errors import StoreError, reading
from sds.kernel.executor import breaker
from sds.kernel.executor.breaker import Breaker
from sds.kernel.flow import monitored
from sds.kernel.registry import escalation_budget
from sds.kernel.registry.contract_versions import ContractStanding, recorded_contract
from sds.kernel.registry.monitors import Standing
from sds.kernel.registry.registry import Registration, lookup
from sds.kernel.storage.ledger import ABOUT
from sds.kernel.storage.store import Reader, Store

HISTORY_MAX = 100  # the latest moves, and the latest contracts, that are read
_HALTS = "SELECT at_ms, body FROM ledger WHERE dfid = '' AND kind IN ('HALT', 'RESUME') ORDER BY idx DESC LIMIT 1"


@dataclass(frozen=True, slots=True)
class Move:
    """One change of the agent's status. `by`: the role; `who`: the name, if one was given. `was`: "" when not recorded."""

    at_ms: int
    was: str
    status: str
    by: str
    who: str
    reason: str


@dataclass(frozen=True, slots=True)
class Held:
    """A contract that the agent had. `revoked_at_ms` is None, and the other `revoked_*` "", unless it was revoked."""

    version: str
    contract_hash: str
    standing: ContractStanding
    registered_at_ms: int
    by: str
    who: str
    reason: str
    revoked_at_ms: int | None
    revoked_who: str
    revoked_reason: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Who halted the system, or resumed it, when (milliseconds since 1970) and why."""

    at_ms: int
    who: str
    reason: str


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """One agent; moves and contracts oldest first. `escalations_left`: of `escalations_per_hour`. `halt`: None unless it is
    halted. `monitors`: as they stand under its contract.
    """

    agent: Registration
    gate: str
    owner: str
    version: str
    mission: str
    escalations_left: int
    escalations_per_hour: int
    contracts: tuple[Held, ...]
    moves: tuple[Move, ...]
    halt: Halt | None = None
    breaker: Breaker = field(default_factory=Breaker)
    monitors: tuple[Standing, ...] = ()


def agent_record(store: Store, agent_id: str, *, now_ms: int) -> AgentRecord | None:
    """Return what is known of an agent; None when there is none of this name. Raises StoreError when it cannot be read."""
    agent = lookup(store, agent_id)
    body = store.value("SELECT body FROM contracts WHERE hash = ?", (agent.contract_hash,)) if agent else None
    if agent is None or body is None:
        return None
    with reading(_unreadable(f"the record of agent `{agent_id}`")):
        terms = json.loads(body)
        per_hour = int(terms.get("escalation", {}).get("per_hour", EscalationSpec().per_hour))
        return AgentRecord(
            agent=agent,
            gate=terms["gate"],
            owner=terms["owner"],
            version=terms["version"],
            mission=terms["mission"],
            escalations_left=escalation_budget.left(store, agent_id, per_hour, now_ms),
            escalations_per_hour=per_hour,
            contracts=tuple(
                _held(store, at_ms, entry, agent) for at_ms, entry in _entries(store, "CONTRACT", agent_id)
            ),
            moves=tuple(_move(at_ms, entry) for at_ms, entry in _entries(store, "AGENT", agent_id)),
            halt=last_halt(store) if agent.halted else None,
            breaker=breaker.read(store, terms["gate"]),
            monitors=standing(recorded_contract(body), store, now_ms),
        )


def _unreadable(what: str) -> StoreError:
    return StoreError(f"{what} cannot be read", hint="sds ledger verify")


def standing(contract: Contract, store: Reader, now_ms: int) -> tuple[Standing, ...]:
    """Return the monitors of a contract as they stand, in the contract's order."""
    both = (monitored.decision_monitors(contract), monitored.label_monitors(contract))
    found = {each.name: each for watching in both for each in watching.standing(store, now_ms)}
    return tuple(found[monitor.name] for monitor in contract.monitors)


def last_halt(store: Reader) -> Halt | None:
    """Return who halted or resumed the system last; None: nobody has. Raises StoreError when that cannot be read."""
    row = store.row(_HALTS)
    with reading(_unreadable("the ledger")):
        body = json.loads(row[1]) if row else {}
        return Halt(row[0], body["by"], body["reason"]) if row else None


def last_move(store: Reader, agent_id: str) -> Move | None:
    """Return the last change of an agent's status; None: there was none. Raises StoreError when it cannot be read."""
    with reading(_unreadable("the ledger")):
        return next((_move(*entry) for entry in _entries(store, "AGENT", agent_id, limit=1)), None)


def _entries(store: Reader, kind: str, agent_id: str, limit: int = HISTORY_MAX) -> list[tuple[int, dict[str, Any]]]:
    rows = store.rows(
        f"SELECT at_ms, body FROM ledger WHERE dfid = '' AND kind = ? AND {ABOUT} = ? ORDER BY idx DESC LIMIT ?",
        (kind, agent_id, limit),
    )
    return [(at_ms, json.loads(body)) for at_ms, body in reversed(rows)]


def _move(at_ms: int, entry: dict[str, Any]) -> Move:
    return Move(
        at_ms, entry.get("was", ""), entry["status"], entry["by"], entry.get("who", ""), entry.get("reason", "")
    )


def _held(store: Reader, at_ms: int, entry: dict[str, Any], agent: Registration) -> Held:
    revoked = store.row(
        "SELECT revoked_at_ms, who, reason FROM contract_revocations WHERE contract_hash = ?", (entry["hash"],)
    )
    standing: ContractStanding = "in force" if entry["hash"] == agent.contract_hash else "superseded"
    return Held(
        entry["version"],
        entry["hash"],
        "revoked" if revoked else standing,
        at_ms,
        entry["by"],
        entry.get("who", ""),
        entry.get("reason", ""),
        *(revoked or (None, "", "")),
    )
