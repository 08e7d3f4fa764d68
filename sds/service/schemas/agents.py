"""Agents, and halts of gates."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from sds.kernel.registry.contract_versions import ContractStanding
from sds.kernel.registry.registry import Actor
from sds.service.schemas.values import AgentStatus, AtMs, GateName, When


class AgentStanding(TypedDict):
    """An agent as it stands."""

    agent_id: str
    status: AgentStatus
    contract_hash: str
    mission_hash: str
    rejections: int
    halted: bool


class ListedAgent(AgentStanding):
    """An agent of a list."""

    gate: GateName


class AgentList(TypedDict):
    """The agents of the gates that the key may see."""

    agents: list[ListedAgent]


class AgentContract(TypedDict):
    """A contract that the agent had."""

    version: str
    contract_hash: str
    standing: ContractStanding
    registered_at_ms: AtMs
    by: str
    who: str
    reason: str
    revoked_at_ms: int | None
    revoked_who: str
    revoked_reason: str


class AgentMove(TypedDict):
    """A change of the agent's status. `by`: the role; `who`: the name, "" if none was given."""

    at_ms: AtMs
    was: AgentStatus | Literal[""]
    status: AgentStatus
    by: Actor
    who: str
    reason: str


class AgentHalt(TypedDict):
    """Who halted the gate, when and why."""

    at_ms: AtMs
    who: str
    reason: str


class ExecutorBreaker(TypedDict):
    """The breaker before the executor. `opened_at_ms`: null while it is closed."""

    failures: int
    opened_at_ms: int | None
    probe_at_ms: AtMs


class Monitor(TypedDict):
    """A monitor as it stands. Numbers are decimals; null: too little is measured, or there is no such threshold."""

    name: str
    of: str
    window: str
    decisions: int
    value: str | None
    warn: str | None
    stop: str | None


class AgentRecord(TypedDict):
    """An agent with its owner, contracts and history, the oldest first."""

    agent: AgentStanding
    gate: GateName
    owner: str
    version: str
    mission: str
    escalations_left: int
    escalations_per_hour: int
    contracts: list[AgentContract]
    moves: list[AgentMove]
    halt: AgentHalt | None
    breaker: ExecutorBreaker
    monitors: list[Monitor]


class HaltState(TypedDict):
    """Whether a gate is halted. `since`, `by` and `reason`: of the last halt or resumption, if there was one."""

    gate: GateName
    halted: bool
    since: NotRequired[When]
    by: NotRequired[str]
    reason: NotRequired[str]


class HaltStates(TypedDict):
    """Of each gate that the key may see, whether it is halted."""

    gates: list[HaltState]


class HaltResult(TypedDict):
    """What became of a gate. `error`: the reason code where it failed; then there is nothing else."""

    gate: GateName
    halted: NotRequired[bool]
    since: NotRequired[When]
    by: NotRequired[str]
    reason: NotRequired[str]
    changed: NotRequired[bool]
    error: NotRequired[str]


class HaltResults(TypedDict):
    """What became of each gate."""

    gates: list[HaltResult]
