"""Letting go of a decision: before it is committed it ends undecided, uncharged, and nothing is cut off after that."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sds.gate import Gate
from sds.kernel.audit import verify
from sds.kernel.errors import WorldError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.flow.states import Answer
from sds.kernel.registry.registry import agents
from tests.attack.outside import Bank
from tests.attack.testbed import Testbed
from tests.submission.parts import PATIENCE_S, Thinking, flows


def test_what_the_engine_thinks_about_ends_at_once_uncharged_and_is_decided_when_it_comes_again(
    bed: Testbed, thinking: Thinking
):
    with bed.gate(engine=thinking) as gate:
        handle = gate.submit(bed.event(0))
        thinking.wait_until_begun()
        assert handle.cancel()
        answer = handle.result(0)
        assert ("ABORTED", "NOT_DECIDED", "CANCELLED", True) == (
            answer.state,
            answer.tag,
            answer.reason_code,
            answer.retryable,
        )
        assert ([], "ACTIVE") == (gate.escalations(), agents(gate.store)[0].status)
        assert not handle.cancel()
        thinking.done.set()
        assert "SUCCESS" == gate.decide(bed.event(0)).execution
        assert 1 == len(bed.bank.paid())
        assert () == verify.verify(gate.store).faults


def test_of_what_still_waits_for_a_thread_nothing_is_recorded(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking, threads=1) as gate:
        running = gate.submit(bed.event(0))
        thinking.wait_until_begun()
        waiting = gate.submit(bed.event(1))
        assert (1, True, 0) == (gate.queued, waiting.cancel(), gate.queued)
        with pytest.raises(WorldError, match="the decision was cancelled") as cancelled:
            waiting.result(PATIENCE_S)
        assert ("CANCELLED", True) == (cancelled.value.reason_code, cancelled.value.retryable)
        thinking.done.set()
        assert "SUCCESS" == running.result(PATIENCE_S).execution
        assert [("CLOSED", None)] == flows(gate)


def test_one_of_two_who_wait_cannot_end_it_for_the_other(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking) as gate:
        first, second = gate.submit(bed.event(0)), gate.submit(bed.event(0))
        thinking.wait_until_begun()
        assert not first.cancel()
        assert not second.future.done()
        assert second.cancel()
        assert "CANCELLED" == second.result(0).reason_code == first.result(0).reason_code


def test_who_decides_in_a_thread_of_their_own_is_not_ended_by_others(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking) as gate:
        deciding = threading.Thread(target=gate.decide, args=(bed.event(0),))
        deciding.start()
        thinking.wait_until_begun()
        assert not gate.submit(bed.event(0)).cancel()
        thinking.done.set()
        deciding.join()
        assert [("CLOSED", None)] == flows(gate)


class SlowBank(Bank):
    """A bank that takes an order and answers when it is told to."""

    def __init__(self, bed: Testbed) -> None:
        super().__init__(bed.folder / "bank.db", bed.clock)
        self.asked, self.answer = threading.Event(), threading.Event()

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self.asked.set()
        self.answer.wait(PATIENCE_S)
        return super().dispatch(intent, key, deadline_s)


def test_what_is_ordered_is_carried_out_to_its_end(bed: Testbed):
    bank = SlowBank(bed)
    with bed.gate(executor=bank) as gate:
        handle = gate.submit(bed.event(0))
        assert bank.asked.wait(PATIENCE_S)
        assert not handle.cancel()
        bank.answer.set()
        assert "SUCCESS" == handle.result(PATIENCE_S).execution
        assert 1 == len(bank.paid())


def test_a_task_that_is_cancelled_lets_go_of_its_decision_alone(bed: Testbed, thinking: Thinking):
    async def ask(gate: Gate, number: int) -> Answer:
        return await asyncio.wrap_future(gate.submit(bed.event(number)).future)

    async def both(gate: Gate) -> str | None:
        given_up, patient = asyncio.create_task(ask(gate, 0)), asyncio.create_task(ask(gate, 0))
        await asyncio.to_thread(thinking.wait_until_begun)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        thinking.done.set()
        return (await patient).execution

    async def alone(gate: Gate) -> None:
        task = asyncio.create_task(ask(gate, 0))
        await asyncio.to_thread(thinking.wait_until_begun)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with bed.gate(engine=thinking) as gate:
        asyncio.run(alone(gate))
        assert [("ABORTED", "NOT_DECIDED")] == flows(gate)
        assert "SUCCESS" == asyncio.run(both(gate))
