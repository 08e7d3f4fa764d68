"""Orders, for whoever keeps the books."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from sds.service.schemas.values import Dfid, When


class ListedOrder(TypedDict):
    """An order as the record has it. A text is empty where there is nothing to say."""

    at: Annotated[When, Field(description="When its end was recorded; while it is open, when it was ordered.")]
    ordered_at: When
    status: Annotated[
        Literal["PAID", "CARRIED_OUT", "TAKEN_BACK", "REFUSED", "OPEN", "CONTRADICTED"],
        Field(description="CARRIED_OUT: as PAID, of a kind that spends nothing."),
    ]
    amount: Annotated[str | None, Field(description="What it spends, with its decimals; null: it spends nothing.")]
    kind: str
    account: Annotated[str, Field(description="The key of the event.")]
    event_id: str
    dfid: Dfid
    decision: Annotated[
        Literal["AGENT", "OVERRIDE", "MODIFY", "ADOPTED"],
        Field(description="OVERRIDE and MODIFY: a human decided. ADOPTED: it was taken over from the external system."),
    ]
    decided_by: Annotated[str, Field(description="The agent or the human.")]
    reason: Annotated[str | None, Field(description="The human's reason; null without the role `review`.")]
    agent: str
    contract: Annotated[str, Field(description="The version of the contract under which it was decided.")]
    settled_by: Annotated[str, Field(description="The human by whose word its end was recorded.")]
    reference: Annotated[str, Field(description="The external system's id of it.")]
    key: Annotated[str, Field(description="The idempotency key under which it was sent.")]
    case: Annotated[str, Field(description="A difference that was found about it, and whether its case is open.")]


class OrderList(TypedDict):
    """A page of orders, the oldest first."""

    orders: list[ListedOrder]
    next: Annotated[str | None, Field(description="The `cursor` of the next page; null: this is the last page.")]
