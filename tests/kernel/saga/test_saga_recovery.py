"""Sagas that were left in the middle: what recovery, or whoever brings the event again, makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.flow.kernel import Kernel
from sds.kernel.operations import recovery
from sds.kernel.operations.recovery import Recovered
from sds.kernel.saga import compensation
from sds.kernel.saga import state as saga
from sds.kernel.saga.compensation import reverse
from tests.kernel.durable import (
    LEASE_MS,
    World,
    deny,
)
from tests.kernel.sagas import (
    ALERT_HUMAN,
    DIRTY,
    REVERT,
    Script,
    executions,
    most,
    parent,
    reversed_at,
    run,
    terms,
    with_misfortune,
)
from tests.stores.records import alone


def interrupted_after(world: World, calls: int) -> Callable[[DecisionPacket], bytes]:
    """Propose, but leave the process at the given call."""
    script = Script()

    def propose(packet: DecisionPacket) -> bytes:
        if len(script.asked) == calls:
            raise KeyboardInterrupt
        return script(packet)

    return propose


def test_recovery_ends_a_saga_of_which_nothing_was_done_and_its_event_may_come_again(world: World):
    with pytest.raises(KeyboardInterrupt):
        run(world.kernel, world, interrupted_after(world, 0))
    assert 0 == recovery.recover(world.kernel, now_ms=world.clock()).sagas_ended
    world.clock.advance(2 * LEASE_MS)
    assert 1 == recovery.recover(world.kernel, now_ms=world.clock()).sagas_ended
    found = run(world.kernel, world, Script())
    assert (("CLOSED", None, None), "C1/r1/1") == (parent(found), found.steps[0].event_id if found.steps[0] else "")


def test_recovery_marks_a_half_done_saga_dirty_and_whoever_has_a_model_asks_for_its_compensation(world: World):
    with pytest.raises(KeyboardInterrupt):
        run(world.kernel, world, interrupted_after(world, 1))
    world.clock.advance(2 * LEASE_MS)
    found = recovery.recover(world.kernel, now_ms=world.clock())
    assert (0, 1) == (found.sagas_ended, found.sagas_dirty)
    assert [("ACTIVE", DIRTY)] == world.store.rows("SELECT state, tag FROM decision_flows JOIN sagas USING (dfid)")
    assert () == verify.verify(world.store).faults
    script = Script(compensation=REVERT)
    assert ("ABORTED", "COMPENSATED", "REVERT") == parent(run(world.kernel, world, script))
    assert ["compensation"] == script.asked


@pytest.mark.parametrize("steps_done", [0, 1])
def test_recovery_ends_the_steps_as_the_driver_would_have_when_one_has_ended(
    world: World, monkeypatch: pytest.MonkeyPatch, steps_done: int
):
    """The process dies between a step's denial and the saga's own end: the case is decided, and not decided again."""

    def dies(*_args: object, **_named: object) -> None:
        raise KeyboardInterrupt

    script = Script(**{f"step_{steps_done + 1}": deny})
    with monkeypatch.context() as patched:
        patched.setattr(saga, "close_steps", dies)
        with pytest.raises(KeyboardInterrupt):
            run(world.kernel, world, script)
    world.clock.advance(2 * LEASE_MS)
    recovery.recover(world.kernel, now_ms=world.clock())
    kind, body = world.store.rows("SELECT kind, body FROM ledger ORDER BY idx DESC LIMIT 1")[0]
    assert ("SAGA" if steps_done else "DECIDED", "STEP_DENIED") == (kind, json.loads(body)["reason_code"])
    end = ("ABORTED", "COMPENSATED", "REVERT") if steps_done else ("ABORTED", "STEP_DENIED", None)
    assert end == parent(run(world.kernel, world, Script(compensation=REVERT)))
    assert steps_done == len(world.rail.paid())


def test_a_saga_that_cannot_be_read_keeps_no_other_from_recovery(folder: Path):
    world = World(folder, terms=terms())
    script = Script()

    def stopped(packet: DecisionPacket) -> bytes:
        if script.asked:
            script.asked.clear()
            raise KeyboardInterrupt
        return script(packet)

    for event in ("C1", "C2"):
        with pytest.raises(KeyboardInterrupt):
            run(world.kernel, world, stopped, event=event)
    world.clock.advance(2 * LEASE_MS + 1)
    damaged, sound = (
        dfid for (dfid,) in world.store.rows("SELECT dfid FROM events WHERE event_id IN ('C1', 'C2') ORDER BY event_id")
    )
    alone(world.store, "UPDATE sagas SET steps = 'x' WHERE dfid = ?", (damaged,))
    found = recovery.recover(world.kernel, now_ms=world.clock())
    assert (0, 1) == (found.sagas_ended, found.sagas_dirty)
    (told,) = found.errors
    assert told.startswith(f"{damaged}: JSONDecodeError: ")
    phases = dict(world.store.rows("SELECT dfid, phase FROM sagas"))
    assert ("STEPS", "DIRTY") == (phases[damaged], phases[sound])
    world.close()


def test_without_recovery_the_same_event_takes_the_saga_up_where_it_stands(world: World):
    with pytest.raises(KeyboardInterrupt):
        run(world.kernel, world, interrupted_after(world, 1))
    world.clock.advance(LEASE_MS)
    script = Script()
    assert ("CLOSED", None, None) == parent(run(world.kernel, world, script))
    assert ["2"] == script.asked


def test_a_step_that_is_a_humans_takes_its_saga_with_it_though_the_saga_itself_may_begin_afresh(world: World):
    """Begun afresh, the saga would be carried out beside a case that waits for a human."""
    for _ in range(world.contract.retry.restarts_max + 1):
        with pytest.raises(KeyboardInterrupt):
            run(world.kernel, world, interrupted_after(world, 0))
        world.clock.advance(LEASE_MS)
    script = Script()
    found = run(world.kernel, world, script)
    assert ("ESCALATED", "INTERRUPTED", None) == parent(found)
    assert ([], []) == (script.asked, world.rail.paid())
    assert "ESCALATED" == (found.steps[0] and found.steps[0].state)
    assert [0] == world.column("SELECT restarts FROM decision_flows WHERE dfid = ?", found.answer.dfid)


@pytest.mark.parametrize("step_ms", [20_000, 30_000])
def test_recovery_beside_a_driver_leaves_its_saga_alone_however_many_steps_it_has(world: World, step_ms: int):
    """Each step takes its time to decide and the rail its own; recovery comes while it is at work and in the pause."""
    world.tickets.put("T1", mood="angry")
    other, script, seen = world.open_kernel(world.open_store()), Script(), []
    pay = world.rail.dispatch

    def come_by() -> None:
        seen.append(recovery.recover(other, now_ms=world.clock()))

    def slow(packet: DecisionPacket) -> bytes:
        world.clock.advance(step_ms)
        come_by()
        return script(packet)

    def dispatch(intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        world.clock.advance(world.contract.budget.dispatch_ms_max)
        return pay(intent, key, deadline_s)

    def pause(event: str, _facts: object) -> None:
        if event == "flow.decided":
            world.clock.advance(1)
            come_by()

    world.rail.dispatch = dispatch  # type: ignore[method-assign]
    found = run(world.open_kernel(log=pause), world, slow, "ALL")
    assert ("CLOSED", None, None) == parent(found)
    assert [Recovered(leased=2), Recovered(leased=1)] * 3 == seen


def test_a_saga_whose_driver_died_between_two_steps_is_left_alone_until_it_must_be_gone(world: World):
    def dies(event: str, _facts: object) -> None:
        if event == "flow.decided":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(world.open_kernel(log=dies), world, Script())
    world.clock.advance(LEASE_MS)
    assert Recovered(leased=1) == recovery.recover(world.kernel, now_ms=world.clock())
    world.clock.advance(LEASE_MS)
    assert Recovered(sagas_dirty=1) == recovery.recover(world.kernel, now_ms=world.clock())


def test_no_step_begins_once_a_saga_is_dirty_whoever_was_late(world: World):
    """A driver that slept through its lease and a recovery finds its step refused in the claiming transaction."""

    def late(packet: DecisionPacket) -> bytes:
        if packet.event_id.endswith("/2"):
            world.clock.advance(2 * LEASE_MS)
            recovery.recover(world.open_kernel(), now_ms=world.clock())
        return script(packet)

    script = Script(compensation=REVERT)
    found = run(world.kernel, world, late)
    assert ("ABORTED", "COMPENSATED", "REVERT") == parent(found)
    assert ["REFUND_TICKET"] == [kind for _, _, kind, _ in world.rail.paid()]


def test_an_unknown_step_of_an_ended_saga_is_voided_by_recovery_never_sent_again(world: World):
    script = Script(step_2=lambda packet: with_misfortune(world, "drop", most(packet)), compensation=ALERT_HUMAN)
    found = run(world.kernel, world, script)
    assert ["SUCCESS", "UNKNOWN"] == executions(found)
    assert (0, 1) == ((done := recovery.recover(world.kernel, now_ms=world.clock())).success, done.failed)
    assert 1 == len(world.rail.paid())


def test_no_reversal_is_begun_or_sent_again_once_the_saga_has_ended(world: World):
    world.tickets.put("T1", mood="angry")
    world.rail.misfortunes, world.rail.blind = ["pay", "pay", "refuse", "drop"], True
    found = run(world.kernel, world, Script(compensation=REVERT), "ALL")
    assert ("ESCALATED", DIRTY, "REVERT") == parent(found)
    world.rail.blind = False
    first, second, _ = (step.dfid for step in found.steps if step)
    late = [reverse(world.kernel, found.answer.dfid, dfid, now_ms=world.clock()) for dfid in (second, first)]
    assert [saga.MOVED_ON] * 2 == late
    assert [("UNKNOWN",)] == world.store.rows("SELECT status FROM saga_reversals")
    assert [] == reversed_at(world.folder)


def test_a_reversal_that_cannot_be_settled_keeps_no_other_from_being_looked_up(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    for event in ("C1", "C2"):
        world.rail.misfortunes, world.rail.blind = ["pay", "refuse", "lose"], True
        run(world.kernel, world, Script(compensation=REVERT), event=event)
    world.rail.blind = False
    assert [("UNKNOWN",)] * 2 == world.store.rows("SELECT status FROM saga_reversals")
    by_event = (
        "SELECT dfid FROM saga_reversals NATURAL JOIN (SELECT dfid, event_id FROM decision_flows) f ORDER BY event_id"
    )
    first, second = (dfid for (dfid,) in world.store.rows(by_event))
    settle = compensation.settle

    def failing(kernel: Kernel, parent: str, order: ExecutionIntent, receipt: Receipt, now_ms: int) -> str:
        if order.dfid == first:
            raise ArithmeticError("of a kind nobody foresaw")
        return settle(kernel, parent, order, receipt, now_ms)

    monkeypatch.setattr(compensation, "settle", failing)
    (told,) = recovery.recover(world.kernel, now_ms=world.clock()).errors
    assert told.startswith(f"{first}: ArithmeticError: ")
    statuses = dict(world.store.rows("SELECT dfid, status FROM saga_reversals"))
    assert "UNKNOWN" == statuses[first] != statuses[second]
