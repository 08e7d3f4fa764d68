"""Which authority holds now: answered here alone, for a decision, a saga, a human and each reserving transaction.

A flow is under the contract that was registered when it was created, until that contract is revoked (DIR 3.5). A newer
version changes nothing for open flows. A revocation ends them, in the reserving transaction at the latest.
"""

from __future__ import annotations

from dataclasses import dataclass

from sds.kernel.registry.registry import Status
from sds.kernel.storage.store import Reader, Row

# The authority of an agent `a` under the contract of `b`, a flow or an agent: columns for statements that read more.
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

    `status`: None for an agent that is not registered, which counts as halted. `contract_hash`: "" when the contract is
    revoked or there is no such flow, so that nothing is under it. `mission_hash`: of that contract, revoked or not.
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
        """Whether a human may still decide the agent's cases: also while the agent is suspended or waits for a human."""
        return self.status not in (None, "RETIRED")

    def withdrawn(self, contract_hash: str) -> str | None:
        """Return the code of what keeps the agent from acting under this contract; None: nothing does."""
        if not self.active:
            return "AGENT_SUSPENDED"
        if self.halted:
            return "HALTED"
        return None if self.contract_hash == contract_hash else "CONTRACT_REVOKED"


def authority_now(record: Reader, agent_id: str, dfid: str = "") -> Authority:
    """Return an agent's authority for one flow or, without `dfid`, for a flow that would be created now."""
    tables, of = bound_to(agent_id, dfid)
    row = record.row(f"SELECT {COLUMNS} {tables} WHERE a.agent_id = ?", (of, agent_id))
    return Authority() if row is None else authority_in(row)


def bound_to(agent_id: str, dfid: str) -> tuple[str, str]:
    """Return the tables behind `COLUMNS`, and the value to bind in them. `dfid` "": a flow that would be created now."""
    return (_OF_FLOW, dfid) if dfid else (_OF_AGENT, agent_id)


def authority_in(columns: Row) -> Authority:
    """Return the authority in a row of `COLUMNS`."""
    status, halted, contract_hash, mission_hash = columns
    return Authority() if status is None else Authority(status, bool(halted), contract_hash, mission_hash)
