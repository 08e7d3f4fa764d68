"""Many who ask for one event wait for one decision, and nobody else waits for them."""

from __future__ import annotations

import threading
import time
from itertools import product

import pytest

from sds.engines.protocol import Cancels
from sds.kernel.errors import EventError, UsageError, WorldError
from sds.kernel.flow.states import Answer
from sds.kernel.operations.recovery import Recovered
from tests.attack.testbed import Testbed
from tests.kernel.durable import together
from tests.submission.parts import PATIENCE_S, Thinking, flows, write_locks


def test_forty_duplicates_of_a_running_event_do_not_hold_up_an_unrelated_one(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking) as gate:
        first = gate.submit(bed.event(0))
        thinking.wait_until_begun()
        duplicates = [gate.submit(bed.event(0)) for _ in range(40)]
        assert "SUCCESS" == gate.submit(bed.event(1)).result(PATIENCE_S).execution
        assert not any(each.future.done() for each in (first, *duplicates))
        assert (0, 1) == (gate.queued, gate.deciding)
        thinking.done.set()
        assert [first.result(PATIENCE_S)] * 40 == [each.result(PATIENCE_S) for each in duplicates]
        assert ["E0", "E1"] == thinking.asked


def test_duplicates_in_threads_of_their_callers_share_one_decision_too(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking) as gate:
        running = threading.Thread(target=gate.decide, args=(bed.event(0),))
        running.start()
        thinking.wait_until_begun()
        with write_locks(gate) as taken:
            answers: list[object] = []
            waiting = threading.Thread(
                target=lambda: answers.extend(together(40, lambda _: gate.decide(bed.event(0)))), daemon=True
            )
            waiting.start()
            time.sleep(0.1)
            assert [] == taken
            assert "SUCCESS" == gate.decide(bed.event(1)).execution
            thinking.done.set()
            waiting.join(PATIENCE_S)
        running.join()
        assert 1 == len({answer.dfid for answer in answers if isinstance(answer, Answer)})
        assert 40 == len(answers)


def test_what_is_decided_is_answered_by_reading_alone(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking) as gate:
        answer = gate.decide(bed.event(1))
        with write_locks(gate) as taken:
            assert answer == gate.decide(bed.event(1)) == gate.submit(bed.event(1)).result() == gate.known(bed.event(1))
            assert [] == taken


def test_an_event_that_another_process_decides_is_waited_for_by_reading_alone(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking) as other, bed.gate() as gate:  # as two processes: each with a connection of its own
        running = other.submit(bed.event(0))
        thinking.wait_until_begun()
        known = gate.known(bed.event(0))
        assert known is not None
        assert known.pending
        with write_locks(gate) as taken:
            handles = [gate.submit(bed.event(0)) for _ in range(10)]
            time.sleep(0.1)
            assert [] == taken
            thinking.done.set()
            assert [running.result(PATIENCE_S)] * 10 == [each.result(PATIENCE_S) for each in handles]
            assert [] == taken


def test_known_says_nothing_of_what_was_never_seen_or_may_be_decided_afresh(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking) as gate:
        assert None is gate.known(bed.event(0))
        handle = gate.submit(bed.event(0))
        thinking.wait_until_begun()
        assert handle.cancel()
        assert [("ABORTED", "NOT_DECIDED")] == flows(gate)
        assert None is gate.known(bed.event(0))
        gate.decide(bed.event(1))
        with pytest.raises(EventError, match="was seen with another body") as refused:
            gate.known(bed.event(1, text="please pay 9"))
        assert ("EVENT_CONFLICT", False) == (refused.value.reason_code, refused.value.retryable)


def test_what_else_is_done_at_a_gate_is_no_decision_under_way(
    bed: Testbed, thinking: Thinking, monkeypatch: pytest.MonkeyPatch
):
    counted = list[int]()

    def looked(*_: object, **__: object) -> Recovered:
        counted.append(gate.deciding)
        return Recovered()

    monkeypatch.setattr("sds.kernel.operations.recovery.recover", looked)
    with bed.gate(engine=thinking) as gate:
        gate.recover()
        with gate.acting():
            counted.append(gate.deciding)
        handle = gate.submit(bed.event(0))
        thinking.wait_until_begun()
        gate.recover()
        assert [0, 0, 1] == counted
        assert handle.cancel()
        thinking.done.set()
        retried = threading.Thread(target=gate.retry, args=(gate.store.value("SELECT dfid FROM decision_flows"),))
        thinking.done.clear()
        retried.start()
        thinking.wait_until_begun()
        assert 1 == gate.deciding
        thinking.done.set()
        retried.join(PATIENCE_S)
        assert 0 == gate.deciding


def test_an_event_with_another_body_does_not_share_the_decision_of_the_one_that_runs(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking) as gate:
        first = gate.submit(bed.event(0))
        thinking.wait_until_begun()
        with pytest.raises(EventError, match="was seen with another body"):
            gate.submit(bed.event(0, text="please pay 9")).result(PATIENCE_S)
        thinking.done.set()
        assert "SUCCESS" == first.result(PATIENCE_S).execution


def test_only_so_many_decide_at_once_and_only_so_many_wait(bed: Testbed):
    thinking = Thinking(*(f"E{number}" for number in range(50)))
    with bed.gate(engine=thinking, threads=2, queue_max=3) as gate:
        handles = [gate.submit(bed.event(number)) for number in range(2)]
        thinking.wait_until_begun(2)
        handles += [gate.submit(bed.event(number)) for number in range(2, 5)]
        assert (3, 2) == (gate.queued, gate.deciding)
        with pytest.raises(WorldError, match="3 events are already waiting") as full:
            gate.submit(bed.event(5))
        assert ("QUEUE_FULL", True) == (full.value.reason_code, full.value.retryable)
        assert not gate.submit(bed.event(3)).future.done()  # it waits already, and takes no other place
        thinking.done.set()
        assert ["SUCCESS"] * 5 == [each.result(PATIENCE_S).execution for each in handles]
        assert (0, 0) == (gate.queued, gate.deciding)


def test_what_an_engine_does_at_once_and_two_more_decide_and_the_threads_are_as_few_as_are_needed(bed: Testbed):
    thinking = Thinking(*(f"E{number}" for number in range(50)))
    thinking.slots = 3  # type: ignore[attr-defined]
    with bed.gate(engine=thinking) as gate:
        before = threading.active_count()
        assert "SUCCESS" == gate.submit(bed.event(50, account="A1")).result(PATIENCE_S).execution
        assert before + 1 == threading.active_count()
        handles = [gate.submit(bed.event(number)) for number in range(10)]
        thinking.wait_until_begun(5)
        assert (5, 5) == (gate.queued, gate.deciding)
        thinking.done.set()
        assert ["SUCCESS"] * 10 == [each.result(PATIENCE_S).execution for each in handles]


def test_a_handle_waits_only_as_long_as_it_is_asked_to(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking) as gate:
        handle = gate.submit(bed.event(0))
        with pytest.raises(WorldError, match="event `E0` is still being decided") as late:
            handle.result(0.01)
        assert ("FLOW_IN_PROGRESS", True) == (late.value.reason_code, late.value.retryable)
        thinking.done.set()
        assert "SUCCESS" == handle.result(PATIENCE_S).execution


def test_what_is_no_event_is_refused_where_it_is_submitted(bed: Testbed, thinking: Thinking):
    with bed.gate(engine=thinking) as gate:
        with pytest.raises(EventError, match="the event has no text `account`"):
            gate.submit({"id": "E1"})
        for ask, deadline in product((gate.submit, gate.decide), (0, -1, 20_001, True, 1.5, "100")):
            with pytest.raises(UsageError, match="is not a valid deadline") as refused:
                ask(bed.event(1), deadline_ms=deadline)  # type: ignore[arg-type]
            assert "DEADLINE_INVALID" == refused.value.reason_code
        assert [] == flows(gate)


def test_what_is_raised_between_reasoning_and_the_order_reaches_all_who_wait(bed: Testbed, thinking: Thinking):
    def fail(packet: object, data: object) -> None:
        raise RuntimeError("the world ended")

    with bed.gate(engine=thinking, on_reasoned=fail) as gate:
        handles = [gate.submit(bed.event(0)) for _ in range(3)]
        thinking.done.set()
        for handle in handles:
            with pytest.raises(RuntimeError, match="the world ended"):
                handle.result(PATIENCE_S)
        assert 0 == gate.deciding


def test_a_teller_cancels_nothing_and_need_not():
    assert not isinstance(Thinking(), Cancels)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_for_want_of_memory_is_replaced(bed: Testbed, monkeypatch: pytest.MonkeyPatch):
    """Python takes memory to wait."""

    def none_left(*_: object) -> None:
        raise MemoryError

    with bed.gate() as gate:
        with monkeypatch.context() as full:
            full.setattr(gate._submissions._changed, "wait", none_left)
            assert "SUCCESS" == gate.submit(bed.event(1)).result(PATIENCE_S).execution
            for thread in gate._submissions._threads:
                thread.join(PATIENCE_S)
        assert "SUCCESS" == gate.submit(bed.event(2)).result(PATIENCE_S).execution
