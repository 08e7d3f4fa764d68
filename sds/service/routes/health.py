"""Whether the process lives, and whether it should be sent requests; what it measures."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from sds.service.state import service

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> dict[str, str]:
    """Answer while the process lives."""
    return {"status": "live"}


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Tell whether decisions can be asked for."""
    draining = service(request).draining
    return JSONResponse({"status": "draining" if draining else "ready"}, 503 if draining else 200)
