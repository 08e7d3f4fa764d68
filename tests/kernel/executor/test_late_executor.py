"""Nobody waits for an executor longer than `dispatch_ms_max`; its late answer is taken, once."""

from __future__ import annotations

import threading
import time
from asyncio import CancelledError
from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.executor.deadline import LateError, within
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.kernel.durable import World, contract, counters, refund, whole

WAIT_MS = 60


class Hangs:
    """Carries an order out, and answers only when it is let go."""

    idempotent = True

    def __init__(self, answer: Receipt) -> None:
        self.go, self.answered = threading.Event(), threading.Event()
        self._answer = answer

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self.go.wait(30)
        return self._answer

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        self.go.wait(30)
        return self._answer


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder, terms=contract(("dispatch_ms_max: 5000", f"dispatch_ms_max: {WAIT_MS}")))) as made:
        yield made


def settled(world: World, status: str) -> bool:
    for _ in range(1_000):
        if [status] == world.column("SELECT status FROM execution_log"):
            return True
        time.sleep(0.005)
    return False


@pytest.mark.parametrize(
    ("answer", "status"), [(Receipt("settled", "PAY-1"), "SUCCESS"), (Receipt("rejected"), "FAILED")]
)
def test_who_does_not_answer_in_time_is_not_waited_for_and_its_late_answer_counts(
    world: World, answer: Receipt, status: str
):
    bank = Hangs(answer)
    world.kernel = world.open_kernel(executor=bank)
    began = time.monotonic()
    found = world.decide(refund())
    assert time.monotonic() - began < 10  # it would be 30
    assert ("EXECUTING", "UNKNOWN") == (found.state, found.execution)
    assert {4_000} == {amount for _, amount in counters(world.store)}
    (detail,) = world.column("SELECT body ->> '$.detail' FROM ledger WHERE kind = 'UNKNOWN'")
    assert f"the executor did not answer within {WAIT_MS} ms" == detail
    bank.go.set()
    assert settled(world, status)
    assert ["RESOLVED"] == world.column("SELECT kind FROM ledger WHERE kind IN ('SETTLED', 'RESOLVED')")


def test_a_late_answer_after_the_record_is_closed_is_lost_without_a_word_and_looked_up_later(folder: Path):
    world = World(folder, terms=contract(("dispatch_ms_max: 5000", f"dispatch_ms_max: {WAIT_MS}")))
    bank, lost = Hangs(Receipt("settled", "PAY-1")), threading.Event()
    world.kernel = world.open_kernel(
        executor=bank, log=lambda event, _: lost.set() if event == "executor.late_answer_lost" else None
    )
    world.decide(refund())
    world.close()
    bank.go.set()
    assert lost.wait(10)


def test_what_comes_back_in_time_is_returned_and_what_is_raised_is_raised():
    assert 7 == within(5, lambda: 7)
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0)


@pytest.mark.parametrize(
    "end", [SystemExit(3), KeyboardInterrupt(), CancelledError()], ids=lambda end: type(end).__name__
)
def test_an_end_that_an_executor_raises_is_unknown_like_anything_else_and_ends_nobody_who_waits(
    folder: Path, end: BaseException
):
    class Ends:
        idempotent = True

        def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
            raise end

        def lookup(self, key: str, deadline_s: float) -> Receipt:
            raise end

    with whole(World(folder)) as world:
        world.kernel = world.open_kernel(executor=Ends())
        assert ("EXECUTING", "UNKNOWN") == ((answer := world.decide(refund())).state, answer.execution)
        (detail,) = world.column("SELECT body ->> '$.detail' FROM ledger WHERE kind = 'UNKNOWN'")
        assert f"the executor failed: {type(end).__name__}" in str(detail)


def test_what_is_late_is_handed_over_once():
    go, came = threading.Event(), threading.Event()
    late: list[int] = []

    def work() -> int:
        go.wait(10)
        return 7

    def take(result: int) -> None:
        late.append(result)
        came.set()

    with pytest.raises(LateError):
        within(0.01, work, late=take)
    go.set()
    assert came.wait(10)
    assert [7] == late
