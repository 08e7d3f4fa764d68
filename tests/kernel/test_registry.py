"""The registry: contracts come from a deployment, and the table of DIR 3.5a says who may move an agent."""

from __future__ import annotations

import itertools
import json
from typing import get_args

import pytest

from sds.kernel import audit, registry
from sds.kernel.errors import ContractError, TransitionError, UsageError
from sds.kernel.registry import Actor, Status, lookup, register, set_halted, transition
from tests.kernel.durable import World, contract

# DIR 3.5a, row by row; DESIGN adds that an operator may take an ACTIVE agent out of service.
MAY_MOVE = {
    "registry moves INITIALIZING to ACTIVE",
    "registry moves INITIALIZING to RETIRED",
    "runtime moves ACTIVE to SUSPENDED",
    "operator moves ACTIVE to SUSPENDED",
    "runtime moves ACTIVE to ESCALATED",
    "agent moves ACTIVE to RETIRED",
    "runtime moves ACTIVE to RETIRED",
    "operator moves ACTIVE to RETIRED",
    "operator moves ESCALATED to ACTIVE",
    "operator moves ESCALATED to RETIRED",
    "runtime moves ESCALATED to RETIRED",
    "operator moves SUSPENDED to ACTIVE",
    "operator moves SUSPENDED to RETIRED",
}
AGENT = "claims-agent"


def move(world: World, to: Status, by: Actor, reason: str = "because") -> None:
    transition(world.store, AGENT, to, by=by, reason=reason, now_ms=world.clock())


def status(world: World) -> str:
    known = lookup(world.store, AGENT)
    assert known is not None
    return known.status


def last_entry(world: World) -> dict[str, object]:
    kind, body = world.store.rows("SELECT kind, body FROM ledger ORDER BY idx DESC LIMIT 1")[0]
    return {"kind": kind, **json.loads(body)}


def test_exactly_the_moves_of_the_table_are_possible(world: World):
    moved = set()
    for start, end, actor in itertools.product(get_args(Status), get_args(Status), get_args(Actor)):
        with world.store.transaction():
            world.store.run("UPDATE agents SET status = ?", (start,))
        wanted = f"{actor} moves {start} to {end}"
        if wanted in MAY_MOVE:
            move(world, end, actor)
            moved.add(wanted)
        else:
            with pytest.raises(TransitionError, match=f"{actor} may not move agent `{AGENT}` from {start} to {end}"):
                move(world, end, actor)
        assert (end if wanted in MAY_MOVE else start) == status(world)
    assert moved == MAY_MOVE


def test_an_agent_cannot_register_itself(world: World):
    with pytest.raises(TransitionError, match="an agent cannot register itself: contracts come from a deployment"):
        register(world.store, contract(("1.0.0", "2.0.0")), by="agent", now_ms=1)
    assert world.contract.hash == lookup(world.store, AGENT).contract_hash  # type: ignore[union-attr]


def test_an_agent_cannot_lift_its_own_suspension(world: World):
    move(world, "SUSPENDED", "operator")
    with pytest.raises(TransitionError, match="agent may not move agent"):
        move(world, "ACTIVE", "agent")
    with pytest.raises(TransitionError, match="an agent cannot register itself"):
        register(world.store, contract(("1.0.0", "2.0.0")), by="agent", now_ms=1)
    assert "SUSPENDED" == status(world)


def test_a_move_is_written_down_with_who_and_why(world: World):
    move(world, "SUSPENDED", "operator", "looked\nodd\x1b[2J")
    assert {
        "kind": "AGENT",
        "agent_id": AGENT,
        "status": "SUSPENDED",
        "by": "operator",
        "reason": "looked odd [2J",
    } == last_entry(world)


@pytest.mark.parametrize("reason", ["", "   ", "\n", "\udcff"])
def test_a_move_needs_a_reason(world: World, reason: str):
    with pytest.raises(TransitionError, match="a reason is needed"):
        move(world, "SUSPENDED", "operator", reason)
    assert "ACTIVE" == status(world)


def test_an_unknown_agent_cannot_be_moved(world: World):
    with pytest.raises(TransitionError, match="there is no agent `ghost`"):
        transition(world.store, "ghost", "SUSPENDED", by="operator", reason="r", now_ms=1)


def test_a_move_starts_the_count_of_rejections_anew(world: World):
    with world.store.transaction():
        world.store.run("UPDATE agents SET rejections = 7, status = 'SUSPENDED'")
    move(world, "ACTIVE", "operator")
    assert [0] == world.column("SELECT rejections FROM agents")


def test_registering_the_same_contract_again_changes_nothing(world: World):
    before = audit.verify(world.store).head
    register(world.store, world.contract, by="registry", now_ms=2)
    assert before == audit.verify(world.store).head


def test_a_newer_version_takes_over_and_leaves_the_state_alone(world: World):
    move(world, "SUSPENDED", "operator")
    newer = contract(("1.0.0", "1.0.1"), ("Decide claims.", "Decide claims well."))
    register(world.store, newer, by="registry", now_ms=world.clock())
    known = lookup(world.store, AGENT)
    assert known is not None
    assert (newer.hash, newer.mission_hash, "SUSPENDED") == (known.contract_hash, known.mission_hash, known.status)
    assert {"kind": "CONTRACT", "version": "1.0.1", "owner": "desk@example.org", "by": "registry"}.items() <= (
        last_entry(world).items()
    )
    assert () == audit.verify(world.store).faults


@pytest.mark.parametrize("version", ["1.0.0", "0.9.9", "0.10.0"])
def test_a_version_that_is_not_newer_is_refused(world: World, version: str):
    other = contract(("version: 1.0.0", f"version: {version}"), ("desk@example.org", "else@example.org"))
    wanted = f"version `{version}` differs from and does not exceed the registered `1.0.0`"
    with pytest.raises(ContractError, match=wanted):
        register(world.store, other, by="registry", now_ms=2)


def test_versions_are_numbers_not_words(world: World):
    register(world.store, contract(("1.0.0", "1.9.0")), by="registry", now_ms=2)
    register(world.store, contract(("1.0.0", "1.10.0")), by="registry", now_ms=3)
    with pytest.raises(ContractError):
        register(world.store, contract(("1.0.0", "1.9.1")), by="registry", now_ms=4)


def test_a_gate_keeps_its_agent_and_an_agent_its_gate(world: World):
    for change, wanted in (
        (("agent_id: claims-agent", "agent_id: other-agent"), "agent `claims-agent` serves `claims`"),
        (("gate: claims", "gate: other"), "agent `claims-agent` serves `claims`"),
    ):
        with pytest.raises(ContractError, match=wanted):
            register(world.store, contract(change, ("1.0.0", "2.0.0")), by="registry", now_ms=2)


def test_no_contract_can_join_the_gate_of_one_agent_to_another(world: World):
    """Both are known, each with the other half: neither order of the rows may let it pass."""
    second = contract(("gate: claims", "gate: zz"), ("agent_id: claims-agent", "agent_id: a-agent"))
    register(world.store, second, by="registry", now_ms=2)
    for gate, agent in (("claims", "a-agent"), ("zz", "claims-agent")):
        mixed = contract(("gate: claims", f"gate: {gate}"), ("claims-agent", agent), ("1.0.0", "2.0.0"))
        with pytest.raises(ContractError, match="cannot serve gate"):
            register(world.store, mixed, by="registry", now_ms=3)


def test_a_kernel_needs_a_registered_agent(world: World):
    stranger = contract(("gate: claims", "gate: other"), ("agent_id: claims-agent", "agent_id: other-agent"))
    with pytest.raises(UsageError, match="agent `other-agent` is not registered in this store"):
        world.open_kernel(terms=stranger)


def test_halting_and_resuming_are_written_down_once(world: World):
    assert [True, False] == [set_halted(world.store, True, by="me", reason="smoke", now_ms=2) for _ in range(2)]
    assert {"kind": "HALT", "by": "me", "reason": "smoke"} == last_entry(world)
    assert lookup(world.store, AGENT).halted  # type: ignore[union-attr]
    assert [True, False] == [set_halted(world.store, False, by="me", reason="clear", now_ms=2) for _ in range(2)]
    assert {"kind": "RESUME", "by": "me", "reason": "clear"} == last_entry(world)


def test_a_store_whose_halt_flag_is_gone_is_halted(world: World):
    with world.store.transaction():
        world.store.run("DELETE FROM meta WHERE key = 'halted'")
    assert world.store.halted
    assert lookup(world.store, AGENT).halted  # type: ignore[union-attr]


def test_the_contract_in_force_is_kept_as_it_was_registered(world: World):
    (body,) = world.column("SELECT body FROM contracts")
    assert world.contract.hash == registry.Contract.model_validate_json(str(body)).hash
