"""Changes: the data of a server-sent event, and the body of a webhook."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from sds.service.schemas.values import Dfid, GateName, State, When


class ChangeEvent(TypedDict):
    """A change at a gate: the data of a server-sent event. It is an entry of the ledger, without texts."""

    gate: GateName
    entry: Annotated[int, Field(description="The index of the entry in the gate's ledger.")]
    at: When
    kind: Annotated[str, Field(description="The kind of entry. In lower case it is the event's type.")]
    dfid: NotRequired[Dfid]
    state: NotRequired[Annotated[State, Field(description="The new state of the decision flow.")]]
    outcome: NotRequired[str]
    action: NotRequired[str]
    tag: NotRequired[str]
    reason_code: NotRequired[str]
    status: NotRequired[str]
    agent_id: NotRequired[str]
    was: NotRequired[str]
    decision: NotRequired[str]
    impact: NotRequired[str]


class FinalChange(ChangeEvent):
    """A change that brings a final state."""

    retryable: Annotated[bool, Field(description="The flow ended undecided: its event may be sent again.")]


class WebhookMessage(TypedDict):
    """The body of a webhook."""

    type: Literal[
        "decision.closed",
        "decision.aborted",
        "decision.escalated",
        "decision.unknown",
        "decision.contradicted",
    ]
    timestamp: When
    data: FinalChange
