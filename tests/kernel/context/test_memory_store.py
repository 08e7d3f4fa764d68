"""The session: the next attempt is told what was rejected, and what was rejected is not judged again."""

from __future__ import annotations

from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import StoreError
from sds.kernel.flow.observe import feedback
from tests.kernel.durable import (
    World,
    compensate,
    nonsense,
    refund,
    see_through,
)

# Session


def test_a_first_attempt_is_told_nothing_of_the_session(world: World):
    packet = world.packet()
    assert packet == world.kernel.with_feedback(packet)


def test_the_next_attempt_is_told_what_was_rejected_before_the_evidence(world: World):
    packet = world.packet()
    world.kernel.decide(packet, refund("200.01")(packet))
    second = world.kernel.with_feedback(packet)
    world.kernel.decide(second, nonsense(second))
    third = world.kernel.with_feedback(second)
    assert "Rejected before: REFUND_TICKET 200.01 (RBAC_DENIED)" == second.feedback
    assert "Rejected before: REFUND_TICKET 200.01 (RBAC_DENIED); no proposal (SCHEMA_INVALID)" == third.feedback
    assert (*packet.texts[:-1], f"{third.feedback}\n", packet.texts[-1]) == third.texts
    assert (packet.dfid, packet.snapshot, packet.envelope) == (third.dfid, third.snapshot, third.envelope)
    assert third == world.kernel.with_feedback(third)


def test_the_record_holds_what_the_model_read_for_the_final_attempt(world: World):
    packet = world.packet()
    world.kernel.decide(packet, refund("200.01")(packet))
    second = world.kernel.with_feedback(packet)
    answer = world.kernel.decide(second, refund("200.00")(second))
    assert second.texts == world.prompt(answer.dfid)
    assert () == verify.verify(world.store).faults


def test_a_session_is_gone_when_its_flow_has_ended(world: World):
    packet = world.packet()
    world.kernel.decide(packet, nonsense(packet))
    assert "no proposal" in feedback(world.store, world.contract, packet.dfid)
    world.kernel.decide(packet, refund()(packet))
    assert "" == feedback(world.store, world.contract, packet.dfid)


def test_attempts_that_cannot_be_read_are_a_refusal_and_not_a_forgotten_rejection(world: World):
    packet = world.packet()
    world.kernel.decide(packet, nonsense(packet))
    with world.store.transaction():
        world.store.run("UPDATE attempts SET reasons = '[1]'")
    with pytest.raises(StoreError, match="the attempts of this flow cannot be read"):
        world.kernel.with_feedback(packet)


# A rejected proposal is not judged again


def test_a_proposal_that_was_rejected_goes_to_a_human_when_it_comes_again(world: World):
    packet = world.packet()
    data = refund("200.01")(packet)
    assert "ACTIVE" == world.kernel.decide(packet, data).state
    assert [1] == world.column("SELECT rejections FROM agents")
    answer = world.kernel.decide(packet, data)
    assert ("ESCALATED", "REPEATED_PROPOSAL", "REFUND_TICKET") == (answer.state, answer.reason_code, answer.action)
    assert [1] == world.column("SELECT rejections FROM agents"), "not held against the agent a second time"
    assert [2] == world.column("SELECT attempt_number FROM dim_validations")
    assert () == verify.verify(world.store).faults
    assert answer == see_through(world.kernel, world.event(), compensate)


def test_a_repeated_proposal_is_not_judged_anew_even_when_it_would_be_accepted_now(world: World):
    packet = world.packet()
    world.tickets.put("T1", refundable_minor=50_000)
    data = refund("300.00")(packet)
    world.kernel.decide(packet, data)
    wider = world.kernel.preview(world.event())
    assert wider.envelope.kind("REFUND_TICKET") != packet.envelope.kind("REFUND_TICKET")
    assert "REPEATED_PROPOSAL" == world.kernel.decide(packet, data).reason_code
    assert [] == world.rail.paid()


def test_what_was_rejected_in_another_flow_is_judged_in_this_one(world: World):
    first = world.packet("one")
    world.kernel.decide(first, refund("200.01")(first))
    second = world.packet("two")
    assert "ACTIVE" == world.kernel.decide(second, refund("200.01")(second)).state


def test_a_changed_proposal_is_judged(world: World):
    packet = world.packet()
    for amount in ("200.01", "200.02"):
        assert "ACTIVE" == world.kernel.decide(packet, refund(amount)(packet)).state
    assert "CLOSED" == world.kernel.decide(packet, refund("200.00")(packet)).state


def test_bytes_that_are_no_proposal_are_only_ever_rejected(world: World):
    packet = world.packet()
    states = [world.kernel.decide(packet, nonsense(packet)).state for _ in range(3)]
    assert ["ACTIVE", "ACTIVE", "ESCALATED"] == states


# An older record


def test_a_record_made_before_there_was_memory_remembers_once_it_is_opened(folder: Path):
    world = World(folder)
    world.decide(compensate, "one")
    with world.store.transaction():
        for statement in ("INDEX snapshots_by_key_and_time", "INDEX proposals_by_agent", "TABLE artifacts"):
            world.store.run(f"DROP {statement}")
        world.store.run("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    world.store.close()
    world.store = world.open_store()
    world.kernel = world.open_kernel()
    assert "COMPENSATE 250.00: paid" in world.packet("two").texts[2]
    assert () == verify.verify(world.store).faults
    world.close()
