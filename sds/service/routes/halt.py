"""/v1/halt: halt and resume one gate or all of the key's. It takes effect in every process with the next transaction."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from sds.service import review
from sds.service.callers import Operator, Viewer
from sds.service.fields import FLAG, TEXT, body_schema, read_fields
from sds.service.problems import Problem
from sds.service.routes.described import ok
from sds.service.schemas.agents import HaltResults, HaltStates
from sds.service.state import service

_REQUIRED = {"halted": FLAG, "reason": TEXT}
_OPTIONAL = {"gate": TEXT}

router = APIRouter(prefix="/v1/halt", tags=["halt"])


@router.get("", responses=ok(HaltStates))
def get_halt(request: Request, who: Viewer) -> dict[str, list[dict[str, Any]]]:
    """Say for each gate that the key may see whether it is halted, since when, by whom and why."""
    return {"gates": [review.halt_state(each.gate) for each in service(request).gates_of(who).values()]}


@router.put("", responses=ok(HaltResults), openapi_extra=body_schema(_REQUIRED, _OPTIONAL))
async def set_halt(request: Request, who: Operator) -> dict[str, list[dict[str, Any]]]:
    """Halt (`halted`: true) or resume (`halted`: false) one `gate`. Without `gate`: all gates of the key.

    Of several gates, one that fails has its reason code in `error`. The others are halted or resumed all the same.
    """
    given = await read_fields(request, _REQUIRED, _OPTIONAL)
    state, wanted = service(request), given.get("gate")
    who.check("operate", wanted)
    gates = [state.gate(wanted)] if wanted is not None else list(state.gates_of(who).values())
    if not gates:
        raise Problem("GATE_FORBIDDEN", f"the key of `{who.name}` is for no gate of this service")
    wanted_now, reason = given["halted"], given["reason"]

    def done() -> list[dict[str, Any]]:
        return review.set_all_halted(
            [each.gate for each in gates], wanted_now, who=who.name, reason=reason, now_ms=state.now_ms()
        )

    return {"gates": await run_in_threadpool(done)}
