"""The registry: contracts come from a deployment, and the table of DIR 3.5a says who may move an agent."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import get_args

import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import ContractError, StoreError, TransitionError, UsageError
from sds.kernel.registry import compatibility, registry
from sds.kernel.registry.registry import Actor, Status, lookup, register, request_retire, revoke, set_halted, transition
from sds.kernel.storage import ledger
from tests.kernel.authority import AGENT
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


def everything_an_agent_can_try(world: World) -> Iterator[Callable[[], object]]:
    store, newer = world.store, contract(("1.0.0", "9.0.0"))
    for end in get_args(Status):
        yield lambda end=end: transition(store, AGENT, end, by="agent", reason="please", now_ms=1)  # type: ignore[misc]
    for terms in (world.contract, newer):
        yield lambda terms=terms: register(store, terms, by="agent", now_ms=1)  # type: ignore[misc]
    yield lambda: request_retire(store, AGENT, reason="please", now_ms=1)


@pytest.mark.parametrize("start", get_args(Status))
def test_whatever_an_agent_tries_only_its_retirement_from_active_service_comes_of_it(world: World, start: Status):
    for attempt in everything_an_agent_can_try(world):
        with world.store.transaction():
            world.store.run("UPDATE agents SET status = ?", (start,))
        with suppress(TransitionError):
            attempt()
        assert status(world) in ({"ACTIVE", "RETIRED"} if start == "ACTIVE" else {start})
        assert world.contract.hash == lookup(world.store, AGENT).contract_hash  # type: ignore[union-attr]


def test_an_agent_that_has_done_its_work_asks_for_its_retirement(world: World):
    request_retire(world.store, AGENT, reason="no claims are left", now_ms=world.clock())
    assert "RETIRED" == status(world)
    assert {"by": "agent", "who": AGENT, "was": "ACTIVE", "reason": "no claims are left"}.items() <= (
        last_entry(world).items()
    )
    assert ("ESCALATE",) == world.packet().envelope.names


def test_a_move_is_written_down_with_who_and_why(world: World):
    move(world, "SUSPENDED", "operator", "looked\nodd\x1b[2J")
    assert {
        "kind": "AGENT",
        "agent_id": AGENT,
        "was": "ACTIVE",
        "status": "SUSPENDED",
        "by": "operator",
        "reason": "looked odd [2J",
    } == last_entry(world)


@pytest.mark.parametrize("reason", ["", "   ", "\n", "\udcff"])
def test_a_move_needs_a_reason(world: World, reason: str):
    with pytest.raises(TransitionError, match="a reason is needed"):
        move(world, "SUSPENDED", "operator", reason)
    assert "ACTIVE" == status(world)


@pytest.mark.parametrize("reason", ["", "   ", "\n", "\udcff"])
def test_a_contract_needs_a_reason(world: World, reason: str):
    before = ledger.head(world.store)
    with pytest.raises(TransitionError, match="a reason is needed"):
        register(world.store, contract(), by="registry", now_ms=world.clock(), reason=reason)
    assert before == ledger.head(world.store)


def test_an_unknown_agent_cannot_be_moved(world: World):
    with pytest.raises(TransitionError, match="there is no agent `ghost`"):
        transition(world.store, "ghost", "SUSPENDED", by="operator", reason="r", now_ms=1)


def test_a_move_starts_the_count_of_rejections_anew(world: World):
    with world.store.transaction():
        world.store.run("UPDATE agents SET rejections = 7, status = 'SUSPENDED'")
    move(world, "ACTIVE", "operator")
    assert [0] == world.column("SELECT rejections FROM agents")


def test_registering_the_same_contract_again_changes_nothing(world: World):
    before = verify.verify(world.store).head
    register(world.store, world.contract, by="registry", now_ms=2)
    assert before == verify.verify(world.store).head


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
    assert () == verify.verify(world.store).faults


@pytest.mark.parametrize("version", ["1.0.0", "0.9.9", "0.10.0"])
def test_a_version_that_is_not_newer_is_refused(world: World, version: str):
    other = contract(("version: 1.0.0", f"version: {version}"), ("desk@example.org", "else@example.org"))
    wanted = f"version `{version}` differs from the registered `1.0.0` but is not higher"
    with pytest.raises(ContractError, match=wanted):
        register(world.store, other, by="registry", now_ms=2)


def test_versions_are_numbers_not_words(world: World):
    register(world.store, contract(("1.0.0", "1.9.0")), by="registry", now_ms=2)
    register(world.store, contract(("1.0.0", "1.10.0")), by="registry", now_ms=3)
    with pytest.raises(ContractError):
        register(world.store, contract(("1.0.0", "1.9.1")), by="registry", now_ms=4)


def test_a_gate_keeps_its_agent_and_an_agent_its_gate(world: World):
    for change, wanted in (
        (("agent_id: claims-agent", "agent_id: other-agent"), "agent `claims-agent` already serves `claims`"),
        (("gate: claims", "gate: other"), "agent `claims-agent` already serves `claims`"),
    ):
        with pytest.raises(ContractError, match=wanted):
            register(world.store, contract(change, ("1.0.0", "2.0.0")), by="registry", now_ms=2)


def test_no_contract_can_join_the_gate_of_one_agent_to_another(world: World):
    """Both are known, each with the other half: neither order of the rows may let it pass."""
    second = contract(("gate: claims", "gate: zz"), ("agent_id: claims-agent", "agent_id: a-agent"))
    register(world.store, second, by="registry", now_ms=2)
    for gate, agent in (("claims", "a-agent"), ("zz", "claims-agent")):
        mixed = contract(("gate: claims", f"gate: {gate}"), ("claims-agent", agent), ("1.0.0", "2.0.0"))
        with pytest.raises(ContractError, match="cannot serve gate") as refused:
            register(world.store, mixed, by="registry", now_ms=3)
        assert "a gate has one agent for good: give another agent a gate and a name of its own" == refused.value.hint


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


def entries(world: World, kind: str) -> list[dict[str, object]]:
    return [json.loads(body) for (body,) in world.store.rows("SELECT body FROM ledger WHERE kind = ?", (kind,))]


def test_a_new_agent_goes_through_the_handshake_into_service(world: World):
    moves = [(e.get("was"), e["status"], e["by"]) for e in entries(world, "AGENT")]
    assert [(None, "INITIALIZING", "registry"), ("INITIALIZING", "ACTIVE", "registry")] == moves
    (registered,) = entries(world, "CONTRACT")
    assert {"who": "deployment", "reason": "deployed"}.items() <= registered.items()


def test_who_registered_a_contract_and_why_is_on_the_record(world: World):
    register(
        world.store,
        contract(("1.0.0", "1.1.0")),
        by="operator",
        who="Ada\n",
        reason="higher limits",
        now_ms=world.clock(),
    )
    assert {"who": "Ada", "reason": "higher limits", "version": "1.1.0"}.items() <= last_entry(world).items()


@pytest.mark.parametrize(
    ("wanted", "ours", "passes"),
    [
        ("1.0.0", "1.0.0", True),
        ("1.0.9", "1.0.0", True),
        ("1.0.0", "1.3.0", True),
        ("1.1.0", "1.0.0", False),
        ("2.0.0", "1.9.0", False),
        ("1.9.0", "2.0.0", False),
        ("0.1.0", "1.0.0", False),
        ("1.10.0", "1.9.0", False),
    ],
)
def test_the_proposal_schema_has_the_runtimes_major_and_no_newer_minor(
    world: World, monkeypatch: pytest.MonkeyPatch, wanted: str, ours: str, passes: bool
):
    monkeypatch.setattr(compatibility, "PROPOSAL_SCHEMA", ours)
    terms = contract(("version: 1.0.0", "version: 1.1.0"), more=f"proposal_schema: {wanted}\n")
    if passes:
        register(world.store, terms, by="registry", now_ms=2)
    else:
        message = f"the contract is written for proposal schema `{wanted}`, but this program supports `{ours}`"
        with pytest.raises(ContractError, match=message):
            register(world.store, terms, by="registry", now_ms=2)
    known = lookup(world.store, AGENT)
    assert ((terms if passes else world.contract).hash, "ACTIVE") == (known.contract_hash, known.status)  # type: ignore[union-attr]


def test_a_failed_handshake_is_on_the_record_and_uses_no_name_up(world: World):
    names = (("gate: claims", "gate: fresh"), ("agent_id: claims-agent", "agent_id: fresh-agent"))
    wrong = contract(*names, more="proposal_schema: 5.0.0\n")
    for _ in range(3):
        with pytest.raises(ContractError, match=r"proposal schema `5\.0\.0`"):
            register(world.store, wrong, by="operator", who="Ada", now_ms=world.clock())
    (refused,) = entries(world, "REFUSED")
    assert {"agent_id": "fresh-agent", "was": "INITIALIZING", "status": "RETIRED", "who": "Ada"}.items() <= (
        refused.items()
    )
    assert None is lookup(world.store, "fresh-agent")
    register(world.store, contract(*names), by="operator", now_ms=world.clock())
    assert lookup(world.store, "fresh-agent").active  # type: ignore[union-attr]
    assert () == verify.verify(world.store).faults


@pytest.mark.parametrize("state", get_args(Status))
def test_a_failed_update_changes_nothing_but_the_ledger(world: World, state: Status):
    with world.store.transaction():
        world.store.run("UPDATE agents SET status = ?", (state,))
    older = contract(("version: 1.0.0", "version: 0.9.0"))
    before = lookup(world.store, AGENT)
    with pytest.raises(ContractError):
        register(world.store, older, by="registry", now_ms=2)
    assert before == lookup(world.store, AGENT)
    (refused,) = entries(world, "REFUSED")
    assert ("0.9.0", None) == (refused["version"], refused.get("status"))


def test_a_retired_agent_gets_no_new_contract(world: World):
    move(world, "RETIRED", "operator")
    register(world.store, world.contract, by="registry", now_ms=2)  # its own again changes nothing
    with pytest.raises(ContractError, match="agent `claims-agent` is retired"):
        register(world.store, contract(("1.0.0", "2.0.0")), by="registry", now_ms=2)
    assert "RETIRED" == status(world)


def test_a_contract_is_revoked_once_with_who_when_and_why(world: World):
    assert [True, False] == [
        revoke(world.store, world.contract.hash, who="Ada", reason="wrong\ntable", now_ms=7) for _ in range(2)
    ]
    assert [(world.contract.hash, "Ada", "wrong table", 7)] == world.store.rows("SELECT * FROM contract_revocations")
    assert {"kind": "REVOKED", "hash": world.contract.hash, "who": "Ada", "by": "operator"}.items() <= (
        last_entry(world).items()
    )
    assert "ACTIVE" == status(world)
    assert () == verify.verify(world.store).faults


def test_a_revoked_contract_cannot_be_registered_again_but_a_higher_version_can(world: World):
    revoke(world.store, world.contract.hash, who="Ada", reason="wrong", now_ms=2)
    with pytest.raises(ContractError, match=r"version `1\.0\.0` was revoked"):
        register(world.store, world.contract, by="registry", now_ms=2)
    higher = contract(("1.0.0", "1.0.1"))
    register(world.store, higher, by="registry", now_ms=2)
    assert [world.contract.hash] == world.column("SELECT contract_hash FROM contract_revocations")
    assert higher.hash == lookup(world.store, AGENT).contract_hash  # type: ignore[union-attr]


def test_what_was_never_registered_cannot_be_revoked_and_nothing_without_a_reason(world: World):
    with pytest.raises(ContractError, match="there is no contract `abc`"):
        revoke(world.store, "abc", who="Ada", reason="wrong", now_ms=2)
    with pytest.raises(TransitionError, match="a reason is needed"):
        revoke(world.store, world.contract.hash, who="Ada", reason=" ", now_ms=2)
    assert [] == world.column("SELECT 1 FROM contract_revocations")


@pytest.mark.parametrize("sql", ["DELETE FROM contract_revocations", "UPDATE contract_revocations SET reason = ''"])
def test_a_revocation_is_final(world: World, sql: str):
    revoke(world.store, world.contract.hash, who="Ada", reason="wrong", now_ms=2)
    with pytest.raises(StoreError, match="a revocation is final"), world.store.transaction():
        world.store.run(sql)


def test_a_kind_taken_away_revokes_every_version_that_still_had_it(world: World):
    """1.0.0 has GOODWILL, 1.1.0 has not, 1.2.0 has it again: only what a later version takes away is revoked."""
    without = ("REFUND_TICKET, GOODWILL, DENY]", "REFUND_TICKET, DENY]")
    first, second = world.contract, contract(("1.0.0", "1.1.0"), without)
    third, fourth = contract(("1.0.0", "1.2.0")), contract(("1.0.0", "1.3.0"), without)
    for terms, revoked in ((second, [first]), (third, [first]), (fourth, [first, third])):
        register(world.store, terms, by="operator", who="Ada", now_ms=2)
        assert {each.hash for each in revoked} == set(world.column("SELECT contract_hash FROM contract_revocations"))
    assert {"version 1.1.0 withdraws GOODWILL", "version 1.3.0 withdraws GOODWILL"} == set(
        world.column("SELECT reason FROM contract_revocations")
    )
    assert () == verify.verify(world.store).faults
