"""/v1/agents: show, suspend, reactivate and retire agents. Nothing an agent does lifts its suspension."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from sds.service import review
from sds.service.callers import Operator, Viewer
from sds.service.fields import TEXT, body_schema, read_fields
from sds.service.review import Move
from sds.service.routes.described import ok
from sds.service.schemas.agents import AgentList, AgentRecord
from sds.service.state import service

_REQUIRED = {"reason": TEXT}

router = APIRouter(prefix="/v1/agents", tags=["agents"])


@router.get("", responses=ok(AgentList))
def list_agents(request: Request, who: Viewer) -> dict[str, list[dict[str, Any]]]:
    """List the agents of the gates that the key may see, each with its state and its contract."""
    gates = service(request).gates_of(who).values()
    return {"agents": [agent for each in gates for agent in review.agents(each.gate)]}


@router.get("/{agent_id}", responses=ok(AgentRecord))
def get_agent(request: Request, agent_id: str, who: Viewer) -> dict[str, Any]:
    """Show one agent: its owner, its state (since when, by whom and why), its contracts and its history.

    Of several gates that have the agent, one where it is ACTIVE is shown, if there is one. The list has it once for each.
    """
    state = service(request)
    return review.agent([each.gate for each in state.gates_of(who).values()], agent_id, now_ms=state.now_ms())


@router.post("/{agent_id}/{move}", responses=ok(AgentRecord), openapi_extra=body_schema(_REQUIRED, {}))
async def move_agent(request: Request, agent_id: str, move: Move, who: Operator) -> dict[str, Any]:
    """Suspend, reactivate or retire an agent at every gate of the key that has it. The record keeps the `reason`.

    An error names the gates where it was not moved, and where it goes on because the key is not for them. At the others it was
    moved all the same. The same request again moves what is left.
    """
    given = await read_fields(request, _REQUIRED, {})
    state = service(request)

    def moved() -> dict[str, Any]:
        mine = state.gates_of(who)
        others = [each.gate for name, each in state.gates.items() if name not in mine]
        gates, reason = [each.gate for each in mine.values()], given["reason"]
        return review.move_agent_everywhere(
            gates, others, agent_id, move, who=who.name, reason=reason, now_ms=state.now_ms()
        )

    return await run_in_threadpool(moved)
