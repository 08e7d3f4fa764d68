"""/v1/orders: the orders of a gate in a period, page by page, as `sds orders` has them."""

from __future__ import annotations

from datetime import UTC
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from sds.kernel.audit.orders import orders_page
from sds.kernel.executor.statement import AT_MS_MAX
from sds.service.callers import Viewer
from sds.service.problems import Problem
from sds.service.routes.described import ok
from sds.service.routes.looking import Cursor
from sds.service.schemas.orders import OrderList
from sds.service.state import service

LIMIT, LIMIT_MAX = 200, 1000

router = APIRouter(tags=["decisions"])


@router.get("/v1/orders", responses=ok(OrderList))
def list_orders(
    request: Request,
    who: Viewer,
    gate: Annotated[str, Query(description="The gate.", max_length=64)],
    since: Annotated[int, Query(description="The start: milliseconds since 1970.", ge=0, le=AT_MS_MAX)] = 0,
    until: Annotated[
        int, Query(description="The end, which does not belong to the period.", ge=1, le=AT_MS_MAX)
    ] = AT_MS_MAX,
    cursor: Annotated[str | None, Query(description="`next` of the previous page.")] = None,
    limit: Annotated[int, Query(description="The maximum number.", ge=1, le=LIMIT_MAX)] = LIMIT,
) -> dict[str, Any]:
    """List the orders of a gate, the oldest first, as `sds orders --json` does in UTC.

    An order belongs to the time at which its end was recorded. One that ends between two pages comes again on a later one.
    """
    who.check("read", gate)
    store = service(request).gate(gate).gate.store
    if until <= since:
        raise Problem("USAGE", "`until` is not after `since`", hint="swap the two times")
    after = Cursor.parse(cursor) if cursor is not None else Cursor(since, "")
    found = orders_page(store, gate, since, until - 1, after=(after.at_ms, after.dfid), limit=limit)
    left_out = {} if "review" in who.roles else {"reason": None}
    following = str(Cursor(found[-1].at_ms, found[-1].dfid)) if len(found) == limit else None
    return {"orders": [order.as_data(UTC) | left_out for order in found], "next": following}
