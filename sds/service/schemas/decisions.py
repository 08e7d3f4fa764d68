"""Decisions, and the gates that can be asked for them."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from sds.service.schemas.values import Amounts, AtMs, Dfid, Execution, GateName, JsonText, Outcome, State


class EventFields(TypedDict):
    """The names of the fields of a gate's event."""

    id: str
    key: str
    evidence: NotRequired[str]


class ServedGate(TypedDict):
    """A gate: what a caller needs to ask it for decisions."""

    gate: GateName
    version: Annotated[str, Field(description="The version of the contract.")]
    hash: Annotated[str, Field(description="The hash of the contract.")]
    agent_id: str
    kinds: Annotated[list[str], Field(description="The kinds of decision, besides ESCALATE.")]
    event: EventFields
    deadline_ms_max: Annotated[int, Field(description="The longest deadline, in milliseconds.")]


class GateList(TypedDict):
    """The gates that the key may see."""

    gates: list[ServedGate]


class AnswerSchema(TypedDict):
    """A decision as it stands."""

    dfid: Dfid
    gate: GateName
    event_id: Annotated[str, Field(description="The id of the event that was decided.")]
    state: Annotated[State, Field(description="CLOSED, ESCALATED (a human decides) and ABORTED are final.")]
    outcome: Annotated[Outcome | None, Field(description="The kernel's verdict; null: there is none yet.")]
    action: Annotated[str | None, Field(description="The kind of decision that was proposed or that a human chose.")]
    params: Amounts
    justification: Annotated[
        str | None, Field(description="The reason code of the proposal; for reviewers with its text.")
    ]
    reason_code: Annotated[
        str | None, Field(description="Why the kernel did not do what was proposed; null if it did.")
    ]
    reasons: Annotated[list[str], Field(description="The same in words. Only codes without the role `review`.")]
    tag: Annotated[str | None, Field(description="Why the flow ended without execution.")]
    execution: Annotated[
        Execution | None, Field(description="The status of the order; null: nothing is to be executed.")
    ]
    reference: Annotated[str | None, Field(description="The executor's own id of the effect.")]
    confidence: Annotated[float | None, Field(description="The probability of the action, 0 to 1; null: not measured.")]
    parent_dfid: Annotated[str | None, Field(description="The previous decision flow of the same event.")]
    resolution: Annotated[str | None, Field(description="How a human resolved the case.")]
    resolved_by: Annotated[str | None, Field(description="The name of the human's key.")]
    pending: Annotated[bool, Field(description="Somebody still works on the event.")]
    retryable: Annotated[bool, Field(description="Nobody has decided the event: it may be sent again.")]


class ListedDecision(AnswerSchema):
    """A decision of a list."""

    opened_at_ms: AtMs


class DecisionList(TypedDict):
    """A page of decisions, the newest first. A page of one state may be short or empty and still have a `next`."""

    decisions: list[ListedDecision]
    next: Annotated[str | None, Field(description="The `cursor` of the next page; null: this is the last page.")]


class FlowFacts(TypedDict):
    """When a decision flow was opened, for which agent and under which contract."""

    created_at_ms: AtMs
    agent_id: str
    contract_hash: str
    restarts: int
    lease_until_ms: AtMs


class SnapshotFacts(TypedDict):
    """The state that was read, and what was permitted in it."""

    snapshot_id: str
    envelope_hash: str
    taken_at_ms: AtMs
    security: JsonText


class ProposalFacts(TypedDict):
    """What was proposed, by which model and at what cost."""

    policy_kind: str | None
    params: Annotated[str | None, Field(description="JSON, as text.")]
    model: str
    confidence: float | None
    tokens: int
    passes: int
    duration_ms: float


class VerdictFacts(TypedDict):
    """What the kernel's gates said to the proposal."""

    outcome: Outcome
    gate_reached: int
    reason_code: str | None
    attempt_number: int
    evaluated_at_ms: AtMs


class HumanFacts(TypedDict):
    """What a human decided."""

    decision: str
    who: str
    impact: str
    acknowledged: Annotated[int, Field(description="1: the human acknowledged a decision of HIGH impact.")]
    decided_at_ms: AtMs


class OrderFacts(TypedDict):
    """The order that was sent, and what became of it."""

    idempotency_key: str
    kind: str
    params: JsonText
    status: Execution
    external_receipt: str | None
    reserved_at_ms: AtMs
    executed_at_ms: int | None


class LedgerFacts(TypedDict):
    """An entry of the ledger."""

    idx: int
    at_ms: AtMs
    kind: str
    entry_hash: str


class Audit(TypedDict):
    """The facts of a decision for an audit: numbers, hashes, codes and times, no texts. Null: there is no such step."""

    decision_flows: FlowFacts
    context_snapshots: SnapshotFacts | None
    policy_proposals: ProposalFacts | None
    dim_validations: VerdictFacts | None
    human_decisions: HumanFacts | None
    execution_log: OrderFacts | None
    ledger: list[LedgerFacts]


class ShownDecision(TypedDict):
    """The decision as it stands now, with its audit facts and, for reviewers, the whole record."""

    decision: AnswerSchema
    audit: Audit
    record: NotRequired[
        Annotated[dict[str, Any], Field(description="The rows of the record, with the texts in clear.")]
    ]
