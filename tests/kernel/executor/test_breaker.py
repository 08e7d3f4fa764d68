"""The circuit breaker: who does not answer is not asked, every event waits, and one probe tells when it is well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.executor import breaker
from sds.kernel.executor.breaker import FAILURES_MAX, PROBE_MS
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.human.cases import waiting
from sds.kernel.operations.recovery import recover
from tests.kernel.durable import World, refund, see_through, whole


class Bank:
    """An executor that can be down, and counts what it was sent."""

    idempotent = True

    def __init__(self) -> None:
        self.down = True
        self.sent: list[str] = []
        self.status = "unknown"

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self.sent.append(key)
        return self._said()

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return self._said()

    def _said(self) -> Receipt:
        if not self.down:
            return Receipt("settled", "PAY-1")
        if self.status == "raise":
            raise ConnectionRefusedError("the bank is closed")
        return Receipt(self.status)  # type: ignore[arg-type]  # unknown or unsent


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.fixture
def world(folder: Path, bank: Bank) -> Iterator[World]:
    with whole(World(folder)) as made:
        made.kernel = made.open_kernel(executor=bank)
        for number in range(40):
            made.tickets.put(f"T{number}")
        yield made


def tags(world: World, numbers: range) -> list[str | None]:
    return [world.decide(refund("1.00"), f"C{n}", f"T{n}").tag for n in numbers]


@pytest.mark.parametrize("status", ["unknown", "unsent", "raise"])
def test_after_a_few_orders_in_a_row_that_are_not_answered_nothing_is_reserved_and_events_wait(
    world: World, bank: Bank, status: str
):
    bank.status = status
    tags(world, range(FAILURES_MAX))
    assert {"EXECUTOR_DOWN"} == set(tags(world, range(FAILURES_MAX, 30)))
    assert FAILURES_MAX == len(bank.sent)
    assert breaker.read(world.store, "claims").is_open
    assert "executor.down" in [event for event, _ in world.logged]
    unknown = 0 if status == "unsent" else FAILURES_MAX
    assert unknown == len(waiting(world.store, world.contract))


def test_one_probe_tries_again_and_when_it_is_answered_all_that_waited_is_decided(world: World, bank: Bank):
    tags(world, range(10))
    world.clock.advance(PROBE_MS)
    tags(world, range(10, 15))
    assert FAILURES_MAX + 1 == len(bank.sent)  # one of five, and it was not answered either
    bank.down = False
    world.clock.advance(PROBE_MS)
    done = [see_through(world.kernel, world.event(f"C{n}", f"T{n}"), refund("1.00")) for n in range(15, 20)]
    assert {"SUCCESS"} == {answer.execution for answer in done}
    assert not breaker.read(world.store, "claims").is_open
    assert "executor.up" in [event for event, _ in world.logged]


def test_an_answer_in_between_starts_the_count_anew(world: World, bank: Bank):
    for number in range(4 * FAILURES_MAX):
        bank.down = number % FAILURES_MAX != 0
        world.decide(refund("1.00"), f"C{number}", f"T{number}")
    assert 4 * FAILURES_MAX == len(bank.sent)


def test_a_clock_that_is_set_back_does_not_keep_it_open(world: World, bank: Bank):
    tags(world, range(5))
    world.clock.advance(-10 * PROBE_MS)
    bank.down = False
    assert "SUCCESS" == world.decide(refund("1.00"), "C9", "T9").execution


def test_an_answer_that_recovery_gets_closes_it(world: World, bank: Bank):
    tags(world, range(FAILURES_MAX))
    bank.down = False
    assert FAILURES_MAX == recover(world.kernel, now_ms=world.clock()).success
    assert not breaker.read(world.store, "claims").is_open
