"""Sagas: what a parent becomes for everything its steps may become, and what may be said when it is dirty."""

from __future__ import annotations

from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket, with_feedback
from sds.kernel.errors import EventError, UsageError
from sds.kernel.flow.intake import Event, read_event
from sds.kernel.saga import state as saga
from sds.kernel.saga.claim import claim as claim_saga
from sds.kernel.saga.state import SagaAnswer
from tests.kernel.authority import halt
from tests.kernel.durable import (
    COMPENSATION_MINOR,
    Propose,
    World,
    counters,
    deny,
    escalate,
    nonsense,
    refund,
    see_through,
    together,
)
from tests.kernel.outside import PaysOnly
from tests.kernel.sagas import (
    ALERT_HUMAN,
    DIRTY,
    REFUND_MINOR,
    REVERT,
    SAYS,
    Script,
    executions,
    most,
    parent,
    reversed_at,
    run,
    terms,
)
from tests.stores.records import alone

OUTCOME = "SELECT body ->> '$.outcome' FROM ledger WHERE dfid = ? AND kind = 'DECIDED'"


def test_a_saga_whose_steps_all_succeed_is_closed_and_each_step_is_a_child_of_its_own(world: World):
    found = run(world.kernel, world, Script())
    assert ("CLOSED", None, None) == parent(found)
    assert ["SUCCESS", "SUCCESS"] == executions(found)
    assert [("C1/1", found.answer.dfid), ("C1/2", found.answer.dfid)] == [
        (step.event_id, step.parent_dfid) for step in found.steps if step
    ]
    assert [("REFUND_TICKET", REFUND_MINOR), ("COMPENSATE", COMPENSATION_MINOR)] == [p[2:] for p in world.rail.paid()]
    assert ["ACCEPTED"] == world.column(OUTCOME, found.answer.dfid)
    kinds = ["SAGA", "DECIDED"]
    assert kinds == world.column("SELECT kind FROM ledger WHERE dfid = ? ORDER BY idx", found.answer.dfid)


@pytest.mark.parametrize(
    ("said", "misfortune", "state", "tag"),
    [
        ("deny", "", "ABORTED", "STEP_DENIED"),
        ("escalate", "", "ESCALATED", "ESCALATED_BY_AGENT"),
        ("nonsense", "", "ESCALATED", "REASONING_EXHAUSTION"),
        ("pay", "refuse", "ABORTED", "EXECUTION_FAILED"),
    ],
)
def test_when_the_first_step_comes_to_nothing_the_saga_ends_without_compensation(
    world: World, said: str, misfortune: str, state: str, tag: str
):
    world.rail.misfortunes = [misfortune] if misfortune else []
    script = Script(step_1=SAYS[said])
    found = run(world.kernel, world, script)
    assert (state, tag, None) == parent(found)
    assert [state] == world.column(OUTCOME, found.answer.dfid)
    assert {"1"} == set(script.asked)
    assert [] == world.rail.paid()


@pytest.mark.parametrize("said", ["deny", "escalate", "nonsense", "refused", "drift", "halted"])
def test_a_later_step_that_comes_to_nothing_leaves_the_saga_dirty_and_reverting_undoes_what_was_done(
    world: World, said: str
):
    def step_2(packet: DecisionPacket) -> bytes:
        if said == "refused":
            world.rail.misfortunes = ["refuse"]
        elif said == "drift":
            world.tickets.put("T1", mood="angry" if world.tickets.rows["T1"]["ticket.mood"] == "calm" else "calm")
        elif said == "halted":
            halt(world)
        return SAYS.get(said, most)(packet)

    script = Script(step_2=step_2, compensation=REVERT)
    found = run(world.kernel, world, script)
    if said == "halted":
        assert ("ESCALATED", DIRTY, "ALERT_HUMAN") == parent(found)
        assert "compensation" not in script.asked
        assert [] == reversed_at(world.folder)
        return
    assert ("ABORTED", "COMPENSATED", "REVERT") == parent(found)
    assert [("REFUND_TICKET", REFUND_MINOR)] == reversed_at(world.folder)
    assert 1 == script.asked.count("compensation")
    assert {0} == {used for _, used in counters(world.store)}
    phases = world.column("SELECT json_extract(body, '$.phase') FROM ledger WHERE kind = 'SAGA'")
    assert ["STEPS", "DIRTY"] == phases


def test_what_was_done_is_undone_latest_first(world: World):
    world.tickets.put("T1", mood="angry")
    found = run(world.kernel, world, Script(step_3=deny, compensation=REVERT), "ALL")
    assert ("ABORTED", "COMPENSATED", "REVERT") == parent(found)
    assert [("COMPENSATE", COMPENSATION_MINOR), ("REFUND_TICKET", REFUND_MINOR)] == reversed_at(world.folder)
    assert {"REVERTED"} == set(found.reversals.values())


def test_a_compensated_claim_may_be_decided_again_under_another_event(world: World):
    run(world.kernel, world, Script(step_2=deny, compensation=REVERT))
    again = world.decide(refund("200.00"), "C2")
    assert "SUCCESS" == again.execution


def test_an_alert_leaves_everything_as_it_stands_for_a_human(world: World):
    found = run(world.kernel, world, Script(step_2=deny, compensation=ALERT_HUMAN))
    assert ("ESCALATED", DIRTY, "ALERT_HUMAN") == parent(found)
    assert ["SUCCESS", None] == executions(found)
    assert [] == reversed_at(world.folder)
    assert [("tickets:T1#ticket.refundable_minor", REFUND_MINOR)] == [
        row for row in counters(world.store) if "#" in row[0] and row[1]
    ]


def test_the_menu_is_all_that_can_be_said_about_a_dirty_saga(world: World):
    script = Script(step_2=deny, compensation=REVERT)
    run(world.kernel, world, script)
    packet = script.packets[-1]
    assert ("ALERT_HUMAN", "CLOSE_ALL", "REVERT") == packet.envelope.names
    assert [()] * 3 == [kind.params for kind in packet.envelope.kinds]
    for says in (deny, escalate, refund(), nonsense):
        assert not packet.envelope.contains(says(packet))
    static, menu, steps = packet.texts
    assert static.startswith(world.contract.mission.strip())
    assert menu.endswith("\nPermitted: ALERT_HUMAN, CLOSE_ALL, REVERT\n")
    assert "step.1: REFUND_TICKET DONE\nstep.2: COMPENSATE NOTHING" == steps
    assert "please" not in "".join(packet.texts)


def test_what_of_a_menu_was_rejected_is_told_behind_the_menu_itself(world: World):
    script = Script(step_2=deny, compensation=REVERT)
    run(world.kernel, world, script)
    told = with_feedback(script.packets[-1], "Rejected before: ABORT")
    assert (*script.packets[-1].texts[:-1], "Rejected before: ABORT\n", script.packets[-1].texts[-1]) == told.texts


def test_a_later_step_is_told_what_was_done_before_what_recurs(world: World):
    script = Script()
    run(world.kernel, world, script)
    (first, second), case = script.packets, world.packet("another")
    assert "Permitted: DENY, ESCALATE, REFUND_TICKET" == first.texts[1].splitlines()[-1]
    due, *recurring = second.texts[1].splitlines()
    assert "Step 2 of 2 of BOTH: REFUND_TICKET was carried out; COMPENSATE is due." == due
    assert case.texts[1].splitlines()[:-1] == recurring[:-1] == first.texts[1].splitlines()[:-1]
    assert recurring[-1].startswith("Permitted: COMPENSATE")
    assert ["Claim: please"] * 2 == [first.texts[-1], second.texts[-1]]


@pytest.mark.parametrize(
    ("says", "outcome"),
    [(deny, "ESCALATED"), (escalate, "ESCALATED"), (refund("1.00"), "ESCALATED"), (nonsense, "REJECTED")],
)
def test_whatever_else_is_said_about_a_dirty_saga_alerts_a_human(world: World, says: Propose, outcome: str):
    """A proposal that is said again unchanged goes to a human by itself; what is none runs out of attempts."""
    found = run(world.kernel, world, Script(step_2=deny, compensation=says))
    assert ("ESCALATED", DIRTY, "ALERT_HUMAN") == parent(found)
    assert outcome == (found.chosen.outcome if found.chosen else None)
    assert [] == reversed_at(world.folder)


def test_what_cannot_be_carried_out_is_not_on_the_menu_and_nobody_is_asked_when_only_the_human_is_left(world: World):
    script = Script(step_2=deny, compensation=REVERT)
    found = run(world.open_kernel(executor=PaysOnly(world.rail)), world, script)
    assert ("ESCALATED", DIRTY, "ALERT_HUMAN") == parent(found)
    assert ["1", "2"] == script.asked


def test_a_contract_may_offer_less_than_the_whole_menu(world: World):
    script = Script(step_2=deny, compensation=REVERT)
    assert ("ESCALATED", DIRTY, "ALERT_HUMAN") == parent(run(world.kernel, world, script, "NO_UNDOING"))
    assert ["1", "2"] == script.asked


def test_the_same_event_again_returns_the_stored_outcome(world: World):
    first = run(world.kernel, world, Script(step_2=deny, compensation=REVERT))
    script = Script()
    assert first == run(world.kernel, world, script)
    assert [] == script.asked


def test_one_event_is_a_saga_or_a_decision_never_both(world: World):
    run(world.kernel, world, Script())
    with pytest.raises(EventError, match="event `C1` was seen with another body"):
        see_through(world.kernel, world.event("C1"), refund())
    with pytest.raises(EventError, match="event `C1` was seen with another body"):
        run(world.kernel, world, Script(), "ALL")
    world.decide(refund("1.00"), "C2")
    with pytest.raises(EventError, match="event `C2` was seen with another body"):
        run(world.kernel, world, Script(), event="C2")


def test_an_event_that_took_the_name_of_a_step_fails_the_step_and_is_not_taken_for_it(world: World):
    world.decide(refund("1.00"), "C1/2")
    found = run(world.kernel, world, Script(compensation=REVERT))
    assert (("ABORTED", "COMPENSATED", "REVERT"), None) == (parent(found), found.steps[1])
    assert [("REFUND_TICKET", "SUCCESS")] == [(s.action, s.execution) for s in found.steps if s]


def test_there_is_no_saga_by_another_name(world: World):
    with pytest.raises(UsageError, match="there is no saga `HALF`"):
        run(world.kernel, world, Script(), "HALF")


def test_a_kind_may_belong_to_a_saga_alone(folder: Path):
    world = World(folder, terms=terms(("[COMPENSATE, REFUND_TICKET, GOODWILL, DENY]", "[REFUND_TICKET, DENY]")))
    assert ("DENY", "ESCALATE", "REFUND_TICKET") == world.kernel.preview(world.event()).envelope.names
    script = Script()
    assert ("CLOSED", None, None) == parent(run(world.kernel, world, script))
    assert [("DENY", "ESCALATE", "REFUND_TICKET"), ("COMPENSATE", "DENY", "ESCALATE")] == [
        packet.envelope.names for packet in script.packets
    ]
    world.close()


def test_spend_limits_hold_across_the_steps(folder: Path):
    world = World(folder, terms=terms(("max_minor: 100000}", "max_minor: 30000}")))
    found = run(world.kernel, world, Script(compensation=REVERT))
    assert (["SUCCESS", None], ("ABORTED", "COMPENSATED", "REVERT")) == (executions(found), parent(found))
    assert {0} == {used for name, used in counters(world.store) if name.startswith("claims/")}
    world.close()


def test_callers_that_bring_the_same_saga_together_get_one_outcome(world: World):
    def one(_number: int) -> SagaAnswer:
        return run(world.open_kernel(world.open_store()), world, Script(step_2=deny, compensation=REVERT))

    found = together(4, one)
    assert [found[0]] * 4 == found
    assert (1, 1) == (len(world.rail.paid()), len(reversed_at(world.folder)))


@pytest.mark.parametrize(
    "tampering",
    [
        "UPDATE sagas SET phase = 'STEPS'",
        "UPDATE sagas SET compensation = 'ALERT_HUMAN'",
        "UPDATE sagas SET menu = '[]'",
        'UPDATE sagas SET steps = \'["GOODWILL","GOODWILL"]\'',
        "UPDATE saga_reversals SET status = 'REFUSED'",
        "UPDATE saga_reversals SET reference = 'REV-9'",
        "DELETE FROM saga_reversals",
        "UPDATE decision_flows SET tag = NULL WHERE parent_dfid IS NULL",
        "UPDATE reservations SET status = 'settled'",
        "UPDATE resources SET drawn = drawn + 1",
        "UPDATE spend_totals SET used = used + 1",
        "UPDATE decision_flows SET parent_dfid = NULL WHERE event_id LIKE '%/1'",
    ],
)
def test_the_record_of_a_saga_is_sealed(folder: Path, tampering: str):
    world = World(folder, terms=terms())
    run(world.kernel, world, Script(step_2=deny, compensation=REVERT))
    assert () == verify.verify(world.store).faults
    assert 0 < alone(world.store, tampering)
    assert () != verify.verify(world.store).faults
    world.close()


def test_a_flow_record_shows_a_parent_with_its_children_and_what_was_undone(world: World):
    found = run(world.kernel, world, Script(step_2=deny, compensation=REVERT))
    record = verify.flow_record(world.store, found.answer.dfid)
    assert record is not None
    assert ("BOTH", "ENDED", "REVERT") == tuple(record["saga"][n] for n in ("name", "phase", "compensation"))
    children = [found.steps[0], found.steps[1], found.chosen]
    assert [child.dfid for child in children if child] == [child["dfid"] for child in record["children"]]
    assert ["REVERTED"] == [reversal["status"] for reversal in record["reversals"]]


def test_the_children_of_a_saga_are_named_after_it():
    assert ("C1/1", "C1/compensation", "C1/r2/3") == (
        saga.child_id("C1", 1),
        saga.child_id("C1", saga.COMPENSATION),
        saga.child_id("C1/r2", 3),
    )


def test_an_event_from_outside_with_the_id_of_a_step_is_no_step_whatever_its_field_for_the_text_is_called(folder: Path):
    world = World(folder, terms=terms(("evidence: text", "evidence: adopted")))

    def event(name: str) -> Event:
        return read_event(world.contract, {"claim_id": name, "ticket_id": "T1", "adopted": "please"})

    assert "SUCCESS" == see_through(world.kernel, event("C1/1"), refund("1.00")).execution
    dfid = claim_saga(world.store, world.contract, "BOTH", event("C1"), now_ms=world.clock())
    assert ["NOT_BEGUN", "NOT_BEGUN"] == [step.became for step in saga.load(world.store, world.contract, dfid).steps]
    world.close()
