"""Values that several answers have. Those with a name of their own are schemas, so that a client has one type for each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypeAliasType

from sds.kernel.contract import human_terms
from sds.kernel.flow import states
from sds.kernel.registry.registry import Status
from sds.service.reasons import REASONS

State = TypeAliasType("State", states.State)
Outcome = TypeAliasType("Outcome", Literal["ACCEPTED", "REJECTED", "ESCALATED"])
Execution = TypeAliasType("Execution", Literal["PENDING", "SUCCESS", "FAILED", "UNKNOWN", "DIRTY"])
Impact = TypeAliasType("Impact", human_terms.Impact)
AgentStatus = TypeAliasType("AgentStatus", Status)
ReasonCode = TypeAliasType("ReasonCode", Annotated[str, Field(json_schema_extra={"enum": list[Any](REASONS)})])

Dfid = Annotated[str, Field(description="The id of a decision.", examples=["a2ee1959-370d-8d68-84e6-bc08f78a4274"])]
GateName = Annotated[str, Field(description="The name of a gate.", examples=["refund"])]
AtMs = Annotated[int, Field(description="Milliseconds since 1970.")]
Amounts = Annotated[dict[str, int], Field(description="The numbers of the decision by name, amounts in minor units.")]
When = Annotated[str, Field(description="A time, as RFC 3339 has it.", json_schema_extra={"format": "date-time"})]
JsonText = Annotated[str, Field(description="JSON, as text.")]
