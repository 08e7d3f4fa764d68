"""The agent registry (DIR 3.5, 3.5a): whose contract is in force, what state its agent is in, and who may change it.

Contracts come from a deployment, never from an agent. Nothing that an agent does lifts its own suspension. Every change is
a ledger entry that says who, when and why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from sds.kernel.canonical import REASON_CHARS_MAX, canonical, one_line, person, reason_line
from sds.kernel.contract.schema import Contract
from sds.kernel.errors import ContractError, StoreError, TransitionError, reading
from sds.kernel.registry import carried_spend, compatibility, counter_scale, forgotten_draws, windows
from sds.kernel.registry.compatibility import Known, Refusal
from sds.kernel.registry.contract_versions import contracts_unreadable
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Reader, Store

DEPLOYMENT = "deployment"  # the name under which a program registers a contract when no operator does

Status = Literal["INITIALIZING", "ACTIVE", "SUSPENDED", "ESCALATED", "RETIRED"]
Actor = Literal["registry", "runtime", "operator", "agent"]

# Where a record was moved last, and whether it was resumed since: then it is the moved one, or a copy of that.
_MOVED = (
    "SELECT m.body ->> '$.to', (SELECT MAX(idx) FROM ledger WHERE dfid = '' AND kind = 'RESUME') > m.idx FROM ledger m WHERE m.idx ="
    f" (SELECT MAX(idx) FROM ledger WHERE dfid = '' AND kind = 'OPERATOR' AND {ledger.ABOUT} = 'MOVED')"
)
_IN_DATABASE = "postgresql://"  # how the name of a record in a database begins

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
    """What the registry knows of an agent now, and whether an operator has halted the system."""

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
    store: Store, contract: Contract, *, by: Actor, now_ms: int, who: str = DEPLOYMENT, reason: str = "deployed"
) -> None:
    """Put a contract in force for its agent. A new agent becomes ACTIVE. Registering a contract again changes nothing.

    Open flows stay under the contract they were created under. That one is revoked, though, if its authority had a kind
    that this one lacks, if it draws or spends in other units or from what this one does not draw from, or if it lacks a spend
    limit of this one.

    Raises TransitionError when an agent tries or a reason is missing; ContractError when the handshake fails, when something
    is drawn or spent that this contract would count in other units (`counter_scale`), or when it would forget what was drawn
    (`forgotten_draws`). A failed handshake leaves one ledger entry and no agent: RETIRED is final, and a mistake in a
    contract must not use up an agent's name.
    """
    if by == "agent":
        raise TransitionError("an agent cannot register itself: contracts come from a deployment")
    entry = {"hash": contract.hash, "gate": contract.gate, "agent_id": contract.agent_id, "by": by}
    entry |= {"version": contract.version, "who": person(who, REASON_CHARS_MAX), "reason": reason_given(reason)}
    with store.transaction():
        known = _known(store, contract)
        refused = _refusal(store, contract, known, now_ms)
        if refused is not None:
            _write_refusal(store, entry, refused, new=not known, now_ms=now_ms)
        else:
            _put_in_force(store, contract, entry, known, now_ms)
            _revoke_superseded(store, contract, entry, now_ms)
    if refused is not None:
        raise ContractError(refused.message, hint=refused.hint)


def refusal(record: Reader, contract: Contract, *, now_ms: int) -> Refusal | None:
    """Return why this contract could not be put in force now; None: it could. Writes nothing."""
    return _refusal(record, contract, _known(record, contract), now_ms)


def _refusal(record: Reader, contract: Contract, known: list[Known], now_ms: int) -> Refusal | None:
    with reading(contracts_unreadable()):
        refused = compatibility.refusal(contract, known)
        if refused is None and all(each.contract_hash != contract.hash for each in known):
            refused = counter_scale.refusal(record, contract, now_ms)
            for each in known:
                in_force, earlier = _body(record, each.contract_hash), _earlier(record, contract)
                refused = refused or forgotten_draws.refusal(record, earlier, in_force, contract)
    return refused


def _body(record: Reader, contract_hash: str) -> dict[str, Any]:
    """Return a registered contract as JSON. Raises one of `NOT_AS_WRITTEN`."""
    return dict(json.loads(record.value("SELECT body FROM contracts WHERE hash = ?", (contract_hash,))))


def _earlier(record: Reader, contract: Contract) -> list[Mapping[str, Any]]:
    """Return every registered contract of a contract's gate as JSON. Raises one of `NOT_AS_WRITTEN`."""
    rows = record.rows("SELECT body FROM contracts WHERE gate = ? ORDER BY registered_at_ms, hash", (contract.gate,))
    return [dict(json.loads(body)) for (body,) in rows]


def _known(store: Reader, contract: Contract) -> list[Known]:
    rows = store.rows(
        "SELECT a.agent_id, a.gate, a.status, a.contract_hash, c.version, r.contract_hash FROM agents a"
        " JOIN contracts c ON c.hash = a.contract_hash LEFT JOIN contract_revocations r ON r.contract_hash = c.hash"
        " WHERE a.gate = ? OR a.agent_id = ?",
        (contract.gate, contract.agent_id),
    )
    return [Known(*row) for row in rows]


def _write_refusal(store: Store, entry: Mapping[str, str], refused: Refusal, *, new: bool, now_ms: int) -> None:
    """Write a failed handshake once: a process that starts over and over must not fill the ledger."""
    body = {**entry, "refused": one_line(refused.message, REASON_CHARS_MAX)} | (
        {"was": "INITIALIZING", "status": "RETIRED"} if new else {}
    )
    text = canonical(body).decode()
    if store.row("SELECT 1 FROM ledger WHERE dfid = '' AND kind = 'REFUSED' AND body = ?", (text,)) is None:
        ledger.append(store, now_ms, "REFUSED", "", body)


def _put_in_force(store: Store, contract: Contract, entry: Mapping[str, str], known: list[Known], now_ms: int) -> None:
    """Write a contract that is new, and bind its agent to it."""
    if not known:
        _insert(store, contract, entry, now_ms)
        _take_into_service(store, contract, now_ms)
    elif known[0].contract_hash != contract.hash:
        with reading(contracts_unreadable()):
            carried = carried_spend.carry(store, _body(store, known[0].contract_hash), contract, now_ms)
        _insert(store, contract, {**entry, **({"carried": carried} if carried else {})}, now_ms)
        store.run("UPDATE agents SET contract_hash = ? WHERE agent_id = ?", (contract.hash, contract.agent_id))


def _insert(store: Store, contract: Contract, entry: Mapping[str, str], now_ms: int) -> None:
    store.insert(
        "contracts",
        hash=contract.hash,
        gate=contract.gate,
        agent_id=contract.agent_id,
        version=contract.version,
        mission_hash=contract.mission_hash,
        body=contract.model_dump_json(),
        registered_at_ms=now_ms,
    )
    rows = store.rows("SELECT * FROM contracts WHERE hash = ?", (contract.hash,))
    ledger.append(store, now_ms, "CONTRACT", "", {**entry, "owner": contract.owner, "row": ledger.rows_digest(rows)})


def _take_into_service(store: Store, contract: Contract, now_ms: int) -> None:
    agent_id = contract.agent_id
    store.insert("agents", agent_id=agent_id, gate=contract.gate, contract_hash=contract.hash, status="INITIALIZING")
    body = {"agent_id": agent_id, "status": "INITIALIZING", "by": "registry", "reason": "registered"}
    ledger.append(store, now_ms, "AGENT", "", body)
    why = f"handshake passed: version {contract.version}, proposal schema {contract.proposal_schema}"
    move(store, agent_id, "ACTIVE", by="registry", reason=why, now_ms=now_ms)


def _revoke_superseded(store: Store, contract: Contract, entry: Mapping[str, str], now_ms: int) -> None:
    """Revoke every earlier contract whose authority this one does not cover, whose units it does not count in, or under
    which an order would not be counted against every limit of this one, or would draw from what this one does not look at.
    """
    rows = store.rows(
        "SELECT hash, body FROM contracts WHERE agent_id = ? AND hash <> ?"
        " AND hash NOT IN (SELECT contract_hash FROM contract_revocations)",
        (contract.agent_id, contract.hash),
    )
    for known, text in rows:
        with reading(contracts_unreadable()):
            body = json.loads(text)
            lost = sorted(set(body["authority"]) - set(contract.authority))
            recounted = counter_scale.recounted(body, contract)
            uncounted = carried_spend.uncounted_limits(body, contract)
            forgets = forgotten_draws.forgets(body, contract)
        if lost or recounted or uncounted or forgets:
            what = f"withdraws {', '.join(lost)}" if lost else "counts in other units"
            if uncounted and not (lost or recounted):
                what = f"has a spend limit `{uncounted[0].name}`, which this one lacks"
            elif forgets and not (lost or recounted):
                what = "draws from other fields"
            why = f"version {contract.version} {what}"
            _revoke(store, known, by=entry["by"], who=entry["who"], reason=why, now_ms=now_ms)


def revoke(store: Store, contract_hash: str, *, who: str, reason: str, now_ms: int) -> bool:
    """Withdraw a contract for good: every flow under it ends, even one that is about to reserve.

    Return False if it was revoked before. Raises ContractError for a contract that was never registered.
    """
    with store.transaction():
        return _revoke(store, contract_hash, by="operator", who=who, reason=reason, now_ms=now_ms)


def _revoke(store: Store, contract_hash: str, *, by: str, who: str, reason: str, now_ms: int) -> bool:
    agent_id = store.value("SELECT agent_id FROM contracts WHERE hash = ?", (contract_hash,))
    if agent_id is None:
        raise ContractError(f"there is no contract `{contract_hash}`")
    if store.row("SELECT 1 FROM contract_revocations WHERE contract_hash = ?", (contract_hash,)) is not None:
        return False
    row = {"who": person(who, REASON_CHARS_MAX), "reason": reason_given(reason)}
    store.insert("contract_revocations", contract_hash=contract_hash, **row, revoked_at_ms=now_ms)
    ledger.append(store, now_ms, "REVOKED", "", {"hash": contract_hash, "agent_id": agent_id, "by": by, **row})
    return True


def reason_given(given: str) -> str:
    """Return a reason as the record keeps it. Raises TransitionError where nothing of it can be seen, UsageError: too long."""
    if why := reason_line(given):
        return why
    raise TransitionError("a reason is needed")


def lookup(store: Store, agent_id: str) -> Registration | None:
    """Return what the registry knows of an agent; None: it is not registered."""
    found = store.row(
        "SELECT a.agent_id, a.status, a.contract_hash, c.mission_hash, a.rejections,"
        " COALESCE((SELECT value FROM meta WHERE key = 'halted'), '') <> '0' FROM agents a"
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
    """Move an agent to another state. Raises TransitionError when the table of DIR 3.5a does not permit that to `by`."""
    why = reason_given(reason)
    with store.transaction():
        move(store, agent_id, status, by=by, reason=why, now_ms=now_ms, who=who)


def move(
    store: Store, agent_id: str, status: Status, *, by: Actor, reason: str, now_ms: int, who: str = "", case: str = ""
) -> None:
    """Do what `transition` does, inside the caller's transaction. `case`: the flow for which the agent is moved. A reason that the
    program gives is cut where it is too long.
    """
    known = lookup(store, agent_id)
    if known is None:
        raise TransitionError(f"there is no agent `{agent_id}`")
    if by not in _WHO_MAY.get((known.status, status), frozenset()):
        raise TransitionError(f"{by} may not move agent `{agent_id}` from {known.status} to {status}")
    why = reason_given(one_line(reason, REASON_CHARS_MAX))
    store.run("UPDATE agents SET status = ?, rejections = 0 WHERE agent_id = ?", (status, agent_id))
    if (known.status, status) == ("SUSPENDED", "ACTIVE"):  # an operator has looked: the agent begins anew
        store.run("DELETE FROM escalation_budgets WHERE agent_id = ?", (agent_id,))
        windows.clear(store, agent_id, "decisions", "labels")
    body = {"agent_id": agent_id, "was": known.status, "status": status, "by": by, "reason": why}
    body |= ({"who": person(who, REASON_CHARS_MAX)} if who else {}) | ({"case": case} if case else {})
    ledger.append(store, now_ms, "AGENT", "", body)


def waits_for(store: Reader, agent_id: str) -> str:
    """Return the flow that an ESCALATED agent waits for a human to resolve; "" when it is not known."""
    found = store.value(
        "SELECT json_extract(body, '$.case') FROM ledger WHERE dfid = '' AND kind = 'AGENT'"
        f" AND {ledger.ABOUT} = ? ORDER BY idx DESC LIMIT 1",
        (agent_id,),
    )
    return str(found or "")


def request_retire(store: Store, agent_id: str, *, reason: str, now_ms: int) -> None:
    """Retire an agent at its own request: the one move an agent may make, and only while it is ACTIVE."""
    transition(store, agent_id, "RETIRED", by="agent", reason=reason, now_ms=now_ms, who=agent_id)


def write_act(store: Store, act: str, *, who: str, reason: str, now_ms: int) -> None:
    """Record an act of an operator that has no ledger entry of its own: recovering, setting a record aside."""
    with store.transaction():
        append_act(store, act, who=who, reason=reason, now_ms=now_ms)


def append_act(
    store: Store, act: str, *, who: str, reason: str, now_ms: int, facts: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Do what `write_act` does, inside the caller's transaction. `facts`: further fields of the entry."""
    body = {**facts, "act": act, "who": person(who, REASON_CHARS_MAX), "reason": reason_given(reason)}
    ledger.append(store, now_ms, "OPERATOR", "", body)


def set_halted(store: Store, halted: bool, *, by: str, reason: str, now_ms: int) -> bool:
    """Halt or resume the system; return False when it was so already. It binds from the next transaction on.

    Raises TransitionError without a reason, StoreError for a record that was moved away: its orders are the other one's now.
    """
    why = reason_given(reason)
    with store.transaction():
        if store.halted == halted:
            return False
        if not halted:
            _refuse_moved(store)
        store.run("UPDATE meta SET value = ? WHERE key = 'halted'", ("1" if halted else "0",))
        body = {"by": person(by, REASON_CHARS_MAX), "reason": why}
        ledger.append(store, now_ms, "HALT" if halted else "RESUME", "", body)
    return True


def _refuse_moved(store: Store) -> None:
    """Raise StoreError for a record that was moved from its file into a database, or back. The moved one has the same entry,
    which names its own kind of store.
    """
    there, resumed = store.row(_MOVED) or ("", True)
    if not resumed and there.startswith(_IN_DATABASE) != store.name.startswith(_IN_DATABASE):
        mend = "set SDS_STORE to the database" if there.startswith(_IN_DATABASE) else "unset SDS_STORE"
        message = (
            f"this record was moved to `{there}`: if it went on, too, the same orders would be sent from two records"
        )
        raise StoreError(
            message, hint=f"{mend} here and for all processes of the gate, and resume that record", retryable=False
        )
