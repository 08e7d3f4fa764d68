"""The escalation budget (DIR 4.7): a token bucket for each agent, so that humans are asked but not flooded.

A full bucket holds `escalation.per_hour` escalations; an empty one is full again after an hour. When an agent escalates
with an empty bucket it is suspended. DIR would abort that flow in silence. Here it is escalated all the same: a case that
nobody sees is a refusal that nobody decided. The DECIDED entry of an escalation holds the level that it left.
"""

from __future__ import annotations

from dataclasses import dataclass

from sds.kernel.contract.schema import Contract
from sds.kernel.registry import registry
from sds.kernel.registry.authority import Authority
from sds.kernel.storage.store import Reader, Store

EXHAUSTED = "escalation budget exhausted"

# An escalation takes this many parts; every millisecond gives back `per_hour` parts. These are integers: nothing is rounded.
PARTS = 3_600_000
_KEEP = (
    "INSERT INTO escalation_budgets VALUES (?, ?, ?)"
    " ON CONFLICT (agent_id) DO UPDATE SET parts = excluded.parts, at_ms = excluded.at_ms"
)

# Escalations that the agent did not cause: an operator, a deployment, the contract's rules or the load did. Every other
# code is charged, whatever a model or its server fails with.
NOT_CHARGED = frozenset(
    {
        "AGENT_SUSPENDED",
        "ALREADY_ORDERED",
        "APPROVAL_REQUIRED",
        "CONTRACT_REVOKED",
        "DEADLINE_EXCEEDED",
        "ESCALATED_BY_RULE",
        "HALTED",
        "LANGUAGE_TOO_LARGE",
        "TOKEN_BUDGET_EXCEEDED",
    }
)


@dataclass(frozen=True, slots=True)
class Level:
    """How full a bucket was, in parts, and when (milliseconds since 1970)."""

    parts: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class Charge:
    """What an escalation costs its agent. `spent`: the level after it. `moves_to`: the agent's next status, and why."""

    spent: Level | None = None
    moves_to: tuple[registry.Status, str] | None = None


def level(store: Reader, agent_id: str, per_hour: int, now_ms: int) -> Level:
    """Return how full the agent's bucket is now. A clock that was set back gives nothing back twice."""
    found = store.row("SELECT parts, at_ms FROM escalation_budgets WHERE agent_id = ?", (agent_id,))
    if found is None:
        return Level(per_hour * PARTS, now_ms)
    parts, at_ms = found
    return Level(min(per_hour * PARTS, parts + per_hour * max(0, now_ms - at_ms)), max(at_ms, now_ms))


def left(store: Reader, agent_id: str, per_hour: int, now_ms: int) -> int:
    """Return how many escalations the agent has left now."""
    return level(store, agent_id, per_hour, now_ms).parts // PARTS


def charge(
    store: Store, contract: Contract, authority: Authority, reason_code: str | None, *, by_choice: bool, now_ms: int
) -> Charge:
    """Charge an escalation to the agent, inside the caller's transaction, which also writes `spent` into the ledger.

    `authority`: the flow's, as read in that transaction. `by_choice`: the envelope left the agent more than the human.
    Otherwise it had no choice, and the budget is not charged.
    """
    if authority.withdrawn(contract.hash) is not None:
        return Charge()
    spent = None
    if by_choice and reason_code not in NOT_CHARGED:
        now = level(store, contract.agent_id, contract.escalation.per_hour, now_ms)
        if now.parts < PARTS:
            return Charge(moves_to=("SUSPENDED", EXHAUSTED))
        spent = Level(now.parts - PARTS, now.at_ms)
        store.run(_KEEP, (contract.agent_id, spent.parts, spent.at_ms))
    why = f"waits for a human: {reason_code}"
    return Charge(spent, ("ESCALATED", why) if contract.escalation.pauses_agent else None)
