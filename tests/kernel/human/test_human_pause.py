"""An agent that waits for a human (contract: `pauses_agent`) goes on when its own case is resolved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.human.cases import Decision
from sds.kernel.registry import registry
from tests.kernel.authority import halt, status
from tests.kernel.durable import World, contract, escalate, refund
from tests.kernel.humans import escalated, resolve
from tests.kernel.sagas import Script, most, run, terms


@pytest.mark.parametrize("decision", ["OVERRIDE", "ABORT"])
def test_an_agent_that_waits_for_its_case_goes_on_when_it_is_resolved(world: World, decision: Decision):
    dfid = escalated(world, refund())
    registry.transition(world.store, "claims-agent", "ESCALATED", by="runtime", reason=dfid, now_ms=world.clock())
    resolve(world, dfid, decision)
    assert "ACTIVE" == status(world)
    (body,) = world.column("SELECT body FROM ledger WHERE kind = 'AGENT' ORDER BY idx DESC LIMIT 1")
    assert ("operator", "ada", f"{decision} of {dfid}: looked into it") == tuple(
        json.loads(str(body))[name] for name in ("by", "who", "reason")
    )
    assert () == verify.verify(world.store).faults


def test_an_agent_goes_on_only_when_the_case_it_waits_for_is_resolved(folder: Path):
    pauses = ("escalation: {per_hour: 1000000}", "escalation: {per_hour: 9, pauses_agent: true}")
    world = World(folder, terms=contract(pauses))
    halt(world)
    earlier = escalated(world, name="C1")
    halt(world, halted=False)
    waited_for = escalated(world, name="C2")
    resolve(world, earlier, "ABORT")
    assert "ESCALATED" == status(world)
    resolve(world, waited_for, "ABORT")
    assert "ACTIVE" == status(world)
    assert () == verify.verify(world.store).faults
    world.close()


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("name", ["step", "saga"])
def test_an_agent_that_waits_for_a_step_goes_on_when_that_or_its_saga_is_resolved(
    folder: Path, name: str, restarted: bool
):
    pauses = ("escalation: {per_hour: 1000000}", "escalation: {per_hour: 9, pauses_agent: true}")
    world = World(folder, terms=terms(pauses))

    def drift(packet: DecisionPacket) -> bytes:
        world.tickets.put("T1", mood="angry")
        script.said["1"] = escalate
        return most(packet)

    script = Script(step_1=drift if restarted else escalate)
    found = run(world.kernel, world, script)
    assert (["1", "1"] if restarted else ["1"]) == script.asked
    (step, _), parent = found.steps, found.answer
    assert step is not None
    assert ("ESCALATED", "ESCALATED", "ESCALATED") == (step.state, parent.state, status(world))
    resolve(world, {"step": step, "saga": parent}[name].dfid, "ABORT")
    assert "ACTIVE" == status(world)
    world.close()
