"""What the record knows of one agent, read back for an operator."""

from __future__ import annotations

from sds.kernel.audit.agent_history import HISTORY_MAX, AgentRecord, Move, agent_record
from sds.kernel.registry import registry
from tests.kernel.authority import AGENT
from tests.kernel.durable import START_MS, World, contract, escalate


def found(world: World) -> AgentRecord:
    record = agent_record(world.store, AGENT, now_ms=world.clock())
    assert record is not None
    return record


def test_identity_owner_contract_and_state_are_told(world: World):
    record = found(world)
    assert (AGENT, "claims", "desk@example.org", "1.0.0", "Decide claims.", "ACTIVE", world.contract.hash) == (
        record.agent.agent_id,
        record.gate,
        record.owner,
        record.version,
        record.mission,
        record.agent.status,
        record.agent.contract_hash,
    )


def test_every_move_is_told_with_who_when_and_why(world: World):
    world.clock.advance(5)
    registry.transition(
        world.store, AGENT, "SUSPENDED", by="operator", who="Ada", reason="too generous", now_ms=world.clock()
    )
    first, second, last = found(world).moves
    assert ("", "INITIALIZING", "registry") == (first.was, first.status, first.by)
    assert ("INITIALIZING", "ACTIVE") == (second.was, second.status)
    assert Move(START_MS + 5, "ACTIVE", "SUSPENDED", "operator", "Ada", "too generous") == last


def test_contracts_are_in_force_superseded_or_revoked(world: World):
    for version in ("1.1.0", "1.2.0"):
        registry.register(
            world.store, contract(("1.0.0", version)), by="operator", who="Ada", reason="better", now_ms=world.clock()
        )
    registry.revoke(world.store, world.contract.hash, who="Eve", reason="wrong", now_ms=world.clock() + 1)
    first, second, third = found(world).contracts
    assert [("1.0.0", "revoked"), ("1.1.0", "superseded"), ("1.2.0", "in force")] == [
        (held.version, held.standing) for held in (first, second, third)
    ]
    assert (START_MS + 1, "Eve", "wrong") == (first.revoked_at_ms, first.revoked_who, first.revoked_reason)
    assert (None, "Ada", "better") == (third.revoked_at_ms, third.who, third.reason)


def test_the_escalations_left_are_those_of_the_contract_in_force(world: World):
    assert (1_000_000, 1_000_000) == (found(world).escalations_left, found(world).escalations_per_hour)
    world.decide(escalate)
    assert 999_999 == found(world).escalations_left


def test_only_the_latest_of_a_long_history_is_told(world: World):
    for number in range(HISTORY_MAX):
        for status in ("SUSPENDED", "ACTIVE"):
            registry.transition(world.store, AGENT, status, by="operator", reason=f"{number}", now_ms=world.clock())
    moves = found(world).moves
    assert (HISTORY_MAX, str(HISTORY_MAX - 1), "ACTIVE") == (len(moves), moves[-1].reason, moves[-1].status)


def test_other_agents_are_not_mixed_in_and_an_unknown_one_is_none(world: World):
    other = contract(("gate: claims", "gate: others"), ("agent_id: claims-agent", "agent_id: others-agent"))
    registry.register(world.store, other, by="registry", now_ms=1)
    assert (1, 2) == (len(found(world).contracts), len(found(world).moves))
    assert None is agent_record(world.store, "ghost", now_ms=1)
