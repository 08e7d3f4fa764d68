"""A gate that is closed in the middle: what can finish does, the rest ends undecided, and nobody meets a closed record."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from sds.gate import Gate
from sds.host import paths
from sds.kernel.audit import verify
from sds.kernel.errors import SdsError, UsageError, WorldError
from sds.kernel.flow.states import Answer
from sds.kernel.storage.store import Row
from sds.submission import Handle
from tests.attack.testbed import Testbed
from tests.submission.parts import PATIENCE_S, Thinking, flows
from tests.submission.test_cancel import SlowBank


@pytest.fixture
def thinking() -> Iterator[Thinking]:
    made = Thinking("E0", "E1")
    yield made
    made.done.set()


def outcome(handle: Handle) -> str | None:
    """Return the reason of an answer, or of a refusal."""
    try:
        return handle.result(0).reason_code
    except WorldError as error:
        return error.reason_code


def submit_for_ever(gate: Gate, event: Mapping[str, object]) -> None:
    while True:
        gate.submit(event).cancel()
        time.sleep(0.001)


def begun(bed: Testbed, thinking: Thinking, **options: object) -> Gate:
    """Return a gate that decides E0, submitted, and E1, in a thread of its caller; E2 and E3 wait."""
    return bed.gate(engine=thinking, threads=1, **options)  # type: ignore[arg-type]


def test_what_finishes_while_the_gate_drains_is_decided(bed: Testbed, thinking: Thinking):
    gate = begun(bed, thinking)
    handles = [gate.submit(bed.event(number)) for number in range(3)]
    thinking.wait_until_begun()
    threading.Timer(0.1, thinking.done.set).start()
    gate.close(PATIENCE_S)
    assert ["SUCCESS"] * 3 == [each.result(0).execution for each in handles]


def test_what_does_not_finish_ends_undecided_in_whatever_thread_it_is(bed: Testbed, thinking: Thinking):
    gate = begun(bed, thinking)
    running = gate.submit(bed.event(0))
    with ThreadPoolExecutor(2) as callers:
        called = callers.submit(gate.decide, bed.event(1))
        thinking.wait_until_begun(2)
        shared = callers.submit(gate.decide, bed.event(1))
        waiting = [gate.submit(bed.event(2)), gate.submit(bed.event(3))]
        began_s = time.monotonic()
        gate.close()
        assert time.monotonic() - began_s < PATIENCE_S / 2
        for handle in waiting:
            with pytest.raises(WorldError, match="the gate is closing and accepts no new events") as drained:
                handle.result(0)
            assert ("DRAINING", True) == (drained.value.reason_code, drained.value.retryable)
        with pytest.raises(UsageError, match="the gate is closed"):
            gate.submit(bed.event(4))
        thinking.done.set()  # an engine that is not ours goes on for as long as it likes
        for answer in (running.result(0), called.result(PATIENCE_S), shared.result(PATIENCE_S)):
            assert ("NOT_DECIDED", "DRAINING", True) == (answer.tag, answer.reason_code, answer.retryable)
    with closing(paths.open_record(bed.own)) as store:
        rows = store.rows("SELECT event_id, state, tag FROM decision_flows ORDER BY event_id")
        assert [("E0", "ABORTED", "NOT_DECIDED"), ("E1", "ABORTED", "NOT_DECIDED")] == rows
        assert () == verify.verify(store).faults


def test_while_it_drains_nothing_new_is_taken(bed: Testbed, thinking: Thinking):
    gate = begun(bed, thinking)
    handle = gate.submit(bed.event(0))
    thinking.wait_until_begun()
    closer = threading.Thread(target=gate.close, args=(PATIENCE_S,))
    closer.start()
    with pytest.raises(WorldError, match="the gate is closing") as refused:
        submit_for_ever(gate, bed.event(5))
    assert "DRAINING" == refused.value.reason_code
    for ask in (gate.decide, gate.submit):
        with pytest.raises(WorldError, match="the gate is closing"):
            ask(bed.event(6))
    assert None is gate.known(bed.event(6))  # what is known can be read
    thinking.done.set()
    closer.join()
    assert "SUCCESS" == handle.result(0).execution


READERS: tuple[Callable[[Gate, dict[str, object]], object], ...] = (
    Gate.known,
    Gate.preview,
    lambda gate, _: gate.escalations(),
    lambda gate, event: gate.look(dfid_of(gate, event)),
    lambda gate, event: gate.retry(dfid_of(gate, event)),
)


@pytest.mark.parametrize("read", READERS)
def test_who_reads_while_the_gate_is_closed_reads_to_the_end_or_is_refused(
    bed: Testbed, thinking: Thinking, read: Callable[[Gate, dict[str, object]], object]
) -> None:
    gate, event = bed.gate(engine=thinking), bed.event(2)
    gate.decide(event)
    closer = threading.Thread(target=gate.close)
    rows = gate.store.rows

    def slow(sql: str, values: Row = ()) -> list[Row]:
        if threading.current_thread() is not closer:
            if not closer.ident:
                closer.start()
            closer.join(0.3)  # the time to close the record, were it not waited for
        return rows(sql, values)

    gate.store.rows = slow  # type: ignore[method-assign]
    try:
        read(gate, event)
    except WorldError as error:
        assert error.reason_code == "DRAINING"  # noqa: PT017
    except UsageError as error:
        assert "is CLOSED" in str(error) or "the gate is closed" in str(error)  # noqa: PT017
    closer.join(PATIENCE_S)
    with pytest.raises(UsageError, match="the gate is closed"):
        read(gate, event)


def dfid_of(gate: Gate, event: dict[str, object]) -> str:
    answer = gate.known(event)
    assert answer is not None
    return answer.dfid


def test_an_order_that_was_sent_is_waited_for(bed: Testbed):
    bank = SlowBank(bed)
    gate = bed.gate(executor=bank)
    handle = gate.submit(bed.event(0))
    assert bank.asked.wait(PATIENCE_S)
    threading.Timer(0.2, bank.answer.set).start()
    gate.close()
    assert "SUCCESS" == handle.result(0).execution


def test_who_waits_for_a_key_is_not_left_behind(bed: Testbed, thinking: Thinking):
    gate = bed.gate(engine=thinking)
    handles = [gate.submit(bed.event(0, account="A0"))]
    thinking.wait_until_begun()  # it has the key: of three that are sent together another may have it first
    handles += [gate.submit(bed.event(number, account="A0")) for number in (1, 2)]
    gate.close()
    codes = [outcome(handle) for handle in handles]
    assert ["DRAINING"] * 3 == codes


def test_a_gate_may_be_closed_by_who_decides_in_it(bed: Testbed):
    gates: list[Gate] = []
    gate = bed.gate(on_reasoned=lambda packet, data: gates[0].close())
    gates.append(gate)
    with pytest.raises(SdsError):  # what it is in the middle of has no record any more: it asked for that
        gate.decide(bed.event(0))


@pytest.mark.parametrize("drain_s", [0.0, 0.02])
def test_whenever_a_gate_is_closed_no_decision_meets_a_closed_record(bed: Testbed, drain_s: float):
    """In threads of the gate and of callers: each ends with an answer, or with one of three refusals."""

    def send(gate: Gate, number: int) -> object:
        try:
            if number % 2:
                return gate.decide(bed.event(number))
            return gate.submit(bed.event(number)).result(PATIENCE_S)
        except SdsError as error:
            return error.reason_code if error.reason_code != "USAGE" else str(error)

    for turn in range(5):
        gate = bed.gate()
        with ThreadPoolExecutor(8) as callers:
            sent = [callers.submit(send, gate, 20 * turn + number) for number in range(20)]
            time.sleep(0.01 * turn)
            gate.close(drain_s)
            outcomes = [each.result(PATIENCE_S) for each in sent]
        refused = {outcome for outcome in outcomes if not isinstance(outcome, Answer)}
        assert refused <= {"DRAINING", "the gate is closed"}
        undecided = [each for each in outcomes if isinstance(each, Answer) and each.execution != "SUCCESS"]
        assert {"NOT_DECIDED"} >= {each.tag for each in undecided}
    with bed.gate() as gate:
        assert {"CLOSED", "ABORTED"} >= {state for state, _ in flows(gate)}
        assert 0 == bed.paid_twice() == bed.disagreements(gate)
        assert () == verify.verify(gate.store).faults
