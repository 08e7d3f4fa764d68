"""Which authority holds now: the one place that answers it, for a decision, a saga, a human and every reserving transaction.

A flow is under the contract that was registered when it was created, until that is revoked (DIR 3.5). A newer version
changes nothing for flows that are open; a revocation ends them, in the reserving transaction, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from sds.kernel.registry.registry import Status
from sds.kernel.storage.store import Reader

_SQL = (
    "SELECT a.status, COALESCE((SELECT value FROM meta WHERE key = 'halted'), '') <> '0',"
    " CASE WHEN r.contract_hash IS NULL THEN COALESCE(b.contract_hash, '') ELSE '' END, COALESCE(c.mission_hash, '')"
    " FROM agents a LEFT JOIN {table} b ON b.{key} = ? LEFT JOIN contracts c ON c.hash = b.contract_hash"
    " LEFT JOIN contract_revocations r ON r.contract_hash = b.contract_hash WHERE a.agent_id = ?"
)
_OF_FLOW = _SQL.format(table="decision_flows", key="dfid")
_OF_AGENT = _SQL.format(table="agents", key="agent_id")


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
    row = record.row(_OF_FLOW, (dfid, agent_id)) if dfid else record.row(_OF_AGENT, (agent_id, agent_id))
    return Authority() if row is None else Authority(row[0], bool(row[1]), row[2], row[3])
