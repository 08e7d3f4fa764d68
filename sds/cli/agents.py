"""`sds agents`: which agents there are, and an operator's hold on them. Nothing an agent does lifts its suspension."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from sds.cli.common import GateOption, JsonFlag, Reason, open_store, operator, print_json
from sds.home import now_ms
from sds.kernel import registry
from sds.kernel.registry import Status

agents = typer.Typer(
    help="List, suspend and reactivate agents.\n\nExample: sds agents list", no_args_is_help=True, rich_markup_mode=None
)
AgentId = Annotated[str, typer.Argument(help="The agent, as its contract names it.", metavar="AGENT")]


def add_to(app: typer.Typer) -> None:
    agents.command("list")(list_agents)
    agents.command("suspend")(suspend)
    agents.command("reactivate")(reactivate)
    app.add_typer(agents, name="agents")


def list_agents(gate: GateOption = "refund", as_json: JsonFlag = False) -> None:
    """List the agents of a gate's record, their state and their contract.

    Example: sds agents list
    """
    with closing(open_store(gate)) as store:
        found = registry.agents(store)
    if as_json:
        print_json([asdict(agent) for agent in found])
        return
    for agent in found:
        typer.echo(f"{agent.agent_id}  {agent.status}  contract {agent.contract_hash[:12]}")


def suspend(agent_id: AgentId, reason: Reason, gate: GateOption = "refund") -> None:
    """Suspend an agent: from the next transaction on it decides nothing, and its cases go to a human.

    Example: sds agents suspend refund-agent --reason "too many vouchers"
    """
    _move(gate, agent_id, "SUSPENDED", reason)


def reactivate(agent_id: AgentId, reason: Reason, gate: GateOption = "refund") -> None:
    """Reactivate a suspended agent, after a review.

    Example: sds agents reactivate refund-agent --reason "reviewed, thresholds were too low"
    """
    _move(gate, agent_id, "ACTIVE", reason)


def _move(gate: str, agent_id: str, status: Status, reason: str) -> None:
    with closing(open_store(gate)) as store:
        registry.transition(store, agent_id, status, by="operator", who=operator(), reason=reason, now_ms=now_ms())
    typer.echo(f"{agent_id}: {status}")
