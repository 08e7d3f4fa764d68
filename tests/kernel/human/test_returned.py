"""A case that a human returns to the agent: nothing is carried out, and its event, sent again, is decided afresh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import UsageError
from sds.kernel.executor.statement import Difference
from sds.kernel.flow import undecided
from sds.kernel.flow.states import NOT_DECIDED, Answer
from sds.kernel.human.statement_cases import open_cases
from tests.kernel.authority import halt, status
from tests.kernel.durable import World, contract, escalate
from tests.kernel.humans import desk, escalated, refused, resolve
from tests.kernel.sagas import Script, run, terms


def test_a_returned_case_is_recorded_with_who_and_why_and_waits_for_its_event(world: World):
    dfid = escalated(world)
    answer = resolve(world, dfid, "RETURN", acknowledged=False)
    assert ("ABORTED", NOT_DECIDED, "RETURN", "ada", True) == (
        answer.state,
        answer.tag,
        answer.resolution,
        answer.resolved_by,
        answer.retryable,
    )
    (body,) = (json.loads(str(body)) for body in world.column("SELECT body FROM ledger WHERE kind = 'HUMAN'"))
    assert ("RETURN", "ada", "looked into it", "ABORTED") == tuple(
        body[name] for name in ("decision", "who", "reason", "state")
    )
    assert ([], []) == (desk(world).waiting(), world.rail.sent)
    undecided.refuse_unless_undecided(world.store, dfid)
    assert () == verify.verify(world.store).faults


def test_the_event_of_a_returned_case_gets_a_fresh_flow_however_often_it_is_returned(world: World):
    dfids = [escalated(world)]
    for _ in range(2 + world.contract.retry.restarts_max):
        resolve(world, dfids[-1], "RETURN")
        again = world.kernel.open(world.event())
        assert isinstance(again, DecisionPacket)
        answer = world.kernel.decide(again, escalate(again), Decoding())
        assert ("ESCALATED", dfids[-1]) == (answer.state, answer.parent_dfid)
        dfids.append(answer.dfid)
    assert len(dfids) == len(set(dfids))
    assert [dfids[-1]] == [case.dfid for case in desk(world).waiting()]
    assert () == verify.verify(world.store).faults


def test_a_returned_case_is_resolved_once(world: World):
    dfid = escalated(world)
    resolve(world, dfid, "RETURN")
    for decision in ("RETURN", "ABORT"):
        with pytest.raises(UsageError, match="is resolved already: RETURN by ada"):
            resolve(world, dfid, decision, who="bob")  # type: ignore[arg-type]  # one by one


def test_while_everything_is_halted_a_case_can_be_returned(world: World):
    dfid = escalated(world)
    halt(world)
    assert "RETURN" == resolve(world, dfid, "RETURN").resolution


def test_what_no_agent_can_decide_by_itself_is_not_returned(world: World):
    differs = Difference("AMOUNT_DIFFERS", "k" * 64, "", "T1", "paid 40.00", "paid 50.00")
    (dfid,) = open_cases(world.store, world.contract, [differs], now_ms=world.clock())
    assert "a difference cannot be returned to the agent" == str(refused(world, dfid, "RETURN"))


def test_a_saga_is_not_returned(folder: Path):
    world = World(folder, terms=terms())
    parent = run(world.kernel, world, Script(step_1=escalate)).answer
    assert isinstance(parent, Answer)
    assert "ESCALATED" == parent.state
    assert "a part of a saga cannot be returned to the agent" == str(refused(world, parent.dfid, "RETURN"))
    world.close()


def test_an_agent_that_waits_for_its_case_goes_on_when_it_is_returned(folder: Path):
    pauses = ("escalation: {per_hour: 1000000}", "escalation: {per_hour: 9, pauses_agent: true}")
    world = World(folder, terms=contract(pauses))
    dfid = escalated(world)
    assert "ESCALATED" == status(world)
    resolve(world, dfid, "RETURN")
    assert "ACTIVE" == status(world)
    assert () == verify.verify(world.store).faults
    world.close()
