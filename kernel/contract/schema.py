"""The responsibility contract (DIR 3.1): who answers for a gate, and everything it may ever decide.

A contract is a YAML file in a trusted place. It is data: pydantic checks its shape, `rules.Rules` checks and
compiles its expressions. Every error names file and line.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from sds.kernel.canonical import digest, sha256_hex
from sds.kernel.contract.checks import CHECKS, check_sagas
from sds.kernel.contract.form import Section
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
    say_first,
)
from sds.kernel.contract.yaml_lines import FILE_BYTES_MAX, load_with_lines
from sds.kernel.envelope.bounds import MAGNITUDE_MAX, SCALE_MAX
from sds.kernel.envelope.envelope import RATIONALE_CHARS_MAX
from sds.kernel.errors import ContractError

PROPOSAL_SCHEMA = "4.0.0"
KINDS_MAX = 16
FIELDS_MAX = 64


class EventSpec(Section):
    """Which fields of a trigger carry its identity, the state it is about, and untrusted text."""

    id: Name
    key: Name
    evidence: Name | None = None
    evidence_chars_max: int = Field(default=400, ge=1, le=4000)


class ParamSpec(Section):
    """A number the model chooses: expressions give its bounds in minor units, `scale` its decimals."""

    lo: Expression
    hi: Expression
    scale: int = Field(default=0, ge=0, le=SCALE_MAX)
    step: int = Field(default=1, ge=1, le=MAGNITUDE_MAX)
    residue: Amount = 0


class FillSpec(Section):
    """A number a rule fixes: never said by the model, filled in by the kernel. Minor units."""

    value: Expression
    scale: int = Field(default=0, ge=0, le=SCALE_MAX)


class KindSpec(Section):
    """One decision kind. `draws`: snapshot field -> parameter name or a fixed integer taken from it.

    `spends`: the parameter or fill that counts against the spend limits. A kind with neither has no side effect.
    `impact`: what a human is shown (DIR 4.7); left out, HIGH for what has a side effect, else LOW.
    """

    reasons: tuple[Code, ...] = Field(min_length=1, max_length=32)
    when: Expression = "true"
    params: dict[Name, ParamSpec] = Field(default_factory=dict, max_length=8)
    fills: dict[Name, FillSpec] = Field(default_factory=dict, max_length=8)
    draws: dict[FieldPath, Drawn] = Field(default_factory=dict, max_length=4)
    spends: Name | None = None
    impact: Literal["LOW", "HIGH"] | None = None

    @property
    def executes(self) -> bool:
        return bool(self.draws) or self.spends is not None

    @model_validator(mode="after")
    def _names_agree(self) -> KindSpec:
        numbers = set(self.params) | set(self.fills)
        if len(numbers) != len(self.params) + len(self.fills):
            raise ValueError("a name is both a parameter and a fill")
        for path, source in ((("spends",), self.spends), *((("draws", p), s) for p, s in self.draws.items())):
            if isinstance(source, str) and source not in numbers:
                raise ContradictionError(path, f"`{source}` is neither a parameter nor a fill")
        return self

    def scale(self, name: str) -> int:
        return (self.params.get(name) or self.fills[name]).scale


class DriftSpec(Section):
    """How far one field may move between reasoning and execution; exactly one of the two. `strict`: not at all."""

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
    """Fields not named may not move at all. `age_ms_max` is the oldest snapshot that may be acted on."""

    age_ms_max: Millis = 30_000
    fields: dict[FieldPath, DriftSpec] = Field(default_factory=dict)


class SpendLimit(Section):
    """At most `max_minor` in one window, for everything or for each value of `per`.

    A window is an hour or a day of UTC, or of `timezone`; `sliding`, it is the last 60 minutes or 24 hours.
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
            raise ContradictionError(("timezone",), "a sliding window is the same in every time zone: leave it out")
        return self


class EscalationSpec(Section):
    """When a human must decide. `confidence_min_pct`: lowest measured probability of the chosen action.

    `per_hour`: how many escalations an agent has at most, as a token bucket of that size that fills up in an hour;
    beyond it the agent is suspended (DIR 4.7). `impact_high_minor`: an amount from which any decision is of HIGH
    impact. `pauses_agent`: the agent waits as ESCALATED until a human has resolved the case.
    """

    confidence_min_pct: int = Field(default=0, ge=0, le=100)
    always: tuple[Code, ...] = ()
    per_hour: int = Field(default=3, ge=1, le=1_000_000)
    impact_high_minor: Amount | None = None
    pauses_agent: bool = False


class HumanSpec(Section):
    """What a human may decide about an escalated case. Whatever is left out is as the agent has it.

    `kinds` replaces whole kinds, or adds some; `authority` empty: the agent's and every kind named here.
    """

    authority: tuple[Code, ...] = ()
    when: Expression | None = None
    kinds: dict[Code, KindSpec] = Field(default_factory=dict, max_length=KINDS_MAX)


class MemorySpec(Section):
    """What the model is told of earlier decisions (DIR 3.2a): the last about the same key, or of the whole agent.

    `tokens_max`: all of them together, in tokens of the model that decides. `days_max`: after that they are forgotten.
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
    """One intent in several steps, each a child flow of its own (DIR 4.8), and the menu for when a later one fails."""

    steps: tuple[Code, ...] = Field(min_length=2, max_length=8)
    compensation: tuple[Compensation, ...] = Field(default=MENU, min_length=1, max_length=3)


class RetrySpec(Section):
    attempts_max: int = Field(default=3, ge=1, le=10)
    restarts_max: int = Field(default=3, ge=0, le=10)
    rejections_to_suspend: int = Field(default=10, ge=1, le=1_000_000)


class BudgetSpec(Section):
    """Per flow: tokens read and written by the model, and the time from trigger to proposal."""

    tokens_max: int = Field(default=4096, ge=64, le=1_000_000)
    ttl_ms: Millis = 30_000
    dispatch_ms_max: Millis = 5_000


class AggregateThresholds(Section):
    """Post-execution governance (DIR 4.6): over the last `window` decisions, how often the agent may pay, and how
    much on average. Beyond it the agent is suspended until an operator reactivates it.
    """

    window: int = Field(default=100, ge=10, le=100_000)
    paid_pct_max: int = Field(default=100, ge=0, le=100)
    paid_mean_minor_max: Amount | None = None


class RationaleSpec(Section):
    """When the model says why: `before` it decides, as part of the proposal, or `after`, when all has been done."""

    order: Literal["before", "after"]
    chars_max: int = Field(ge=1, le=RATIONALE_CHARS_MAX)


class Contract(Section):
    """A whole responsibility contract. Its `hash` covers everything it says, in the form of `contract_form`."""

    gate: Name
    agent_id: AgentId
    version: SemVer
    owner: str = Field(min_length=3, max_length=200)
    effective_from: Date
    proposal_schema: SemVer = PROPOSAL_SCHEMA  # the form of proposals it was written for: the handshake of DIR 3.5
    role: Literal["EXECUTOR"] = "EXECUTOR"
    mission: str = Field(min_length=1, max_length=2000)
    source: Name = "state"  # gates that name the same source share its resources
    authority: tuple[Code, ...] = Field(min_length=1, max_length=KINDS_MAX)
    event: EventSpec
    snapshot: dict[FieldPath, FieldType] = Field(min_length=1, max_length=FIELDS_MAX)
    show: Shown = ()  # what the model reads of the snapshot (need to know), and under which label; empty: all of it
    levels: dict[FieldPath, Levels] = Field(default_factory=dict, max_length=FIELDS_MAX)  # words it reads for a number
    when: Expression = "true"
    kinds: dict[Code, KindSpec] = Field(min_length=1, max_length=KINDS_MAX)
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
    aggregate_thresholds: AggregateThresholds = AggregateThresholds()

    @model_validator(mode="after")
    def _whole(self) -> Contract:
        from sds.kernel.contract.human_terms import check_human  # noqa: PLC0415  those terms are a contract themselves

        check_sagas(self)
        for check in CHECKS:
            check(self)
        check_human(self, CHECKS)
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:  # noqa: ARG002
        """Return a validated contract with these fields exchanged: its hash is its own."""
        return type(self).model_validate({**self.model_dump(), **(update or {})})

    @property
    def rationale_chars_max(self) -> int:
        """How long a proposal's own rationale may be; 0: it has none."""
        return self.rationale.chars_max if self.rationale and self.rationale.order == "before" else 0

    @property
    def explanation_chars_max(self) -> int:
        """How long the rationale written after the decision may be; 0: none is written."""
        return self.rationale.chars_max if self.rationale and self.rationale.order == "after" else 0

    def executes(self, kind: str) -> bool:
        """Tell whether a decision of this kind is an order; what is no kind of the contract is none."""
        return kind in self.kinds and self.kinds[kind].executes

    @cached_property
    def hash(self) -> str:
        return digest(self.model_dump(mode="json"))

    @cached_property
    def mission_hash(self) -> str:
        return digest([self.gate, self.agent_id, self.mission])


def load_contract(path: Path, *, checksum: str | None = None) -> Contract:
    """Load a contract from a trusted place.

    Trusted means: a regular file that others cannot write, and, when `checksum` is given (64 hexadecimal digits,
    SHA-256 of the file), exactly those bytes. Raises ContractError.
    """
    try:
        raw = _read_trusted(path)
    except OSError as error:
        raise ContractError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ContractError(f"{path}: larger than {FILE_BYTES_MAX} bytes")
    if checksum is not None and sha256_hex(raw) != checksum:
        raise ContractError(
            f"{path}: the checksum differs from the one it was released with", reason_code="CONTRACT_TAMPERED"
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContractError(f"{path}: not UTF-8 at byte {error.start}") from error
    return parse_contract(text, str(path))


def _read_trusted(path: Path) -> bytes:
    """Read a file that was checked after it was opened: what has the name later cannot take its place."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe has no writer yet
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):  # a pipe or a device could be read for ever
            raise ContractError(f"{path}: not a regular file")
        if mode & stat.S_IWOTH:
            raise ContractError(f"{path}: anyone can write this file", hint=f"chmod o-w {path}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)


def parse_contract(text: str, name: str = "contract") -> Contract:
    """Return the contract in `text`. Raises ContractError with `name` and line."""
    from sds.kernel.contract.compiler import Rules  # noqa: PLC0415  rules need the type of a contract, a contract is checked by its rules
    from sds.kernel.contract.human_terms import human_contract  # noqa: PLC0415

    if not isinstance(text, str):
        raise ContractError(f"{name}: the contract is no text", hint="load_contract(path) reads a file")
    data, lines = load_with_lines(text, name)
    try:
        contract = Contract.model_validate(_tuples(data))
    except ValidationError as error:
        line, message = say_first(error.errors(include_url=False), lines)
        raise ContractError(f"{name}:{line}: {message}") from error
    prefix: tuple[str, ...] = ()
    try:
        Rules(contract)
        prefix = ("human",)
        Rules(human_contract(contract))
    except ContractError as error:
        where = (*prefix, *getattr(error, "path", ()))
        while where not in lines:  # an expression that was left out stands where its kind does
            where = where[:-1]
        raise ContractError(f"{name}:{lines[where]}: {'.'.join(map(str, where))}: {error}") from error
    return contract


def _tuples(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_tuples(item) for item in data)
    return {k: _tuples(v) for k, v in data.items()} if isinstance(data, dict) else data
