"""What a dirty saga is taken back by, and what stops it: reversals, what turns out to have happened, a halt."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from types import ModuleType
from typing import Any

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import StoreError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.operations import recovery
from sds.kernel.saga import compensation, driver, state
from sds.kernel.storage.store import Generation
from tests.kernel.authority import halt, suspend
from tests.kernel.durable import (
    COMPENSATION_MINOR,
    Propose,
    World,
    counters,
    deny,
)
from tests.kernel.sagas import (
    ALERT_HUMAN,
    CLOSE_ALL,
    DIRTY,
    REFUND_MINOR,
    REVERT,
    Script,
    executions,
    most,
    parent,
    reversed_at,
    run,
    with_misfortune,
)
from tests.kernel.statements import listing


def test_a_step_nobody_knows_about_cannot_be_reverted_but_closing_all_voids_it(world: World):
    script = Script(step_2=lambda packet: with_misfortune(world, "drop", most(packet)), compensation=CLOSE_ALL)
    found = run(world.kernel, world, script)
    assert ("ALERT_HUMAN", "CLOSE_ALL") == script.packets[-1].envelope.names
    assert ("ABORTED", "COMPENSATED", "CLOSE_ALL") == parent(found)
    assert ["SUCCESS", "FAILED"] == executions(found)
    assert [("REFUND_TICKET", REFUND_MINOR)] == reversed_at(world.folder)
    voided = found.steps[1]
    assert voided is not None
    key = world.column("SELECT idempotency_key FROM execution_log WHERE dfid = ?", voided.dfid)[0]
    assert "rejected" == world.rail.lookup(str(key), 1.0).status


def test_closing_all_takes_back_what_turns_out_to_have_happened(world: World):
    def step_2(packet: DecisionPacket) -> bytes:
        world.rail.blind = True
        return with_misfortune(world, "lose", most(packet))

    def chosen(packet: DecisionPacket) -> bytes:
        world.rail.blind = False
        return CLOSE_ALL(packet)

    found = run(world.kernel, world, Script(step_2=step_2, compensation=chosen))
    assert ("ABORTED", "COMPENSATED", "CLOSE_ALL") == parent(found)
    assert [("COMPENSATE", COMPENSATION_MINOR), ("REFUND_TICKET", REFUND_MINOR)] == reversed_at(world.folder)


def test_closing_all_takes_nothing_back_while_a_step_stays_unknown(world: World):
    """What was done stays done beside a step that may have been: a human must see both."""

    def step_2(packet: DecisionPacket) -> bytes:
        world.rail.blind = True
        return with_misfortune(world, "lose", most(packet))

    found = run(world.kernel, world, Script(step_2=step_2, compensation=CLOSE_ALL))
    assert ("ESCALATED", DIRTY, "CLOSE_ALL") == parent(found)
    assert ["SUCCESS", "UNKNOWN"] == executions(found)
    assert ([], {}) == (reversed_at(world.folder), dict(found.reversals))


@pytest.mark.parametrize("misfortune", ["refuse", "drop"])
def test_a_reversal_that_is_not_done_leaves_the_saga_dirty_and_is_not_tried_again(world: World, misfortune: str):
    script = Script(step_2=deny, compensation=lambda packet: with_misfortune(world, misfortune, REVERT(packet)))
    found = run(world.kernel, world, script)
    assert ("ESCALATED", DIRTY, "REVERT") == parent(found)
    assert ["REFUSED" if misfortune == "refuse" else "UNKNOWN"] == list(found.reversals.values())
    assert found == run(world.kernel, world, script)
    assert [] == reversed_at(world.folder)


def test_a_reversal_whose_reply_was_lost_is_looked_up(world: World):
    script = Script(step_2=deny, compensation=lambda packet: with_misfortune(world, "lose", REVERT(packet)))
    assert ("ABORTED", "COMPENSATED", "REVERT") == parent(run(world.kernel, world, script))
    assert [("REFUND_TICKET", REFUND_MINOR)] == reversed_at(world.folder)


def test_a_reversal_nobody_knew_about_is_settled_by_recovery_and_the_human_keeps_the_case(world: World):
    def chosen(packet: DecisionPacket) -> bytes:
        world.rail.blind = True
        return with_misfortune(world, "lose", REVERT(packet))

    found = run(world.kernel, world, Script(step_2=deny, compensation=chosen))
    assert (["UNKNOWN"], 1) == (list(found.reversals.values()), len(reversed_at(world.folder)))
    world.rail.blind = False
    recovery.recover(world.kernel, now_ms=world.clock())
    later = run(world.kernel, world, Script())
    assert (["REVERTED"], ("ESCALATED", DIRTY, "REVERT")) == (list(later.reversals.values()), parent(later))
    assert {0} == {used for _, used in counters(world.store)}


@pytest.mark.sqlite_alone("what a standby lacks is imitated by a copy of the file")
def test_what_a_reversal_gives_back_is_given_back_once_though_the_record_lost_that_it_had_begun(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """A standby that lagged takes over while the outside undoes a step."""
    lagging = sqlite3.connect(":memory:", check_same_thread=False)
    begin, revert = compensation._begin, world.rail.revert

    def begun(*given: Any) -> None:
        with closing(sqlite3.connect(world.path)) as record:
            record.backup(lagging)
        begin(*given)

    def lost_meanwhile(key: str, deadline_s: float) -> Receipt:
        monkeypatch.undo()
        receipt = revert(key, deadline_s)
        with closing(sqlite3.connect(world.path)) as record, closing(lagging):
            lagging.backup(record)
        return receipt

    monkeypatch.setattr(compensation, "_begin", begun)
    monkeypatch.setattr(world.rail, "revert", lost_meanwhile)
    with pytest.raises(StoreError, match="is not in the record"):
        run(world.kernel, world, Script(step_2=deny, compensation=REVERT))
    assert () == verify.verify(world.store).faults
    found = run(world.kernel, world, Script())
    assert (("ABORTED", "COMPENSATED", "REVERT"), ["REVERTED"]) == (parent(found), list(found.reversals.values()))
    assert ({0}, 1) == ({used for _, used in counters(world.store)}, len(reversed_at(world.folder)))


@pytest.mark.parametrize("how", ["halt", "suspend"])
def test_a_stopped_agent_takes_no_next_step_and_a_human_is_alerted_without_asking_the_model(world: World, how: str):
    send = world.kernel.dispatcher.carry_out

    def carry_out(intent: ExecutionIntent, **how_long: Any) -> str:
        status = send(intent, **how_long)
        if how == "halt":
            halt(world)
        else:
            suspend(world)
        return status

    world.kernel.dispatcher.carry_out = carry_out  # type: ignore[method-assign]  # the moment between two steps
    script = Script()
    found = run(world.kernel, world, script)
    assert ("ESCALATED", DIRTY, "ALERT_HUMAN") == parent(found)
    assert ["1"] == script.asked
    assert [("REFUND_TICKET", REFUND_MINOR)] == [p[2:] for p in world.rail.paid()]


def test_a_saga_that_begins_under_a_halt_goes_to_a_human(world: World):
    halt(world)
    script = Script()
    assert ("ESCALATED", "HALTED", None) == parent(run(world.kernel, world, script))
    assert [] == script.asked


def test_a_halt_after_the_choice_stops_the_reversal(world: World):
    real = world.kernel.commit

    def commit(*given: object) -> ExecutionIntent | None:
        done = real(*given)  # type: ignore[arg-type]  # passed on as they came
        if given[0].event_id.endswith("compensation"):  # type: ignore[attr-defined]  # the packet
            halt(world)
        return done

    world.kernel.commit = commit  # type: ignore[method-assign]  # the moment between deciding and doing
    found = run(world.kernel, world, Script(step_2=deny, compensation=REVERT))
    assert ("ESCALATED", DIRTY, "REVERT") == parent(found)
    assert ([], {}) == (reversed_at(world.folder), dict(found.reversals))


@pytest.mark.parametrize(
    ("where", "move", "second", "chosen", "phase"),
    [
        (state, "close_steps", most, REVERT, "STEPS"),
        (state, "close_steps", deny, REVERT, "STEPS"),
        (driver, "carry_out", deny, REVERT, "DIRTY"),
        (driver, "alert", deny, ALERT_HUMAN, "DIRTY"),
    ],
)
def test_nothing_ends_or_is_undone_at_another_server_than_the_one_that_was_compared(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    where: ModuleType,
    move: str,
    second: Propose,
    chosen: Propose,
    phase: str,
):
    """It took over after the record was found whole: a step may be paid that it has not heard of."""
    listing(world)
    script, moved = Script(step_2=second, compensation=chosen), getattr(where, move)

    def replaced(*given: Any, **more: Any) -> Any:
        monkeypatch.setattr(type(world.store), "generation", Generation(1, "promoted", "00000002"))
        return moved(*given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(where, move, replaced)
        found = run(world.kernel, world, script)
    assert (phase, [], {}) == (found.phase, reversed_at(world.folder), dict(found.reversals))
    monkeypatch.undo()
    later = run(world.kernel, world, script)
    assert ("ENDED", chosen is REVERT and second is deny) == (later.phase, bool(reversed_at(world.folder)))
