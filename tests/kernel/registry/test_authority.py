"""Which contract a flow is under, from its creation to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import Decoding
from sds.kernel.registry import registry
from sds.kernel.registry.authority import Authority, authority_now
from tests.kernel.authority import NARROWER, halt, newer_version, revoke, status, suspend
from tests.kernel.durable import World, contract, deny, escalate, refund


def test_a_flow_stays_under_the_contract_it_was_created_under(world: World):
    """Judged, checked just in time and reserved under it, though a newer version with another mission is in force."""
    packet = world.packet()
    newer_version(world)
    answer = world.kernel.decide(packet, refund()(packet))
    assert ("CLOSED", "SUCCESS") == (answer.state, answer.execution)
    assert [world.contract.hash] == world.column("SELECT contract_hash FROM decision_flows")
    assert "ACTIVE" == status(world)
    assert () == verify.verify(world.store).faults


def test_a_flow_created_after_a_newer_version_is_under_that_one_whoever_opened_it(world: World):
    """Nothing is lost: a kernel that still runs the older version hands it to a human, mission changed or not."""
    newer_version(world)
    packet = world.packet()
    assert (("ESCALATE",), world.contract.hash) == (packet.envelope.names, packet.contract_hash)
    assert [packet.contract_hash] != world.column("SELECT contract_hash FROM decision_flows")
    answer = world.kernel.decide(packet, escalate(packet))
    assert ("ESCALATED", "CONTRACT_REVOKED") == (answer.state, answer.reason_code)


def test_a_flow_started_anew_after_drift_is_under_the_contract_of_that_moment(world: World):
    packet = world.packet()
    newer_version(world)
    world.tickets.put("T1", refundable_minor=1)
    assert "STATE_DRIFT_DETECTED" == world.kernel.decide(packet, refund()(packet)).tag
    assert ("ESCALATE",) == world.packet().envelope.names


@pytest.mark.parametrize(
    "act", [revoke, lambda w: newer_version(w, *NARROWER)], ids=["by an operator", "by taking a kind away"]
)
def test_a_revoked_contract_ends_every_flow_under_it(world: World, act: Callable[[World], object]):
    packets = [world.packet(f"C{number}") for number in range(2)]
    act(world)
    answers = [world.kernel.decide(packet, say(packet)) for packet, say in zip(packets, (refund(), deny), strict=True)]
    assert [("ABORTED", "CONTRACT_REVOKED")] * 2 == [(answer.state, answer.tag) for answer in answers]
    assert ([], "ACTIVE") == (world.rail.sent, status(world))
    assert ("ESCALATE",) == world.packet("C3").envelope.names
    assert () == verify.verify(world.store).faults


def test_a_newer_version_that_takes_no_kind_away_revokes_nothing_and_one_that_does_every_earlier_one(world: World):
    packet = world.packet("C1")
    newer_version(world)
    assert [] == world.column("SELECT contract_hash FROM contract_revocations")
    narrower = contract(NARROWER[0], ("1.1.0", "1.2.0"), *NARROWER[1:])
    registry.register(world.store, narrower, by="operator", who="me", now_ms=1)
    assert "CONTRACT_REVOKED" == world.kernel.decide(packet, refund()(packet)).tag
    assert 2 == len(world.column("SELECT contract_hash FROM contract_revocations"))
    opened = world.open_kernel(terms=narrower).open(world.event("C2"))
    assert "COMPENSATE" in opened.envelope.names  # type: ignore[union-attr]


def test_an_agent_that_is_not_registered_counts_as_halted_and_is_under_no_contract(world: World):
    """Also for a flow that is under one: what nobody vouches for may do nothing."""
    packet = world.packet()
    unknown = authority_now(world.store, "stranger", packet.dfid)
    assert Authority(status=None, halted=True, contract_hash="", mission_hash="") == unknown
    assert (False, False, "AGENT_SUSPENDED") == (
        unknown.active,
        unknown.in_service,
        unknown.withdrawn(world.contract.hash),
    )
    verdict = world.kernel.judge(replace(packet, agent_id="stranger"), refund()(packet), Decoding())
    assert {"AGENT_SUSPENDED", "HALTED", "CONTRACT_REVOKED"} <= {reason.code for reason in verdict.reasons}


def test_a_flow_that_is_not_there_is_under_no_contract(world: World):
    authority = authority_now(world.store, world.contract.agent_id, "none")
    assert ("ACTIVE", False, "CONTRACT_REVOKED") == (
        authority.status,
        authority.halted,
        authority.withdrawn(world.contract.hash),
    )


def test_authority_is_withdrawn_by_its_first_reason_suspension_then_halt_then_revocation(world: World):
    def withdrawn() -> str | None:
        return authority_now(world.store, world.contract.agent_id).withdrawn(world.contract.hash)

    found = [withdrawn()]
    for act in (revoke, halt, suspend):
        act(world)
        found.append(withdrawn())
    assert [None, "CONTRACT_REVOKED", "HALTED", "AGENT_SUSPENDED"] == found
