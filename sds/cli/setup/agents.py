"""`sds agents`: list, show and move agents, and revoke a contract. Nothing an agent does lifts its suspension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from sds.cli.common import GateOption, JsonFlag, Reason, named, open_store, operator
from sds.cli.render import plain, print_either
from sds.host.clock import now_ms, when
from sds.kernel.audit.agent_history import AgentRecord, Held, Move, agent_record
from sds.kernel.errors import UsageError
from sds.kernel.registry import registry
from sds.kernel.registry.monitors import Standing
from sds.kernel.registry.registry import Status

_HALTED = "  (halted by an operator)"

AgentId = Annotated[str, typer.Argument(help="The agent's id, as its contract states it.", metavar="AGENT")]


def list_agents(gate: GateOption = "refund", as_json: JsonFlag = False) -> None:
    """List the agents of a gate's record. Each line has the state and the contract.

    Example: sds agents list
    """
    with closing(open_store(gate)) as store:
        agents = registry.agents(store)
    lines = (f"{a.agent_id}  {a.status}  contract {a.contract_hash[:12]}{_HALTED if a.halted else ''}" for a in agents)
    print_either(as_json, [asdict(agent) for agent in agents], lines)


def show(agent_id: AgentId, gate: GateOption = "refund", as_json: JsonFlag = False) -> None:
    """Show one agent. It shows the owner, the state with its time and reason, the contracts and the whole history.

    Example: sds agents show refund-agent
    """
    record = _record(gate, agent_id)
    print_either(as_json, asdict(record), _shown(record))


def _shown(record: AgentRecord) -> Iterator[str]:
    agent, halt, now = record.agent, record.halt, record.moves[-1] if record.moves else None
    facts = {
        "agent": agent.agent_id,
        "gate": record.gate + (_HALTED if agent.halted else ""),
        **({"halted": f"since {when(halt.at_ms, 'seconds')}, by {halt.who}: {halt.reason}"} if halt else {}),
        "owner": record.owner,
        "contract": f"{record.version}  {agent.contract_hash}",
        "status": agent.status
        + (f" since {when(now.at_ms, 'seconds')}, by {_named(now.by, now.who)}: {now.reason}" if now else ""),
        "executor": record.breaker.text,
        "rejections in a row": agent.rejections,
        "escalations left": f"{record.escalations_left} of {record.escalations_per_hour} an hour",
    }
    yield from (f"{name}: {plain(value)}" for name, value in facts.items())
    yield from _monitor_lines(record.monitors)
    yield "contracts"
    yield from (f"  {plain(_contract_line(held))}" for held in record.contracts)
    yield "history"
    yield from (f"  {plain(_move_line(move))}" for move in record.moves)


def suspend(agent_id: AgentId, reason: Reason, gate: GateOption = "refund", as_json: JsonFlag = False) -> None:
    """Suspend an agent. From the next transaction on it decides nothing at this gate, and its cases go to a human.

    Example: sds agents suspend refund-agent --reason "too many vouchers"
    """
    _move(gate, agent_id, "SUSPENDED", reason, as_json)


def reactivate(agent_id: AgentId, reason: Reason, gate: GateOption = "refund", as_json: JsonFlag = False) -> None:
    """Reactivate a suspended agent, after a review. Its escalation budget is full again.

    Example: sds agents reactivate refund-agent --reason "reviewed, thresholds were too low"
    """
    _move(gate, agent_id, "ACTIVE", reason, as_json)


def retire(agent_id: AgentId, reason: Reason, gate: GateOption = "refund", as_json: JsonFlag = False) -> None:
    """Retire an agent for good. From the next transaction on its gate's cases go to a human.

    Example: sds agents retire refund-agent --reason "the office is closed"
    """
    _move(gate, agent_id, "RETIRED", reason, as_json)


def revoke(
    agent_id: AgentId,
    version: Annotated[
        str, typer.Argument(help="The contract's version, as `sds agents show` lists it.", metavar="VERSION")
    ],
    reason: Reason,
    gate: GateOption = "refund",
    as_json: JsonFlag = False,
) -> None:
    """Revoke a contract for good. Every flow under it ends. Only a higher version can take its place.

    Example: sds agents revoke refund-agent 1.1.0 --reason "wrong table of amounts"
    """
    revoked = next((held for held in _record(gate, agent_id).contracts if held.version == version), None)
    if revoked is None:
        raise UsageError(
            f"agent `{agent_id}` never had a contract of version `{version}`", hint=f"sds agents show {agent_id}"
        )
    with closing(open_store(gate)) as store:
        changed = registry.revoke(store, revoked.contract_hash, who=operator(), reason=reason, now_ms=now_ms())
    facts = {"agent_id": agent_id, "version": version, "contract_hash": revoked.contract_hash, "changed": changed}
    print_either(as_json, facts, [f"{agent_id} {version}: {'revoked' if changed else 'was already revoked'}"])


def _record(gate: str, agent_id: str) -> AgentRecord:
    with closing(open_store(gate)) as store:
        record = agent_record(store, named(agent_id), now_ms=now_ms())
    if record is None:
        raise UsageError(f"there is no agent `{agent_id}`", hint="sds agents list")
    return record


def _move(gate: str, agent_id: str, status: Status, reason: str, as_json: bool) -> None:
    held = _record(gate, agent_id).agent
    if held.status == status:
        raise UsageError(f"agent `{agent_id}` is already {status}", hint=f"sds agents show {agent_id}")
    with closing(open_store(gate)) as store:
        registry.transition(store, agent_id, status, by="operator", who=operator(), reason=reason, now_ms=now_ms())
    print_either(as_json, {"agent_id": agent_id, "status": status}, [f"{agent_id} at {gate}: {status}"])


def _monitor_lines(monitors: Sequence[Standing]) -> Iterator[str]:
    if monitors:
        yield "monitors"
    for each in monitors:
        value = "not judged yet" if each.value is None else each.value
        ends = ", ".join(f"{name} {end}" for name, end in (("warn", each.warn), ("stop", each.stop)) if end is not None)
        yield f"  {each.name}: {each.of} {value} in {each.window} ({ends}; decisions in it: {each.decisions})"


def _contract_line(held: Held) -> str:
    line = f"{held.version}  {held.contract_hash[:12]}  {held.standing}  registered {when(held.registered_at_ms, 'seconds')}"
    line += f" by {_named(held.by, held.who)}: {held.reason}"
    if held.revoked_at_ms is None:
        return line
    return f"{line}; revoked {when(held.revoked_at_ms, 'seconds')} by {held.revoked_who}: {held.revoked_reason}"


def _move_line(move: Move) -> str:
    path = f"{move.was} -> {move.status}" if move.was else move.status
    return f"{when(move.at_ms, 'seconds')}  {path}  by {_named(move.by, move.who)}: {move.reason}"


def _named(role: str, who: str) -> str:
    return f"{role} ({who})" if who and who != role else role
