"""A newer contract is registered while things are under way: what was begun under the last one is not lost by it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.contract.schema import Contract, parse_contract
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import UsageError
from sds.kernel.flow.kernel import Kernel
from sds.kernel.human.review import HumanReview
from sds.kernel.operations import recovery
from sds.kernel.operations.recovery import Recovered
from sds.kernel.registry import registry
from sds.kernel.saga import state as saga
from sds.kernel.saga.claim import claim as claim_saga
from sds.kernel.saga.kernels import StepKernel
from tests.kernel.authority import halt
from tests.kernel.durable import CONTRACT, LEASE_MS, World, contract, counters, escalate, refund, whole
from tests.kernel.humans import ALWAYS, HUMAN, TERMS, escalated, resolve
from tests.kernel.outside import FARE_MINOR
from tests.kernel.sagas import REVERT, Script, most, run, terms

NEWER = ("version: 1.0.0", "version: 1.0.1")
OTHER_KEY = ("key: ticket_id", "key: booking")
IN_SOURCE = ("source: tickets", "source: tickets\ndraws_settle_in: source")


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder, terms=terms())) as made:
        yield made


def deployed(world: World, newer: Contract) -> Kernel:
    """Put a newer contract in force; return a kernel that runs it, when every lease is over."""
    registry.register(world.store, newer, by="operator", now_ms=world.clock())
    world.clock.advance(2 * LEASE_MS)
    return world.open_kernel(terms=newer)


def without_refunds() -> Contract:
    kept, _, rest = CONTRACT.partition("  REFUND_TICKET:\n")
    text = (kept + "  GOODWILL:\n" + rest.partition("  GOODWILL:\n")[2]).replace(*NEWER)
    return parse_contract(text.replace("REFUND_TICKET, ", ""))


def test_a_step_whose_kind_is_gone_is_recovered_with_everything_else(world: World):
    world.rail.misfortunes, world.rail.blind = ["lose"], True
    dfid = claim_saga(world.store, world.contract, "BOTH", world.event(), now_ms=world.clock())
    step = StepKernel(world.kernel, saga.load(world.store, world.contract, dfid), 1)
    packet = step.open(step.event)
    step.decide(packet, most(packet))  # type: ignore[arg-type]  # nobody has claimed it
    world.rail.blind = False
    found = recovery.recover(deployed(world, without_refunds()), now_ms=world.clock())
    assert Recovered(success=1, sagas_dirty=1) == found


def test_what_waits_for_a_human_is_still_listed_when_events_have_another_form(world: World):
    halt(world)
    parent = run(world.kernel, world, Script()).answer
    newer = deployed(world, terms(NEWER, OTHER_KEY))
    (case,) = HumanReview(newer, now_ms=world.clock).waiting()
    assert (parent.dfid, "ESCALATED", "T1") == (case.dfid, case.state, case.key)


def test_a_saga_is_recovered_when_events_have_another_form(world: World):
    claim_saga(world.store, world.contract, "BOTH", world.event(), now_ms=world.clock())
    newer = deployed(world, terms(NEWER, OTHER_KEY))
    assert Recovered(sagas_ended=1) == recovery.recover(newer, now_ms=world.clock())


def test_a_saga_that_an_older_process_began_is_driven_by_its_own_events_form(world: World):
    registry.register(world.store, terms(NEWER, OTHER_KEY), by="operator", now_ms=world.clock())
    found = run(world.kernel, world, Script())
    assert ("ESCALATED", "CONTRACT_REVOKED") == (found.answer.state, found.answer.tag)
    newer = deployed(world, terms(("version: 1.0.0", "version: 1.0.2"), OTHER_KEY))
    assert ["T1"] == [case.key for case in HumanReview(newer, now_ms=world.clock).waiting()]


def test_what_was_left_subtracted_is_given_back_by_whoever_learns_of_the_reversal(world: World):
    world.rail.misfortunes, world.rail.blind = ["pay", "refuse", "lose"], True
    found = run(world.kernel, world, Script(step_compensation=REVERT))
    assert ["UNKNOWN"] == list(found.reversals.values())
    world.rail.blind = False
    recovery.recover(deployed(world, terms(NEWER, IN_SOURCE)), now_ms=world.clock())
    assert ["REVERTED"] == world.column("SELECT status FROM saga_reversals")
    assert {0} == {amount for _, amount in counters(world.store)}


def test_an_order_in_flight_is_settled_by_the_terms_it_was_reserved_under(world: World):
    """The source has never shown what the kernel was to remember: the fare is not paid a second time."""
    world.rail.misfortunes, world.rail.blind = ["lose"], True
    assert "UNKNOWN" == world.decide(refund("200.00")).execution
    world.rail.blind = False
    world.kernel = deployed(world, terms(NEWER, IN_SOURCE))
    assert Recovered(success=1) == recovery.recover(world.kernel, now_ms=world.clock())
    assert [FARE_MINOR] == world.column("SELECT drawn FROM resources")
    assert "REFUND_TICKET" not in world.kernel.preview(world.event("C2")).envelope.names


def test_what_the_source_was_to_show_is_given_back_whatever_contract_settles_it(folder: Path):
    world = World(folder, terms=contract(IN_SOURCE))
    world.rail.misfortunes, world.rail.blind = ["lose"], True
    world.decide(refund())
    world.rail.blind = False
    recovery.recover(deployed(world, contract(NEWER)), now_ms=world.clock())
    assert [0] == world.column("SELECT drawn FROM resources")
    assert () == verify.verify(world.store).faults
    world.close()


def test_a_step_in_flight_is_settled_by_its_sagas_terms(world: World):
    world.rail.misfortunes, world.rail.blind = ["lose"], True
    run(world.kernel, world, Script())
    world.rail.blind = False
    recovery.recover(deployed(world, terms(NEWER, IN_SOURCE)), now_ms=world.clock())
    assert [FARE_MINOR // 2] == world.column("SELECT drawn FROM resources")


def test_a_humans_order_is_settled_by_the_terms_they_decided_under(folder: Path):
    """The case is older than the contract they decided it under; a still newer one settles it."""
    world = World(folder, terms=contract(ALWAYS, IN_SOURCE, more=HUMAN))
    dfid = escalated(world, refund("40.00"))
    world.contract = contract(NEWER, ALWAYS, more=HUMAN)
    world.kernel = deployed(world, world.contract)
    world.rail.misfortunes, world.rail.blind = ["lose"], True
    assert "UNKNOWN" == resolve(world, dfid, "OVERRIDE").execution
    world.rail.blind = False
    newest = contract(("version: 1.0.0", "version: 1.0.2"), ALWAYS, IN_SOURCE, more=HUMAN)
    assert Recovered(success=1) == recovery.recover(deployed(world, newest), now_ms=world.clock())
    assert [4_000] == world.column("SELECT drawn FROM resources")
    assert () == verify.verify(world.store).faults
    world.close()


def test_a_humans_order_is_not_sent_again_under_a_contract_they_have_not_decided_under(folder: Path):
    world = World(folder, terms=TERMS)
    dfid = escalated(world, refund("40.00"))
    world.rail.misfortunes, world.rail.blind = ["drop"], True
    assert "UNKNOWN" == resolve(world, dfid, "OVERRIDE").execution
    world.rail.blind = False
    fresh_limit = ("spend:\n", "spend:\n  - {name: fresh, window: day, max_minor: 4000}\n")
    newer = deployed(world, contract(NEWER, ALWAYS, fresh_limit, more=HUMAN))
    assert Recovered(failed=1) == recovery.recover(newer, now_ms=world.clock())
    assert [] == world.rail.paid()
    assert () == verify.verify(world.store).faults
    world.close()


def test_before_its_day_a_newer_version_leaves_only_the_human_who_is_told_the_day(world: World):
    early = terms(NEWER, ('effective_from: "2013-01-01"', 'effective_from: "2014-01-01"'))
    kernel = deployed(world, early)
    packet, human = kernel.open(world.event()), HumanReview(kernel, now_ms=world.clock)
    assert isinstance(packet, DecisionPacket)
    said = "the contract is in effect only from 2014-01-01 (UTC) on"
    assert (("ESCALATE",), (said,)) == (packet.envelope.names, packet.notes)
    case = human.case(kernel.decide(packet, escalate(packet), Decoding()).dfid)
    assert (f"ESCALATED_BY_RULE: {said}",) == case.reasons
    assert (said,) == human.view(case).packet.notes
    world.clock.now_ms = int(datetime(2014, 1, 1, tzinfo=UTC).timestamp() * 1000)
    assert () == human.view(case).packet.notes


def test_a_saga_that_has_ended_is_answered_although_the_contract_has_it_no_longer(world: World):
    ended = run(world.kernel, world, Script())
    newer = deployed(world, contract(NEWER))
    assert ended == run(newer, world, Script())
    with pytest.raises(UsageError, match="there is no saga `BOTH`"):
        run(newer, world, Script(), event="C2")


def test_a_half_done_saga_takes_no_step_under_a_contract_that_has_it_no_longer(world: World):
    class GoneError(BaseException):
        pass

    def gone(_packet: DecisionPacket) -> bytes:
        raise GoneError

    with pytest.raises(GoneError):
        run(world.kernel, world, Script(step_2=gone))
    newer = deployed(world, contract(NEWER))
    with pytest.raises(UsageError, match="there is no saga `BOTH`"):
        run(newer, world, Script())
    assert 1 == recovery.recover(newer, now_ms=world.clock()).sagas_dirty
