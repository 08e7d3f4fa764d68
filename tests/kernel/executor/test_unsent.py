"""`unsent` is what one sender knows of itself: it frees an order only while nobody else can have sent it."""

from __future__ import annotations

import pytest

from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.operations.recovery import recover
from tests.kernel.durable import LEASE_MS, World, refund


class Refusing:
    """Cannot be reached; `meanwhile` is what happens while it is tried."""

    idempotent = True

    def __init__(self, world: World) -> None:
        self.world, self.late_ms, self.recovered = world, 0, False

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self.world.clock.advance(self.late_ms)
        if self.recovered:  # another process takes it for dead, sends the order, and its reply is lost
            self.world.rail.misfortunes, self.world.rail.blind = ["lose"], True
            self.world.rail.dispatch(intent, key, deadline_s)
            recover(self.world.open_kernel(), now_ms=self.world.clock())
        return Receipt("unsent", detail="connection refused")

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return Receipt("unknown", detail="connection refused")


def test_in_time_its_event_waits(world: World) -> None:
    world.kernel = world.open_kernel(executor=Refusing(world))
    answer = world.decide(refund())
    assert ("FAILED", "NOT_SENT", True) == (answer.execution, answer.tag, answer.retryable)


@pytest.mark.parametrize("recovered", [True, False])
def test_from_a_sender_that_was_stopped_past_its_lease_it_frees_nothing(world: World, recovered: bool) -> None:
    refusing = Refusing(world)
    refusing.late_ms, refusing.recovered = LEASE_MS, recovered
    world.kernel = world.open_kernel(executor=refusing)
    assert "UNKNOWN" == world.decide(refund()).execution
    assert (int(recovered), ["live"]) == (len(world.rail.paid()), world.column("SELECT status FROM reservations"))


def test_of_a_look_up_it_frees_nothing(world: World) -> None:
    world.rail.misfortunes, world.rail.blind = ["lose"], True
    world.decide(refund())
    world.rail.lookup = lambda key, deadline_s: Receipt("unsent")  # type: ignore[method-assign]
    assert 1 == recover(world.kernel, now_ms=world.clock()).unknown
