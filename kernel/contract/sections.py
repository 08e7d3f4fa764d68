"""The sections of a responsibility contract, as data: every field, its form and its default. Pure.

`schema` checks fields against each other and reads contract files.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from sds.kernel.canonical import digest
from sds.kernel.contract.form import Section
from sds.kernel.contract.monitors import AggregateThresholds, Monitored, MonitorSpec
from sds.kernel.contract.readings import READINGS_MAX, MaxError, PolicyLine, ReadingSpec
from sds.kernel.contract.types import (
    AgentId,
    Amount,
    Code,
    ContradictionError,
    Date,
    Drawn,
    Expression,
    FieldPath,
    FieldType,
    Levels,
    Millis,
    Name,
    SemVer,
    Shown,
    TimeZone,
    Words,
)
from sds.kernel.envelope.envelope import DENY, MAGNITUDE_MAX, RATIONALE_CHARS_MAX, SCALE_MAX

PROPOSAL_SCHEMA = "4.0.0"
KINDS_MAX = 16
FIELDS_MAX = 64


class EventSpec(Section):
    """Which fields of a trigger hold its id, the key of the state it is about, and untrusted text."""

    id: Name
    key: Name
    evidence: Name | None = None
    evidence_chars_max: int = Field(default=400, ge=1, le=4000)


class ParamSpec(Section):
    """A number that the model chooses. Expressions give its bounds in minor units, `scale` its number of decimals."""

    lo: Expression
    hi: Expression
    scale: int = Field(default=0, ge=0, le=SCALE_MAX)
    step: int = Field(default=1, ge=1, le=MAGNITUDE_MAX)
    residue: Amount = 0


class FillSpec(Section):
    """A number that a rule fixes, in minor units: the model never says it, the kernel fills it in."""

    value: Expression
    scale: int = Field(default=0, ge=0, le=SCALE_MAX)


class KindSpec(Section):
    """One decision kind. `draws`: snapshot field -> the parameter, fill or fixed integer that is taken from it.

    `spends`: the parameter or fill that counts against the spend limits. `side_effect`: the executor carries the kind out
    although it draws and spends nothing; a kind with none of the three has no side effect. `impact`: shown to a human (DIR
    4.7); left out, it is HIGH for a kind with a side effect, else LOW.
    """

    reasons: tuple[Code, ...] = Field(min_length=1, max_length=32)
    when: Expression = "true"
    params: dict[Name, ParamSpec] = Field(default_factory=dict, max_length=8)
    fills: dict[Name, FillSpec] = Field(default_factory=dict, max_length=8)
    draws: dict[FieldPath, Drawn] = Field(default_factory=dict, max_length=4)
    spends: Name | None = None
    impact: Literal["LOW", "HIGH"] | None = None
    side_effect: bool = False

    @property
    def executes(self) -> bool:
        return self.side_effect or bool(self.draws) or self.spends is not None

    @model_validator(mode="after")
    def _names_agree(self) -> KindSpec:
        numbers = set(self.params) | set(self.fills)
        if both := set(self.params) & set(self.fills):
            raise ValueError(f"`{min(both)}` is both a parameter and a fill")
        for path, source in ((("spends",), self.spends), *((("draws", p), s) for p, s in self.draws.items())):
            if isinstance(source, str) and source not in numbers:
                raise ContradictionError(path, f"`{source}` is neither a parameter nor a fill")
        return self

    def scale(self, name: str) -> int:
        return (self.params.get(name) or self.fills[name]).scale


class DriftSpec(Section):
    """How far one field may move between reasoning and execution: `abs` or `pct`, exactly one. `strict`: not at all."""

    abs: Amount | None = None
    pct: int | None = Field(default=None, ge=0, le=100)

    @model_validator(mode="before")
    @classmethod
    def _strict(cls, data: Any) -> Any:
        if data == "strict":
            return {"abs": 0}
        if not isinstance(data, dict):
            raise ValueError("must be strict, {abs: N} or {pct: N}")  # noqa: TRY004  pydantic takes ValueError
        return data

    @property
    def moves(self) -> bool:
        return bool(self.abs or self.pct)

    @model_validator(mode="after")
    def _exactly_one(self) -> DriftSpec:
        if (self.abs is None) == (self.pct is None):
            raise ValueError("must be strict, {abs: N} or {pct: N}")
        return self


class DriftPolicy(Section):
    """Fields that are not named may not move at all. `age_ms_max`: the age of the oldest snapshot that may be acted on."""

    age_ms_max: Millis = 30_000
    fields: dict[FieldPath, DriftSpec] = Field(default_factory=dict)


class SpendLimit(Section):
    """At most `max_minor` in one window, for everything or for each value of `per`.

    A window is an hour or a day of UTC, or of `timezone`. A `sliding` window is the last 60 minutes or 24 hours.
    """

    name: Name
    window: Literal["hour", "day"]
    max_minor: Amount
    per: FieldPath | None = None
    timezone: TimeZone | None = None
    sliding: bool = False

    @model_validator(mode="after")
    def _begins_once(self) -> SpendLimit:
        if self.sliding and self.timezone is not None:
            raise ContradictionError(("timezone",), "has no effect on a sliding window: leave it out")
        return self


class EscalationSpec(Section):
    """When a human must decide. `confidence_min_pct`: the lowest measured probability of the chosen action.

    `per_hour`: the size of the agent's token bucket of escalations, which fills up in an hour; an agent that needs more is
    suspended (DIR 4.7). `impact_high_minor`: from this amount on a decision is of HIGH impact. `pauses_agent`: the agent
    waits as ESCALATED until a human has resolved the case.
    """

    confidence_min_pct: int = Field(default=0, ge=0, le=100)
    always: tuple[Code, ...] = ()
    per_hour: int = Field(default=3, ge=1, le=1_000_000)
    impact_high_minor: Amount | None = None
    pauses_agent: bool = False


class HumanSpec(Section):
    """What a human may decide about an escalated case. What is left out is as the agent has it.

    `kinds` replaces whole kinds or adds some. An empty `authority` is the agent's and every kind named here.
    """

    authority: tuple[Code, ...] = ()
    when: Expression | None = None
    kinds: dict[Code, KindSpec] = Field(default_factory=dict, max_length=KINDS_MAX)


class MemorySpec(Section):
    """What the model reads of earlier decisions (DIR 3.2a): the last about the same key, or of the whole agent.

    `tokens_max`: for all of them together, in tokens of the deciding model. `days_max`: older decisions are forgotten.
    """

    entries_max: int = Field(default=4, ge=0, le=32)
    tokens_max: int = Field(default=96, ge=0, le=1024)
    days_max: int = Field(default=90, ge=1, le=3650)
    scope: Literal["key", "agent"] = "key"


class ArtifactSpec(Section):
    """Reference texts that the model reads with the contract (DIR 3.4), by name, within a token budget."""

    names: tuple[Name, ...] = Field(default=(), max_length=8)
    tokens_max: int = Field(default=256, ge=1, le=4096)


Compensation = Literal["REVERT", "CLOSE_ALL", "ALERT_HUMAN"]
MENU: tuple[Compensation, ...] = ("REVERT", "CLOSE_ALL", "ALERT_HUMAN")


class SagaSpec(Section):
    """One intent in several steps, each a child flow of its own (DIR 4.8), and the menu for when a later step fails."""

    steps: tuple[Code, ...] = Field(min_length=2, max_length=8)
    compensation: tuple[Compensation, ...] = Field(default=MENU, min_length=1, max_length=3)


class RetrySpec(Section):
    """Limits: attempts in one flow, fresh flows of one event, rejections in a row until an agent is suspended."""

    attempts_max: int = Field(default=3, ge=1, le=10)
    restarts_max: int = Field(default=3, ge=0, le=10)
    rejections_to_suspend: int = Field(default=10, ge=1, le=1_000_000)


class BudgetSpec(Section):
    """For each flow: tokens that the model reads and writes, time from trigger to proposal, time an order may take."""

    tokens_max: int = Field(default=4096, ge=64, le=1_000_000)
    ttl_ms: Millis = 30_000
    dispatch_ms_max: Millis = 5_000


class RationaleSpec(Section):
    """When the model says why: `before` it decides, within the proposal, or `after` everything has been done."""

    order: Literal["before", "after"]
    chars_max: int = Field(ge=1, le=RATIONALE_CHARS_MAX)


class ContractFields(Section):
    """Everything a contract says. `schema.Contract` is one whose fields are checked against each other.

    Its `hash` covers all of it, in the form of `form.Section`.
    """

    gate: Name
    agent_id: AgentId
    version: SemVer
    owner: str = Field(min_length=3, max_length=200)
    effective_from: Date
    proposal_schema: SemVer = PROPOSAL_SCHEMA  # the form of proposals it is written for: the handshake of DIR 3.5
    role: Literal["EXECUTOR"] = "EXECUTOR"
    mission: str = Field(min_length=1, max_length=2000)
    source: Name = "state"  # gates that name the same source share its resources
    authority: tuple[Code, ...] = Field(min_length=1, max_length=KINDS_MAX)
    event: EventSpec
    snapshot: dict[FieldPath, FieldType] = Field(min_length=1, max_length=FIELDS_MAX)
    show: Shown = ()  # the fields that the model reads, and their labels (need to know); empty: all fields
    levels: dict[FieldPath, Levels] = Field(default_factory=dict, max_length=FIELDS_MAX)  # words shown for a number
    labels: dict[FieldPath, Words] = Field(default_factory=dict, max_length=FIELDS_MAX)  # what people read for a path
    when: Expression = "true"
    kinds: dict[Code, KindSpec] = Field(min_length=1, max_length=KINDS_MAX)
    refusal: Code = DENY  # the kind by which the agent says no, always permitted
    readings: dict[Name, ReadingSpec] = Field(default_factory=dict, max_length=READINGS_MAX)
    policy: tuple[PolicyLine, ...] = Field(default=(), max_length=64)
    max_error: MaxError | None = None
    rationale: RationaleSpec | None = None
    draws_settle_in: Literal["kernel", "source"] = "kernel"
    drift: DriftPolicy = DriftPolicy()
    spend: tuple[SpendLimit, ...] = Field(default=(), max_length=8)
    escalation: EscalationSpec = EscalationSpec()
    human: HumanSpec = HumanSpec()
    memory: MemorySpec = MemorySpec()
    artifacts: ArtifactSpec = ArtifactSpec()
    sagas: dict[Code, SagaSpec] = Field(default_factory=dict, max_length=KINDS_MAX)
    retry: RetrySpec = RetrySpec()
    budget: BudgetSpec = BudgetSpec()
    aggregate_thresholds: Monitored = AggregateThresholds()  # what is watched over many decisions

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:  # noqa: ARG002
        """Return a validated contract with these fields exchanged. It has a hash of its own."""
        return type(self).model_validate({**self.model_dump(), **(update or {})})

    @cached_property
    def rationale_chars_max(self) -> int:
        """How long the rationale within a proposal may be, in characters; 0: there is none."""
        return self.rationale.chars_max if self.rationale and self.rationale.order == "before" else 0

    @property
    def explanation_chars_max(self) -> int:
        """How long the rationale after the decision may be, in characters; 0: there is none."""
        return self.rationale.chars_max if self.rationale and self.rationale.order == "after" else 0

    @property
    def monitors(self) -> tuple[MonitorSpec, ...]:
        """What is watched over many decisions, whichever form the contract uses."""
        watched = self.aggregate_thresholds
        return watched.monitors if isinstance(watched, AggregateThresholds) else watched

    @cached_property
    def orders(self) -> frozenset[str]:
        """The kinds whose decisions are orders: the executor carries them out."""
        return frozenset(name for name, kind in self.kinds.items() if kind.executes)

    @cached_property
    def written(self) -> Mapping[str, Any]:
        """The contract as JSON data, in the form of `form.Section`."""
        return self.model_dump(mode="json")

    @cached_property
    def hash(self) -> str:
        return digest(self.written)

    @cached_property
    def mission_hash(self) -> str:
        return digest([self.gate, self.agent_id, self.mission])
