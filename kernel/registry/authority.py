"""Which authority holds now: the one place that answers it, for a decision, a saga, a human and every reserving transaction.

A flow is under the contract that was registered when it was created, until that is revoked (DIR 3.5). A newer version
changes nothing for flows that are open; a revocation ends them, in the reserving transaction, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from sds.kernel.registry.registry import Status
from sds.kernel.storage.store import Reader, Row

# Of an agent `a` and of what is bound to a contract, `b`: for statements that read more than that.
COLUMNS = (
    "a.status, COALESCE((SELECT value FROM meta WHERE key = 'halted'), '') <> '0',"
    " CASE WHEN r.contract_hash IS NULL THEN COALESCE(b.contract_hash, '') ELSE '' END, COALESCE(c.mission_hash, '')"
)
JOINS = (
    "LEFT JOIN contracts c ON c.hash = b.contract_hash"
    " LEFT JOIN contract_revocations r ON r.contract_hash = b.contract_hash"
)
_OF_FLOW = f"FROM agents a LEFT JOIN decision_flows b ON b.dfid = ? {JOINS}"
_OF_AGENT = f"FROM agents a LEFT JOIN agents b ON b.agent_id = ? {JOINS}"


@dataclass(frozen=True, slots=True)
class Authority:
    """What the registry says of an agent and of the contract its flow is under, read in one statement.

    `status`: None for an agent that is not registered; it counts as halted. `contract_hash`: empty when the contract is
    revoked, or there is no such flow: nothing is under it. `mission_hash`: of that contract, revoked or not.
    """

    status: Status | None = None
    halted: bool = True
    contract_hash: str = ""
    mission_hash: str = ""

    @property
    def active(self) -> bool:
        return self.status == "ACTIVE"

    @property
    def in_service(self) -> bool:
        """Whether the agent's cases may still be decided by a human: a suspended or paused agent does not stop them."""
        return self.status not in (None, "RETIRED")

    def withdrawn(self, contract_hash: str) -> str | None:
        """Return the code of what keeps the agent from acting under this contract, None when nothing does."""
        if not self.active:
            return "AGENT_SUSPENDED"
        if self.halted:
            return "HALTED"
        return None if self.contract_hash == contract_hash else "CONTRACT_REVOKED"


def authority_now(record: Reader, agent_id: str, dfid: str = "") -> Authority:
    """Return the authority of an agent for one flow; without `dfid`, for a flow that would be created now."""
    tables, of = bound_to(agent_id, dfid)
    row = record.row(f"SELECT {COLUMNS} {tables} WHERE a.agent_id = ?", (of, agent_id))
    return Authority() if row is None else authority_in(row)


def bound_to(agent_id: str, dfid: str) -> tuple[str, str]:
    """Return the tables behind `COLUMNS` of an agent and a flow, and the value in them; without `dfid`, of one created now."""
    return (_OF_FLOW, dfid) if dfid else (_OF_AGENT, agent_id)


def authority_in(columns: Row) -> Authority:
    """Return what a statement has read as `COLUMNS`."""
    status, halted, contract_hash, mission_hash = columns
    return Authority() if status is None else Authority(status, bool(halted), contract_hash, mission_hash)
