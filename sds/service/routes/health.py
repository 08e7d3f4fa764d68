"""/livez: whether the process lives; /readyz: whether it should be sent requests; /metrics: what it measures."""

from __future__ import annotations

from ipaddress import ip_address

import orjson
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from sds.service.operations import operations
from sds.service.operations.metrics import CONTENT_TYPE
from sds.service.problems import Problem, response_of
from sds.service.routes import described
from sds.service.routes.described import ok
from sds.service.schemas.health import Live, Ready
from sds.service.state import asks_for_this_machine, service

router = APIRouter(tags=["health"])


@router.head("/livez", include_in_schema=False)  # health checks of balancers often ask by HEAD
@router.get("/livez", responses=ok(Live), openapi_extra=described.NO_KEY)
async def get_livez() -> dict[str, str]:
    """Answer 200 while the process lives."""
    return {"status": "live"}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", responses=ok(Ready) | described.NOT_READY, openapi_extra=described.NO_KEY)
async def get_readyz(request: Request) -> Response:
    """Say whether the service can decide, by the last result of each check."""
    health = operations(request).health
    checks = health.checks()
    if health.ready(checks):
        return JSONResponse({"status": "ready", "checks": checks})
    response = response_of(Problem("NOT_READY"))
    response.body = orjson.dumps({**orjson.loads(response.body), "checks": checks})
    response.headers["content-length"] = str(len(response.body))
    return response


@router.get("/metrics", response_class=Response, responses=described.METRICS, openapi_extra=described.KEY_OR_NONE)
async def get_metrics(request: Request) -> Response:
    """Return the metrics for Prometheus. The key needs the role `read` at every gate that is served. With `--metrics-open`,
    requests from this machine need no key.
    """
    state, running = service(request), operations(request)
    if not (state.settings.metrics_open and _is_local(request)):
        who = await state.callers.of(request.headers.get("authorization"))
        who.check("read")
        for gate in state.gates:  # what is measured is of all of them
            who.check("read", gate)

    def rendered() -> bytes:
        running.standing.sample()
        return running.metrics.render()

    return Response(await run_in_threadpool(rendered), media_type=CONTENT_TYPE)


def _is_local(request: Request) -> bool:
    """Tell whether a request comes from this machine, through no proxy, and names a loopback host. Another host name may be
    that of a web page whose name was made to resolve to this machine (DNS rebinding).
    """
    if not asks_for_this_machine(request):
        return False
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False
