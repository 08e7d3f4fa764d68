"""A saga's deadline: kept with its flow; past it no step is sent, and what was done by then is taken back all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sds.kernel.contract.schema import parse_contract
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import UsageError
from sds.kernel.saga.state import SagaAnswer
from sds.pipeline import Stream
from sds.sagas import SagaStream
from tests.attack.testbed import CONTRACT, Testbed
from tests.kernel.durable import World, whole
from tests.kernel.sagas import DIRTY, REVERT, Script, executions, most, parent, reversed_at, terms
from tests.proposers import Says

SOON_MS = 1_000
DEADLINE = "SELECT deadline_ms FROM flow_deadlines WHERE dfid = ?"
Late = Callable[[DecisionPacket], bytes]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with whole(World(tmp_path, terms=terms())) as made:
        yield made


def decided(world: World, script: Script, name: str = "BOTH") -> SagaAnswer:
    def sleep(seconds: float) -> None:
        world.clock.advance(round(seconds * 1000))

    sagas = SagaStream(
        world.kernel, lambda kernel: Stream(kernel, Says(script), now_ms=world.clock, sleep=sleep), now_ms=world.clock
    )
    return sagas.decide(name, world.event(), deadline_ms=world.clock() + SOON_MS)


def late(world: World) -> Late:
    """Propose only once the deadline has passed."""

    def propose(packet: DecisionPacket) -> bytes:
        data = most(packet)
        world.clock.advance(SOON_MS + 1)
        return data

    return propose


def test_a_saga_that_is_done_in_time_is_closed_and_its_deadline_is_that_of_each_step(world: World) -> None:
    found = decided(world, Script())
    assert ("CLOSED", None, None) == parent(found)
    dfids = [found.answer.dfid, *(step.dfid for step in found.steps if step)]
    assert [world.clock() + SOON_MS] * 3 == [world.store.value(DEADLINE, (dfid,)) for dfid in dfids]


def test_a_first_step_that_is_late_leaves_nothing_and_the_event_may_be_sent_again(world: World) -> None:
    found = decided(world, Script(step_1=late(world)))
    assert ("ABORTED", "NOT_DECIDED", None) == parent(found)
    assert (True, []) == (found.answer.retryable, world.rail.sent)
    assert ("CLOSED", None, None) == parent(decided(world, Script()))


def test_no_step_is_sent_after_the_deadline_and_what_was_done_is_taken_back(world: World) -> None:
    script = Script(step_2=late(world), compensation=REVERT)
    found = decided(world, script, "ALL")
    assert ("ABORTED", "COMPENSATED", "REVERT") == parent(found)
    assert ["SUCCESS", None, None] == executions(found)
    assert (1, ["1", "2", "compensation"]) == (len(world.rail.paid()), script.asked)
    assert 1 == len(reversed_at(world.folder))
    assert found.chosen is not None
    assert None is world.store.value(DEADLINE, (found.chosen.dfid,))


def test_a_step_whose_turn_comes_after_the_deadline_is_not_even_asked_about(world: World) -> None:
    sent = world.rail.dispatch

    def slow(*given: object) -> object:
        receipt = sent(*given)  # type: ignore[arg-type]
        world.clock.advance(SOON_MS + 1)
        return receipt

    world.rail.dispatch = slow  # type: ignore[method-assign, assignment]
    script = Script(compensation=REVERT)
    found = decided(world, script)
    assert ("ABORTED", "COMPENSATED", "REVERT") == parent(found)
    assert (["1", "compensation"], [None]) == (script.asked, executions(found)[1:])
    dirty = "SELECT body ->> '$.reason_code' FROM ledger WHERE kind = 'SAGA' AND body ->> '$.phase' = 'DIRTY'"
    assert ["DEADLINE_EXCEEDED"] == world.column(dirty)


def test_without_an_undoing_what_was_done_by_the_deadline_is_a_humans(world: World) -> None:
    found = decided(world, Script(step_2=late(world)), "NO_UNDOING")
    assert ("ESCALATED", DIRTY, "ALERT_HUMAN") == parent(found)


def test_a_deadline_is_at_most_what_the_contract_gives_all_steps(tmp_path: Path) -> None:
    sagas = "sagas:\n  TWICE: {steps: [PAY, EXTRA], compensation: [ALERT_HUMAN]}\n"
    extra = "  EXTRA:\n    params: {amount: {lo: 1, hi: account.balance_minor, scale: 2}}\n    spends: amount\n    reasons: [OWED]\n"
    text = CONTRACT.replace("  DENY: {", f"{extra}  DENY: {{").replace("[PAY, DENY]", "[PAY, EXTRA, DENY]") + sagas
    bed = Testbed(tmp_path, terms=parse_contract(text.replace("TTL", "20000").replace("DISPATCH", "5000")))
    bed.open_accounts(range(1))
    with bed.gate() as gate:
        with pytest.raises(UsageError, match="`40001` is not a valid deadline") as refused:
            gate.decide_saga("TWICE", bed.event(0), deadline_ms=40_001)
        assert "give a whole number from 1 to 40000, the contract's `budget.ttl_ms` 2 times" == refused.value.hint
        with pytest.raises(UsageError, match="there is no saga `ONCE`"):
            gate.decide_saga("ONCE", bed.event(0), deadline_ms=1)
        found = gate.decide_saga("TWICE", bed.event(0), deadline_ms=40_000)
        assert 2 == len([step for step in found.steps if step and gate.store.value(DEADLINE, (step.dfid,))])
