"""Cases that wait for a human."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from sds.kernel.human.cases import Decision
from sds.service.schemas.values import Amounts, Dfid, GateName, Impact, JsonText, State, When


class WaitingCase(TypedDict):
    """A case that waits for a human, without its texts."""

    gate: GateName
    dfid: Dfid
    event_id: str
    since: When
    age_ms: Annotated[int, Field(description="How long it waits, in milliseconds.")]
    reason: Annotated[str | None, Field(description="The reason code.")]
    proposed: Annotated[str | None, Field(description="The proposed decision in words; null: none.")]
    action: Annotated[str | None, Field(description="The kind of the proposed decision.")]
    params: Amounts
    impact: Impact | None
    taken_by: Annotated[str | None, Field(description="Who has taken the case at the console; anybody may decide it.")]
    taken_until: When | None


class WaitingCases(TypedDict):
    """A page of the cases that wait, the oldest first. `waiting`: how many there are, listed or not."""

    escalations: list[WaitingCase]
    waiting: int
    next: Annotated[str | None, Field(description="The cursor of the next page; null: there is none.")]


class StateThen(TypedDict):
    """The state as the agent saw it."""

    id: str
    fields: dict[str, Any]


class StateNow(StateThen):
    """The state now. `id`: for `seen` of a resolution. `notes`: why only a human is left."""

    notes: list[str]


class EvidencePart(TypedDict):
    """A part of the untrusted text. `patterns`: the injection patterns that it matches."""

    text: str
    patterns: list[str]


class Evidence(TypedDict):
    """The untrusted text of a case, in parts. `field`: of the event."""

    field: str
    parts: list[EvidencePart]


class ChangedField(TypedDict):
    """A field whose value differs from what the agent read. `beyond`: by more than its tolerance."""

    field: str
    then: Any
    now: Any
    beyond: bool


class Bound(TypedDict):
    """The permitted numbers of a parameter, as decimals: `lo` to `hi` in steps of `step`."""

    name: str
    lo: str
    hi: str
    step: str


class Fixed(TypedDict):
    """A number that the kernel fills in, as a decimal."""

    name: str
    value: str


class HumanChoice(TypedDict):
    """A decision that a human may take now. With MODIFY: of which kind, within which bounds, and an `example` of `change`."""

    decision: Decision
    acknowledge: Annotated[bool, Field(description="The decision needs `acknowledge`: true.")]
    action: NotRequired[str]
    params: NotRequired[list[Bound]]
    fixed: NotRequired[list[Fixed]]
    reasons: NotRequired[Annotated[list[str], Field(description="The reason codes that `change` may have.")]]
    impacts: NotRequired[list[Impact]]
    example: NotRequired[JsonText]


class PermittedKind(TypedDict):
    """A kind of decision of the envelope. `params`: name, least, greatest, step, residue and scale of each number."""

    kind: str
    reasons: list[str]
    params: list[list[Any]]
    fills: list[list[Any]]


class Permitted(TypedDict):
    """The decision envelope of a human."""

    kinds: list[PermittedKind]
    rationale_chars_max: int
    refusal: NotRequired[str]


class ShownCase(WaitingCase):
    """A case with everything needed to decide it, its texts included."""

    state: State
    resolved: Annotated[str | None, Field(description="The human's decision, and by whom; null: there is none.")]
    waits: bool
    unknown: Annotated[bool, Field(description="Nobody knows what became of its order.")]
    why: Annotated[list[str], Field(description="Why it waits, in words.")]
    event: dict[str, Any]
    snapshot: StateThen
    now: StateNow
    moved: Annotated[
        list[str], Field(description="The fields that moved beyond their tolerance since the agent looked.")
    ]
    changed: list[ChangedField]
    proposal: Annotated[str, Field(description="The proposal as it was recorded.")]
    confidence: float | None
    alternatives: Annotated[list[dict[str, Any]], Field(description="For each choice: label and probability.")]
    may_decide: Permitted
    evidence: Evidence
    packet: Annotated[list[str], Field(description="The texts that the model read.")]
    choices: list[HumanChoice]
