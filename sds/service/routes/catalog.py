"""/v1/gates: the gates that this service serves; /errors: the page of its reason codes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse

from sds.service.callers import Viewer
from sds.service.gates import OpenGate
from sds.service.reasons import page
from sds.service.routes.described import ok
from sds.service.schemas.decisions import GateList
from sds.service.state import service

router = APIRouter(tags=["catalog"])


@router.get("/v1/gates", responses=ok(GateList))
async def list_gates(request: Request, who: Viewer) -> dict[str, list[dict[str, Any]]]:
    """List the gates that the key may see, each with its contract, its kinds and the fields of its event."""
    return {"gates": [described(gate) for gate in service(request).gates_of(who).values()]}


@router.get("/errors", include_in_schema=False)
async def errors() -> PlainTextResponse:
    """Show what every reason code means."""
    return PlainTextResponse(page(), media_type="text/markdown")


def described(gate: OpenGate) -> dict[str, Any]:
    """Return a gate as JSON data: what a caller needs to ask it for decisions."""
    contract = gate.gate.contract
    event = contract.event
    fields = {"id": event.id, "key": event.key, "evidence": event.evidence}
    return {
        "gate": contract.gate,
        "version": contract.version,
        "hash": contract.hash,
        "agent_id": contract.agent_id,
        "kinds": sorted(contract.kinds),
        "event": {role: name for role, name in fields.items() if name},
        "deadline_ms_max": gate.deadline_ms_max,
    }
