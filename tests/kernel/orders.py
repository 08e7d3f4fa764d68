"""Orders whose sender has died, and what recovery makes of them."""

from __future__ import annotations

from sds.kernel.executor.protocol import ExecutionIntent
from sds.kernel.operations.recovery import Recovered, recover
from tests.kernel.durable import World, refund


def recovered(world: World) -> Recovered:
    return recover(world.kernel, now_ms=world.clock())


def execution(world: World) -> list[object]:
    return world.column("SELECT status FROM execution_log ORDER BY reserved_at_ms, dfid")


def left_hanging(world: World, *, paid: bool, name: str = "C1") -> ExecutionIntent:
    """Reserve an order and stop there: the process has died on its way to the rail, or just behind it."""
    sent: list[ExecutionIntent] = []
    carry_out = world.kernel.dispatcher.carry_out
    world.kernel.dispatcher.carry_out = lambda intent, **_: sent.append(intent) or ""  # type: ignore[method-assign,func-returns-value]
    world.decide(refund(), name)
    world.kernel.dispatcher.carry_out = carry_out  # type: ignore[method-assign]
    (intent,) = sent
    if paid:
        world.rail.dispatch(intent, intent.idempotency_key, 1.0)
    return intent
