"""The agent registry (DIR 3.5, 3.5a): whose contract is in force, what state its agent is in, who may change it.

Contracts come from a deployment, never from an agent; nothing an agent does lifts its own suspension. Every
change is a ledger entry with who, when and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sds.kernel import ledger
from sds.kernel.canonical import one_line
from sds.kernel.contract import Contract
from sds.kernel.errors import ContractError, TransitionError
from sds.kernel.store import Store

REASON_CHARS_MAX = 500

Status = Literal["INITIALIZING", "ACTIVE", "SUSPENDED", "ESCALATED", "RETIRED"]
Actor = Literal["registry", "runtime", "operator", "agent"]

_WHO_MAY: dict[tuple[Status, Status], frozenset[Actor]] = {
    ("INITIALIZING", "ACTIVE"): frozenset({"registry"}),
    ("INITIALIZING", "RETIRED"): frozenset({"registry"}),
    ("ACTIVE", "SUSPENDED"): frozenset({"runtime", "operator"}),
    ("ACTIVE", "ESCALATED"): frozenset({"runtime"}),
    ("ACTIVE", "RETIRED"): frozenset({"agent", "runtime", "operator"}),
    ("ESCALATED", "ACTIVE"): frozenset({"operator"}),
    ("ESCALATED", "RETIRED"): frozenset({"operator", "runtime"}),
    ("SUSPENDED", "ACTIVE"): frozenset({"operator"}),
    ("SUSPENDED", "RETIRED"): frozenset({"operator"}),
}


@dataclass(frozen=True, slots=True)
class Registration:
    """What the registry knows of an agent now, and whether an operator has halted everything."""

    agent_id: str
    status: Status
    contract_hash: str
    mission_hash: str
    rejections: int
    halted: bool

    @property
    def active(self) -> bool:
        return self.status == "ACTIVE"


def register(
    store: Store, contract: Contract, *, by: Actor, now_ms: int, who: str = "deployment", reason: str = "deployed"
) -> None:
    """Put a contract in force for its agent; a new agent becomes ACTIVE. Registering it again changes nothing.

    Raises TransitionError when an agent tries, ContractError when an older version would replace a newer one.
    """
    if by == "agent":
        raise TransitionError("an agent cannot register itself: contracts come from a deployment")
    with store.transaction():
        known = _registered(store, contract)
        if known == contract.hash:
            return
        _insert(store, contract, new=known is None, now_ms=now_ms)
        rows = store.rows("SELECT * FROM contracts WHERE hash = ?", (contract.hash,))
        body = {"hash": contract.hash, "gate": contract.gate, "agent_id": contract.agent_id, "by": by}
        body |= {"version": contract.version, "owner": contract.owner, "row": ledger.rows_digest(rows)}
        body |= {"who": one_line(who, REASON_CHARS_MAX), "reason": one_line(reason, REASON_CHARS_MAX)}
        ledger.append(store, now_ms, "CONTRACT", "", body)


def _registered(store: Store, contract: Contract) -> str | None:
    """Return the hash of the contract that this one may replace, or its own; None when agent and gate are new."""
    rows = store.rows(
        "SELECT a.gate, a.agent_id, a.contract_hash, c.version FROM agents a JOIN contracts c"
        " ON c.hash = a.contract_hash WHERE a.gate = ? OR a.agent_id = ?",
        (contract.gate, contract.agent_id),
    )
    for gate, agent_id, known, version in rows:
        if (gate, agent_id) != (contract.gate, contract.agent_id):
            raise ContractError(
                f"agent `{contract.agent_id}` cannot serve gate `{contract.gate}`: agent `{agent_id}` serves `{gate}`"
            )
        if known != contract.hash and _semver(version) >= _semver(contract.version):
            raise ContractError(
                f"version `{contract.version}` differs from and does not exceed the registered `{version}`",
                hint="raise the contract's version",
            )
    return str(rows[0][2]) if rows else None


def _insert(store: Store, contract: Contract, *, new: bool, now_ms: int) -> None:
    store.run(
        "INSERT INTO contracts VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        (
            contract.hash,
            contract.gate,
            contract.agent_id,
            contract.version,
            contract.mission_hash,
            contract.model_dump_json(),
            now_ms,
        ),
    )
    if new:
        store.insert(
            "agents", agent_id=contract.agent_id, gate=contract.gate, contract_hash=contract.hash, status="ACTIVE"
        )
    else:
        store.run("UPDATE agents SET contract_hash = ? WHERE agent_id = ?", (contract.hash, contract.agent_id))


def _semver(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def lookup(store: Store, agent_id: str) -> Registration | None:
    found = store.row(
        "SELECT a.agent_id, a.status, a.contract_hash, c.mission_hash, a.rejections,"
        " (SELECT value FROM meta WHERE key = 'halted') IS NOT '0' FROM agents a"
        " JOIN contracts c ON c.hash = a.contract_hash WHERE a.agent_id = ?",
        (agent_id,),
    )
    if found is None:
        return None
    name, status, contract_hash, mission_hash, rejections, halted = found
    return Registration(name, status, contract_hash, mission_hash, rejections, bool(halted))


def agents(store: Store) -> list[Registration]:
    """Return every registered agent, by name."""
    names = [row[0] for row in store.rows("SELECT agent_id FROM agents ORDER BY agent_id")]
    return [found for name in names if (found := lookup(store, name)) is not None]


def transition(
    store: Store, agent_id: str, status: Status, *, by: Actor, reason: str, now_ms: int, who: str = ""
) -> None:
    """Move an agent to another state. Raises TransitionError when the table of DIR 3.5a does not let `by` do it."""
    with store.transaction():
        move(store, agent_id, status, by=by, reason=reason, now_ms=now_ms, who=who)


def move(store: Store, agent_id: str, status: Status, *, by: Actor, reason: str, now_ms: int, who: str = "") -> None:
    """Do what `transition` does, inside the caller's transaction."""
    known = lookup(store, agent_id)
    if known is None:
        raise TransitionError(f"there is no agent `{agent_id}`")
    if by not in _WHO_MAY.get((known.status, status), frozenset()):
        raise TransitionError(f"{by} may not move agent `{agent_id}` from {known.status} to {status}")
    why = one_line(reason, REASON_CHARS_MAX)
    if not why:
        raise TransitionError("a reason is needed")
    store.run("UPDATE agents SET status = ?, rejections = 0 WHERE agent_id = ?", (status, agent_id))
    body = {"agent_id": agent_id, "status": status, "by": by, "reason": why}
    ledger.append(store, now_ms, "AGENT", "", body | ({"who": one_line(who, REASON_CHARS_MAX)} if who else {}))


def set_halted(store: Store, halted: bool, *, by: str, reason: str, now_ms: int) -> bool:
    """Halt or resume everything. Return False when it already was so. From the next transaction on it binds."""
    with store.transaction():
        if store.halted == halted:
            return False
        store.run("UPDATE meta SET value = ? WHERE key = 'halted'", ("1" if halted else "0",))
        body = {"by": one_line(by, REASON_CHARS_MAX), "reason": one_line(reason, REASON_CHARS_MAX)}
        ledger.append(store, now_ms, "HALT" if halted else "RESUME", "", body)
    return True
