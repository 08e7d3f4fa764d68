"""A human has said that an order was carried out, and later the executor itself says that it never will be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.flow import decision_record
from sds.kernel.flow.states import Answer
from sds.kernel.human.review import attest
from sds.kernel.operations.recovery import Recovered, recover
from sds.kernel.saga import state as saga
from sds.kernel.saga.compensation import reverse
from sds.kernel.storage import ledger
from tests.kernel.durable import LEASE_MS, World, contract, counters, refund, whole
from tests.kernel.orders import left_hanging, recovered
from tests.kernel.sagas import REVERT, SAGAS, Script, reversed_at, run

DECLINED = Receipt("rejected", detail="declined for good")
IN_SOURCE = contract(more="draws_settle_in: source\n")


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder, terms=contract(more=SAGAS))) as made:
        yield made


def say_settled(world: World, dfid: str) -> Answer:
    said = Receipt("settled", "BANK-1")
    now_ms = world.clock()
    return attest(world.kernel, dfid, said, who="ada", reason="their page", acknowledged=True, now_ms=now_ms)


def attested(world: World) -> ExecutionIntent:
    """Return an order of which nobody but a human says that it was carried out."""
    intent = left_hanging(world, paid=False)
    world.clock.advance(LEASE_MS)
    world.rail.blind = True
    assert Recovered(unknown=1) == recovered(world)
    assert "SUCCESS" == say_settled(world, intent.dfid).execution
    world.rail.blind = False
    return intent


def security(world: World) -> list[str]:
    return [name for name, _ in world.logged if name.startswith("security")]


def test_a_sender_that_was_only_slow_is_not_overheard(world: World):
    other = world.open_kernel(world.open_store())

    def slowly(intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        world.clock.advance(LEASE_MS)
        world.rail.blind = True
        assert Recovered(unknown=1) == recover(other, now_ms=world.clock())
        say_settled(world, intent.dfid)
        return DECLINED

    world.rail.dispatch = slowly  # type: ignore[method-assign]
    answer = world.decide(refund())
    assert ("CLOSED", "DIRTY", "DIRTY") == (answer.state, answer.tag, answer.execution)
    assert ["security.settlement_contradicted"] == security(world)
    assert ["RESERVED", "DECIDED", "UNKNOWN", "RESOLVED", "CONTRADICTED"] == world.column(
        "SELECT kind FROM ledger WHERE dfid <> ''"
    )
    assert answer == world.kernel.open(world.event())  # the event does not start afresh


@pytest.mark.parametrize("terms", [contract(), IN_SOURCE], ids=["settled in the kernel", "settled in the source"])
def test_nothing_becomes_available_again_while_the_two_contradict_each_other(folder: Path, terms: Contract):
    world = World(folder, terms=terms)
    intent = attested(world)
    assert "DIRTY" == world.kernel.dispatcher.settle(intent, DECLINED)
    taken = dict(counters(world.store))
    assert ({4_000}, 4) == (set(taken.values()), len(taken))  # one draw, three limits
    assert 16_000 == world.kernel.preview(world.event("C2")).snapshot.fields["ticket.refundable_minor"]
    assert () == verify.verify(world.store).faults
    for later in (Receipt("settled", "PAY-1"), DECLINED):
        assert "DIRTY" == world.kernel.dispatcher.settle(intent, later)
    assert taken == dict(counters(world.store))
    world.close()


@pytest.mark.parametrize("later", [Receipt("settled", "PAY-1"), Receipt("absent"), Receipt("unknown")])
def test_what_does_not_contradict_a_human_changes_nothing(world: World, later: Receipt):
    intent = attested(world)
    before = ledger.head(world.store)
    assert "SUCCESS" == world.kernel.dispatcher.settle(intent, later)
    assert (before, []) == (ledger.head(world.store), security(world))


def test_another_humans_word_contradicts_nobody(world: World):
    intent = attested(world)
    world.rail.blind = True
    assert "SUCCESS" == world.kernel.dispatcher.attest(intent, DECLINED, by={"who": "bob"})
    assert [] == security(world)


def test_a_contradiction_of_the_executors_own_word_is_no_entry_this_program_writes(folder: Path):
    world = World(folder)
    dfid = world.decide(refund()).dfid
    body = {"status": "DIRTY", "reference": "", "detail": "", "kept": True, "tag": "DIRTY"}
    with world.store.transaction():
        head = ledger.append(world.store, 1, "CONTRADICTED", dfid, body)
    assert f"entry {head.idx}: not an entry this program writes" in verify.verify(world.store).faults
    world.close()


# --- a step of a saga that a human has vouched for, and that is to be taken back


def half_done(world: World) -> tuple[str, ExecutionIntent]:
    """Return a dirty saga that waits for its compensation, and its first step, which a human says was carried out."""
    world.rail.misfortunes, world.rail.blind = ["lose"], True
    script = Script()

    def first_only(packet: DecisionPacket) -> bytes:
        if packet.event_id.endswith("compensation"):
            raise KeyboardInterrupt
        return script(packet)

    with pytest.raises(KeyboardInterrupt):
        run(world.kernel, world, first_only)
    world.clock.advance(LEASE_MS)
    ((dfid,),) = world.store.rows("SELECT dfid FROM execution_log")
    say_settled(world, dfid)
    world.rail.blind = False
    (parent,) = world.column("SELECT dfid FROM sagas WHERE phase = 'DIRTY'")
    order = decision_record.read_order(world.store, dfid)
    assert order is not None
    return str(parent), order


def test_a_contradicted_step_is_not_taken_back_but_left_to_a_human(world: World):
    parent, order = half_done(world)
    assert "DIRTY" == world.kernel.dispatcher.settle(order, DECLINED)
    assert saga.MOVED_ON == reverse(world.kernel, parent, order.dfid, now_ms=world.clock())
    found = run(world.kernel, world, Script(compensation=REVERT))
    assert ("ESCALATED", "ALERT_HUMAN") == (found.answer.state, found.compensation)
    assert ([], {}) == (reversed_at(world.folder), found.reversals)


def test_a_step_that_is_contradicted_while_it_is_taken_back_is_given_back_once_that_is_confirmed(world: World):
    _, order = half_done(world)
    revert = world.rail.revert

    def meanwhile(key: str, deadline_s: float) -> Receipt:
        assert "DIRTY" == world.kernel.dispatcher.settle(order, DECLINED)
        return revert(key, deadline_s)

    world.rail.revert = meanwhile  # type: ignore[method-assign]
    found = run(world.kernel, world, Script(compensation=REVERT))
    assert ["REVERTED"] == list(found.reversals.values())
    assert {0} == {amount for _, amount in counters(world.store)}


def test_what_was_taken_back_is_not_contradicted_any_more(world: World):
    _, order = half_done(world)
    found = run(world.kernel, world, Script(compensation=REVERT))
    assert ("ABORTED", "COMPENSATED") == (found.answer.state, found.answer.tag)
    assert "SUCCESS" == world.kernel.dispatcher.settle(order, DECLINED)
    assert ({0}, []) == ({amount for _, amount in counters(world.store)}, security(world))
