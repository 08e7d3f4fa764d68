"""Recovery: what is not known is held, looked up by its key, and sent again only where that is safe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.executor.protocol import Receipt
from sds.kernel.flow import undecided
from sds.kernel.operations.recovery import Recovered, recover
from sds.kernel.registry import registry
from sds.kernel.storage.store import Store
from tests.kernel.authority import halt, newer_version, revoke, suspend
from tests.kernel.durable import LEASE_MS, World, compensate, contract, counters, deny, refund, see_through
from tests.kernel.orders import execution, left_hanging, recovered
from tests.kernel.outside import PaysOnly


@pytest.fixture
def once_only(folder: Path) -> Iterator[World]:
    """Return a world whose rail pays again each time it is asked."""
    made = World(folder, idempotent=False)
    yield made
    made.close()


def test_what_is_unknown_is_held_and_said_to_be_unknown(world: World):
    world.rail.misfortunes = ["drop"]
    answer = world.decide(refund("40.00"))
    assert ("EXECUTING", "UNKNOWN", False) == (answer.state, answer.execution, answer.pending)
    assert answer == world.kernel.open(world.event())
    assert ["live"] == world.column("SELECT status FROM reservations")
    assert {4_000} == {used for _, used in counters(world.store)}
    assert 16_000 == world.kernel.preview(world.event("C2")).snapshot.fields["ticket.refundable_minor"]


@pytest.mark.parametrize(
    ("misfortune", "status", "paid"),
    [
        ("lose", "SUCCESS", 1),
        ("raise", "SUCCESS", 1),
        ("refuse", "FAILED", 0),
        ("drop", "UNKNOWN", 0),
        ("pay", "SUCCESS", 1),
    ],
)
def test_what_the_first_dispatch_leaves_open_is_looked_up_at_once(
    world: World, misfortune: str, status: str, paid: int
):
    world.rail.misfortunes = [misfortune]
    assert status == world.decide(refund()).execution
    assert (1, paid) == (len(world.rail.sent), len(world.rail.paid()))


@pytest.mark.parametrize("misfortune", ["lose", "raise", "drop"])
def test_a_rail_that_does_not_answer_leaves_the_order_unknown_and_sends_nothing(world: World, misfortune: str):
    world.rail.misfortunes, world.rail.blind = [misfortune], True
    assert "UNKNOWN" == world.decide(refund()).execution
    assert Recovered(unknown=1) == recovered(world)
    assert 1 == len(world.rail.sent)


def test_an_unknown_order_that_was_paid_is_resolved_by_its_key(world: World):
    world.rail.misfortunes, world.rail.blind = ["lose"], True
    answer = world.decide(refund())
    world.rail.blind = False
    assert Recovered(success=1) == recovered(world)
    after = world.kernel.open(world.event())
    assert (answer.dfid, "CLOSED", "SUCCESS", "PAY-00000001") == (
        after.dfid,
        after.state,
        after.execution,  # type: ignore[union-attr]
        after.reference,  # type: ignore[union-attr]
    )
    assert ["RESERVED", "DECIDED", "UNKNOWN", "RESOLVED"] == world.column(
        "SELECT kind FROM ledger WHERE dfid = ?", answer.dfid
    )
    assert (1, 1) == (len(world.rail.sent), len(world.rail.paid()))


def test_an_absent_order_is_sent_again_with_the_same_key_when_that_is_safe(world: World):
    world.rail.misfortunes = ["drop"]
    world.decide(refund())
    assert Recovered(success=1) == recovered(world)
    assert (2, 1, 1) == (len(world.rail.sent), len(set(world.rail.sent)), len(world.rail.paid()))


def test_an_absent_order_is_voided_when_sending_again_is_not_safe_and_its_event_gets_a_fresh_flow(once_only: World):
    once_only.rail.misfortunes = ["drop"]
    first = once_only.decide(refund())
    assert [Recovered(failed=1), Recovered()] == [recovered(once_only) for _ in range(2)]
    assert (0, ["released"]) == (len(once_only.rail.paid()), once_only.column("SELECT status FROM reservations"))
    assert "SUCCESS" == see_through(once_only.kernel, once_only.event(), refund()).execution
    (paid,) = once_only.rail.paid()
    assert paid[0] != first.dfid


def test_an_absent_order_stays_unknown_and_held_when_it_can_neither_be_sent_again_nor_voided(once_only: World):
    once_only.rail.misfortunes = ["drop"]
    once_only.decide(refund())
    once_only.kernel = once_only.open_kernel(executor=PaysOnly(once_only.rail))
    assert [Recovered(unknown=1)] * 3 == [recovered(once_only) for _ in range(3)]
    assert (1, 0, ["live"]) == (
        len(once_only.rail.sent),
        len(once_only.rail.paid()),
        once_only.column("SELECT status FROM reservations"),
    )
    assert [] == once_only.column("SELECT 1 FROM ledger WHERE kind = 'VOIDING'")


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.tickets.put("T1", mood="angry"),
        lambda w: w.tickets.put("T1", refundable_minor=0),
        suspend,
        halt,
        revoke,
    ],
    ids=["state moved", "nothing left", "suspended", "halted", "revoked"],
)
def test_recovery_never_sends_an_order_that_would_not_be_reserved_again(
    world: World, change: Callable[[World], object]
):
    left_hanging(world, paid=False)
    world.clock.advance(LEASE_MS)
    change(world)
    assert Recovered(failed=1) == recovered(world)
    assert ([], []) == (world.rail.sent, world.rail.paid())
    assert ["INTERRUPTED"] == world.column("SELECT tag FROM decision_flows")
    assert () == verify.verify(world.store).faults


def test_an_order_on_a_ticket_with_a_mistyped_field_is_voided_and_the_next_one_is_sent_again(world: World):
    for name, ticket in (("C1", "T1"), ("C2", "T2")):
        world.tickets.put(ticket)
        world.rail.misfortunes = ["drop"]
        world.decide(refund(), name, ticket)
    world.tickets.put("T1", customer=b"ada")  # type: ignore[arg-type]  # what a careless source may return
    assert Recovered(success=1, failed=1) == recovered(world)
    assert ["T2"] == [ticket for _, ticket, *_ in world.rail.paid()]


def test_an_order_is_sent_again_under_the_contract_of_its_flow_and_by_no_other_kernel(world: World):
    """Whoever runs the newer version cannot derive the older one's envelope: it voids what it finds of it."""
    newer = contract(("1.0.0", "1.0.1"))
    for name, terms in (("C1", world.contract), ("C2", newer)):
        left_hanging(world, paid=False, name=name)
        if terms is newer:
            registry.register(world.store, newer, by="registry", now_ms=1)
        world.clock.advance(LEASE_MS)
        expected = Recovered(success=1) if terms is world.contract else Recovered(failed=1)
        assert expected == recover(world.open_kernel(terms=terms), now_ms=world.clock())
    assert 1 == len(world.rail.paid())
    assert () == verify.verify(world.store).faults


def test_an_order_of_a_superseded_contract_is_sent_again_by_a_kernel_that_still_runs_it(world: World):
    left_hanging(world, paid=False)
    newer_version(world, ("1.0.0", "1.0.1"))
    world.clock.advance(LEASE_MS)
    assert Recovered(success=1) == recovered(world)


def test_a_sender_that_wakes_up_after_recovery_sends_nothing(world: World):
    intent = left_hanging(world, paid=False)
    until_ms = world.clock() + world.contract.budget.dispatch_ms_max
    world.clock.advance(LEASE_MS)
    world.tickets.put("T1", refundable_minor=0)
    assert Recovered(failed=1) == recovered(world)
    assert "FAILED" == world.kernel.dispatcher.carry_out(intent, until_ms=until_ms)
    world.rail.dispatch(intent, intent.idempotency_key, 1.0)  # even if it were past its own look at the clock
    assert [] == world.rail.paid()


def test_a_sender_that_is_told_of_a_void_before_recovery_has_written_it_down_leaves_the_claim_restartable(world: World):
    intent = left_hanging(world, paid=False)
    world.tickets.put("T1", refundable_minor=19_000)
    void = world.rail.void

    def then_the_sender_wakes_up(key: str, deadline_s: float) -> Receipt:
        voided = void(key, deadline_s)
        told = world.rail.dispatch(intent, key, deadline_s)
        assert "FAILED" == world.kernel.dispatcher.settle(intent, told)
        return voided

    world.rail.void = then_the_sender_wakes_up  # type: ignore[method-assign]
    world.clock.advance(LEASE_MS)
    assert Recovered(failed=1) == recovered(world)
    assert ["INTERRUPTED"] == world.column("SELECT tag FROM decision_flows")
    assert () == verify.verify(world.store).faults


def test_a_void_that_is_not_answered_is_announced_once_and_kept_to_when_its_end_is_known(world: World):
    left_hanging(world, paid=False)
    world.clock.advance(LEASE_MS)
    world.tickets.put("T1", refundable_minor=19_000)
    void = world.rail.void

    def unanswered(key: str, deadline_s: float) -> Receipt:
        if world.column("SELECT 1 FROM ledger WHERE kind = 'UNKNOWN'"):
            void(key, deadline_s)
        return Receipt("unknown")

    world.rail.void = unanswered  # type: ignore[method-assign]
    assert [Recovered(unknown=1), Recovered(unknown=1), Recovered(failed=1)] == [recovered(world) for _ in range(3)]
    assert ["RESERVED", "DECIDED", "VOIDING", "UNKNOWN", "RESOLVED"] == world.column(
        "SELECT kind FROM ledger WHERE dfid <> ''"
    )
    assert ["INTERRUPTED"] == world.column("SELECT tag FROM decision_flows")
    assert () == verify.verify(world.store).faults


def test_what_the_rail_declined_by_itself_is_no_interruption(world: World):
    intent = left_hanging(world, paid=False)
    world.rail.misfortunes = ["refuse"]
    world.rail.dispatch(intent, intent.idempotency_key, 1.0)
    world.clock.advance(LEASE_MS)
    assert Recovered(failed=1) == recovered(world)
    assert ["EXECUTION_FAILED"] == world.column("SELECT tag FROM decision_flows")


def test_a_refusal_of_our_own_is_not_the_rails_word(world: World):
    """What a client refuses before it has sent anything settles nothing: an earlier sender may still be on its way."""
    intent = left_hanging(world, paid=False)
    world.clock.advance(LEASE_MS)
    dispatch = world.rail.dispatch
    world.rail.dispatch = lambda *_: Receipt("rejected", detail="the ticket has moved")  # type: ignore[method-assign]
    assert Recovered(unknown=1) == recovered(world)
    world.rail.dispatch = dispatch  # type: ignore[method-assign]
    world.rail.dispatch(intent, intent.idempotency_key, 1.0)
    assert Recovered(success=1) == recovered(world)


def test_a_failed_order_that_turns_out_to_be_paid_is_dirty_and_takes_again_what_it_gave_back(world: World):
    intent = left_hanging(world, paid=False)
    world.kernel.dispatcher.settle(intent, Receipt("rejected"))
    assert "DIRTY" == world.kernel.dispatcher.settle(intent, Receipt("settled", "PAY-9"))
    assert [("DIRTY", "PAY-9")] == world.store.rows("SELECT status, external_receipt FROM execution_log")
    assert [("tickets:T1#ticket.refundable_minor", 4_000)] == world.store.rows("SELECT resource, drawn FROM resources")
    assert ["security.settlement_contradicted"] == [name for name, _ in world.logged if name.startswith("security")]
    assert () == verify.verify(world.store).faults
    assert "DIRTY" == world.kernel.dispatcher.settle(intent, Receipt("rejected"))


@pytest.mark.parametrize("paid", [False, True])
@pytest.mark.parametrize("idempotent", [False, True])
def test_an_order_whose_sender_died_is_resolved_after_its_lease(folder: Path, paid: bool, idempotent: bool):
    world = World(folder, idempotent=idempotent)
    left_hanging(world, paid=paid)
    assert Recovered(leased=1) == recovered(world)  # its sender may still be alive
    world.clock.advance(LEASE_MS)
    status = "SUCCESS" if paid or idempotent else "FAILED"
    assert Recovered(success=int(status == "SUCCESS"), failed=int(status == "FAILED")) == recovered(world)
    assert ([status], int(paid or idempotent)) == (execution(world), len(world.rail.paid()))
    assert () == verify.verify(world.store).faults
    world.close()


def test_nothing_is_sent_again_while_everything_is_halted(world: World):
    left_hanging(world, paid=False)
    world.clock.advance(LEASE_MS)
    halt(world)
    assert Recovered(failed=1) == recovered(world)
    assert [] == world.rail.sent
    halt(world, halted=False)
    assert "SUCCESS" == see_through(world.kernel, world.event(), refund()).execution


def test_a_payment_made_before_the_halt_is_still_acknowledged(world: World):
    left_hanging(world, paid=True)
    world.clock.advance(LEASE_MS)
    halt(world)
    assert Recovered(success=1) == recovered(world)


def test_recovering_again_changes_nothing(world: World):
    left_hanging(world, paid=False)
    world.packet("C2", "T404")
    world.clock.advance(LEASE_MS)
    assert Recovered(interrupted=1, success=1) == recovered(world)
    head = verify.verify(world.store).head
    assert Recovered() == recovered(world)
    assert head == verify.verify(world.store).head


@pytest.mark.parametrize(
    ("first", "receipt"),
    [
        *(("pay", Receipt(status)) for status in ("settled", "rejected", "unknown", "absent")),
        *(("refuse", Receipt(status)) for status in ("rejected", "unknown", "absent")),
    ],
)
def test_what_is_settled_stays_settled_whatever_is_said_later(world: World, first: str, receipt: Receipt):
    intent = left_hanging(world, paid=False)
    world.rail.misfortunes = [first]
    status = world.kernel.dispatcher.carry_out(intent, until_ms=world.clock())
    before = (verify.verify(world.store).head, list(counters(world.store)))
    assert status == world.kernel.dispatcher.settle(intent, receipt)
    assert before == (verify.verify(world.store).head, list(counters(world.store)))


def test_an_order_told_unknown_twice_is_written_down_once(world: World):
    intent = left_hanging(world, paid=False)
    assert ["UNKNOWN", "UNKNOWN"] == [world.kernel.dispatcher.settle(intent, Receipt("unknown")) for _ in range(2)]
    assert ["UNKNOWN"] == world.column("SELECT kind FROM ledger WHERE kind = 'UNKNOWN'")


def test_a_flow_whose_holder_died_before_deciding_is_interrupted_after_its_lease(world: World):
    packet = world.packet()
    world.clock.advance(world.contract.budget.ttl_ms)
    assert Recovered(leased=1) == recovered(world)
    world.clock.advance(LEASE_MS)
    assert Recovered(interrupted=1) == recovered(world)
    assert [("ABORTED", "INTERRUPTED")] == world.store.rows(
        "SELECT state, tag FROM decision_flows WHERE dfid = ?", (packet.dfid,)
    )
    world.decide(refund())
    assert 1 == len(world.rail.paid())


def test_a_flow_that_cannot_be_ended_keeps_nothing_else_from_recovery(world: World):
    damaged = world.decide(deny).dfid
    left_hanging(world, paid=False, name="C2")
    world.packet("C3")
    world.clock.advance(LEASE_MS)
    with world.store.transaction():
        world.store.run("UPDATE decision_flows SET state = 'ACTIVE' WHERE dfid = ?", (damaged,))
    found = recovered(world)
    assert (1, 1) == (found.interrupted, found.success)
    (told,) = found.errors
    assert told.startswith(f"{damaged}: StoreError: the store refused: ")
    assert ["ACTIVE"] == world.column("SELECT state FROM decision_flows WHERE dfid = ?", damaged)


def test_a_flow_that_ends_while_recovery_is_on_its_way_to_it_keeps_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    packets = [world.packet(name) for name in ("C1", "C2")]
    world.clock.advance(LEASE_MS)
    interrupt = undecided.interrupt

    def meanwhile(store: Store, dfid: str, *, restarts_max: int, now_ms: int) -> None:
        interrupt(store, dfid, restarts_max=restarts_max, now_ms=now_ms)
        store.run("UPDATE decision_flows SET state = 'CLOSED' WHERE dfid = ?", (packets[1].dfid,))

    monkeypatch.setattr(undecided, "interrupt", meanwhile)
    assert Recovered(interrupted=1) == recovered(world)
    assert ["ABORTED", "CLOSED"] == world.column("SELECT state FROM decision_flows")


def test_only_ones_own_gate_is_recovered(world: World):
    other = contract(("gate: claims", "gate: others"), ("agent_id: claims-agent", "agent_id: others-agent"))
    registry.register(world.store, other, by="registry", now_ms=1)
    left_hanging(world, paid=False)
    world.packet("C2")
    world.clock.advance(LEASE_MS)
    assert Recovered() == recover(world.open_kernel(terms=other), now_ms=world.clock())
    assert Recovered(interrupted=1, success=1) == recovered(world)


def test_a_late_sender_and_recovery_together_pay_once(world: World):
    """The sender was only slow: it wakes up after recovery has sent its order again."""
    intent = left_hanging(world, paid=False)
    world.clock.advance(LEASE_MS)
    assert Recovered(success=1) == recovered(world)
    assert "SUCCESS" == world.kernel.dispatcher.carry_out(intent, until_ms=world.clock())
    assert (2, 1) == (len(world.rail.sent), len(world.rail.paid()))
    assert () == verify.verify(world.store).faults


def test_a_late_sender_settles_what_recovery_could_not_know(once_only: World):
    intent = left_hanging(once_only, paid=False)
    once_only.clock.advance(LEASE_MS)
    once_only.kernel = once_only.open_kernel(executor=PaysOnly(once_only.rail))
    assert Recovered(unknown=1) == recovered(once_only)
    assert "SUCCESS" == once_only.kernel.dispatcher.carry_out(intent, until_ms=once_only.clock())
    assert 1 == len(once_only.rail.paid())
    assert () == verify.verify(once_only.store).faults


def test_a_resolved_failure_frees_the_ticket_and_a_resolved_success_does_not(world: World):
    world.rail.misfortunes, world.rail.blind = ["drop", "lose"], True
    world.decide(refund("150.00"), "C1")
    world.decide(compensate, "C2")
    world.rail.misfortunes, world.rail.blind = ["refuse"], False
    assert Recovered(success=1, failed=1) == recovered(world)
    packet = world.packet("C3")
    assert (20_000, 0) == (
        packet.snapshot.fields["ticket.refundable_minor"],
        packet.snapshot.fields["ticket.compensations_left"],
    )
    assert "CLOSED" == world.kernel.decide(packet, deny(packet)).state
    assert () == verify.verify(world.store).faults
