"""Which contract a flow is under (DIR 3.5): the one that was registered when the flow was created, until it is revoked.

A newer version changes nothing for flows that are open; a revocation ends them, in the reserving transaction, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from sds.kernel.storage.store import Reader

_SQL = (
    "SELECT CASE WHEN r.contract_hash IS NULL THEN b.contract_hash ELSE '' END, COALESCE(c.mission_hash, '')"
    " FROM {table} b LEFT JOIN contracts c ON c.hash = b.contract_hash"
    " LEFT JOIN contract_revocations r ON r.contract_hash = b.contract_hash WHERE b.{key} = ?"
)
_OF_FLOW = _SQL.format(table="decision_flows", key="dfid")
_OF_AGENT = _SQL.format(table="agents", key="agent_id")


@dataclass(frozen=True, slots=True)
class Binding:
    """The contract and its mission. `contract_hash` is empty when the contract is revoked: nothing is under it."""

    contract_hash: str = ""
    mission_hash: str = ""


def of_flow(store: Reader, dfid: str) -> Binding | None:
    """Return what a flow is under; None when there is no such flow."""
    found = store.row(_OF_FLOW, (dfid,))
    return Binding(*found) if found else None


def of_agent(store: Reader, agent_id: str) -> Binding:
    """Return what a flow that is created now would be under."""
    found = store.row(_OF_AGENT, (agent_id,))
    return Binding(*found) if found else Binding()
