"""The responsibility contract (DIR 3.1): who answers for a gate, and everything it may ever decide.

A contract is a YAML file in a trusted place. It is data: pydantic checks its shape, `rules.Rules` checks and
compiles its expressions. Every error names file and line.
"""

from __future__ import annotations

import stat
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sds.kernel.bounds import MAGNITUDE_MAX, SCALE_MAX
from sds.kernel.canonical import digest, sha256_hex
from sds.kernel.envelope import DENY, ESCALATE, RATIONALE_CHARS_MAX
from sds.kernel.errors import ContractError
from sds.kernel.yaml_lines import Lines, load_with_lines

KINDS_MAX = 16
FIELDS_MAX = 64

Code = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
FieldPath = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}\.[a-z][a-z0-9_]{0,63}$")]
SemVer = Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$")]
FieldType = Annotated[
    str, Field(pattern=r"^(bool|int|string|timestamp|fixed\([0-6]\)|enum\([a-z0-9_]+(, ?[a-z0-9_]+)*\))$")
]


def _expression(value: str | int) -> str:
    return str(value)


Expression = Annotated[str | int, AfterValidator(_expression)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class EventSpec(_Strict):
    """Which fields of a trigger carry its identity, the state it is about, and untrusted text."""

    id: Name
    key: Name
    evidence: Name | None = None
    evidence_chars_max: int = Field(default=400, ge=1, le=4000)


class ParamSpec(_Strict):
    """A number the model chooses: expressions give its bounds in minor units, `scale` its decimals."""

    lo: Expression
    hi: Expression
    scale: int = Field(default=0, ge=0, le=SCALE_MAX)
    step: int = Field(default=1, ge=1, le=MAGNITUDE_MAX)
    residue: int = Field(default=0, ge=0)


class FillSpec(_Strict):
    """A number a rule fixes: never said by the model, filled in by the kernel. Minor units."""

    value: Expression
    scale: int = Field(default=0, ge=0, le=SCALE_MAX)


class KindSpec(_Strict):
    """One decision kind. `draws`: snapshot field -> parameter name or a fixed integer taken from it.

    `spends`: the parameter or fill that counts against the spend limits. A kind with neither has no side effect.
    """

    reasons: tuple[Code, ...] = Field(min_length=1, max_length=32)
    when: Expression = "true"
    params: dict[Name, ParamSpec] = Field(default_factory=dict, max_length=8)
    fills: dict[Name, FillSpec] = Field(default_factory=dict, max_length=8)
    draws: dict[FieldPath, Name | int] = Field(default_factory=dict, max_length=4)
    spends: Name | None = None
    impact: Literal["LOW", "HIGH"] = "LOW"

    @property
    def executes(self) -> bool:
        return bool(self.draws) or self.spends is not None

    @model_validator(mode="after")
    def _names_agree(self) -> KindSpec:
        numbers = set(self.params) | set(self.fills)
        if len(numbers) != len(self.params) + len(self.fills):
            raise ValueError("a name is both a parameter and a fill")
        for source in (self.spends, *self.draws.values()):
            if isinstance(source, str) and source not in numbers:
                raise ValueError(f"`{source}` is neither a parameter nor a fill")
            if isinstance(source, int) and source < 1:
                raise ValueError(f"`{source}` cannot be drawn: at least 1")
        return self


class DriftSpec(_Strict):
    """How far one field may move between reasoning and execution; exactly one of the two."""

    abs: int | None = Field(default=None, ge=0)
    pct: int | None = Field(default=None, ge=0, le=100)

    @model_validator(mode="after")
    def _exactly_one(self) -> DriftSpec:
        if (self.abs is None) == (self.pct is None):
            raise ValueError("give exactly one of abs, pct (or the word strict)")
        return self


class DriftPolicy(_Strict):
    """Fields not named may not move at all. `age_ms_max` is the oldest snapshot that may be acted on."""

    age_ms_max: int = Field(default=30_000, ge=1)
    fields: dict[FieldPath, Literal["strict"] | DriftSpec] = Field(default_factory=dict)


class SpendLimit(_Strict):
    """At most `max_minor` in one window (UTC hour or day), for everything or for each value of `per`."""

    name: Name
    window: Literal["hour", "day"]
    max_minor: int = Field(ge=0, le=MAGNITUDE_MAX)
    per: FieldPath | None = None


class EscalationSpec(_Strict):
    """When a human must decide. `confidence_min_pct`: lowest measured probability of the chosen action."""

    confidence_min_pct: int = Field(default=0, ge=0, le=100)
    always: tuple[Code, ...] = ()


class RetrySpec(_Strict):
    attempts_max: int = Field(default=3, ge=1, le=10)
    restarts_max: int = Field(default=3, ge=0, le=10)
    rejections_to_suspend: int = Field(default=10, ge=1)


class BudgetSpec(_Strict):
    """Per flow: tokens read and written by the model, and the time from trigger to proposal."""

    tokens_max: int = Field(default=4096, ge=64)
    ttl_ms: int = Field(default=30_000, ge=1)
    dispatch_ms_max: int = Field(default=5_000, ge=1)


class AggregateThresholds(_Strict):
    """Post-execution governance (DIR 4.6): over the last `window` decisions, how often the agent may pay, and how
    much on average. Beyond it the agent is suspended until an operator reactivates it.
    """

    window: int = Field(default=100, ge=10, le=100_000)
    paid_pct_max: int = Field(default=100, ge=0, le=100)
    paid_mean_minor_max: int | None = Field(default=None, ge=0)


class Contract(_Strict):
    """A whole responsibility contract. Its `hash` covers every field."""

    gate: Name
    agent_id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
    version: SemVer
    owner: str = Field(min_length=3, max_length=200)
    effective_from: str = Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")
    role: Literal["EXECUTOR"] = "EXECUTOR"
    mission: str = Field(min_length=1, max_length=2000)
    source: Name = "state"  # gates that name the same source share its resources
    authority: tuple[Code, ...] = Field(min_length=1, max_length=KINDS_MAX)
    event: EventSpec
    snapshot: dict[FieldPath, FieldType] = Field(min_length=1, max_length=FIELDS_MAX)
    show: tuple[FieldPath, ...] = ()  # what the model reads of the snapshot (need to know); empty: all of it
    when: Expression = "true"
    kinds: dict[Code, KindSpec] = Field(min_length=1, max_length=KINDS_MAX)
    rationale_chars_max: int = Field(default=0, ge=0, le=RATIONALE_CHARS_MAX)
    draws_settle_in: Literal["kernel", "source"] = "kernel"
    drift: DriftPolicy = DriftPolicy()
    spend: tuple[SpendLimit, ...] = Field(default=(), max_length=8)
    escalation: EscalationSpec = EscalationSpec()
    retry: RetrySpec = RetrySpec()
    budget: BudgetSpec = BudgetSpec()
    aggregate_thresholds: AggregateThresholds = AggregateThresholds()

    @model_validator(mode="after")
    def _whole(self) -> Contract:
        if DENY not in self.kinds:
            raise ValueError("kinds: DENY is missing; every contract lets its agent say no")
        if ESCALATE in self.kinds:
            raise ValueError("kinds: ESCALATE is always there and is not declared")
        deny = self.kinds[DENY]
        if deny.params or deny.fills or deny.executes or deny.when != "true":
            raise ValueError("kinds: DENY takes only reasons")
        unknown = [k for k in (*self.authority, *self.escalation.always) if k not in self.kinds]
        if unknown:
            raise ValueError(f"`{unknown[0]}` is not one of the kinds")
        named = [*self.show, *self.drift.fields, *(limit.per for limit in self.spend if limit.per)]
        named += [path for kind in self.kinds.values() for path in kind.draws]
        for path in named:
            if path not in self.snapshot:
                raise ValueError(f"`{path}` is not a declared snapshot field")
        return self

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
        raw = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise ContractError(f"{path}: cannot be read: {error.strerror}") from error
    if mode & stat.S_IWOTH:
        raise ContractError(f"{path}: anyone can write this file", hint=f"chmod o-w {path}")
    if checksum is not None and sha256_hex(raw) != checksum:
        raise ContractError(
            f"{path}: the checksum differs from the one it was released with", reason_code="CONTRACT_TAMPERED"
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContractError(f"{path}: not UTF-8 at byte {error.start}") from error
    return parse_contract(text, str(path))


def parse_contract(text: str, name: str = "contract") -> Contract:
    """Return the contract in `text`. Raises ContractError with `name` and line."""
    from sds.kernel.rules import Rules  # noqa: PLC0415  rules need the type of a contract, a contract is checked by its rules

    data, lines = load_with_lines(text, name)
    try:
        contract = Contract.model_validate(_tuples(data))
    except ValidationError as error:
        first = error.errors()[0]
        raise ContractError(f"{name}:{_line(lines, first['loc'])}: {_say(first)}") from error
    try:
        Rules(contract)
    except ContractError as error:
        where = getattr(error, "path", ())
        raise ContractError(f"{name}:{_line(lines, where)}: {'.'.join(map(str, where))}: {error}") from error
    return contract


def _tuples(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_tuples(item) for item in data)
    return {k: _tuples(v) for k, v in data.items()} if isinstance(data, dict) else data


def _line(lines: Lines, loc: tuple[Any, ...]) -> int:
    while loc and loc not in lines:
        loc = loc[:-1]
    return lines.get(loc, 1)


def _say(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return f"{where}: {message}" if where else message
