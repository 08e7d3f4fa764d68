"""Answers that come too late, and what opens or closes meanwhile, in a chain of engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sds.engines.fallback import FallbackEngine, Link
from sds.engines.protocol import Engine
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import ModelError
from tests.engines.test_fallback import Scripted, answered, chain, opens, still
from tests.kernel.durable import World

__all__ = ["still"]


class Late(Scripted):
    """Its first answer comes after another decision has found it dead."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.meanwhile: Callable[[], object] | None = None

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile, self.failure = None, ModelError("gone")
            meanwhile()
            self.failure = None
        return super().propose(packet, tokens_max=tokens_max)


def test_an_answer_to_what_was_asked_before_it_fell_brings_no_engine_back(still: World) -> None:
    first, last = Late("first"), Scripted("last")
    engine, logged = chain(still, first, last)
    packet = still.packet()
    first.meanwhile = lambda: answered(engine, packet)
    assert "first" == answered(engine, packet)
    assert ["engine.down"] == [event for event, _ in logged]
    assert ("last", 2) == (answered(engine, packet), first.asked)
    still.clock.advance(1_000)
    assert ("first", ["engine.down", "engine.up"]) == (answered(engine, packet), [event for event, _ in logged])


def test_a_chain_that_is_closed_while_an_engine_opens_closes_that_too(still: World) -> None:
    first, last = Scripted("first"), Scripted("last")
    doors = iter([ModelError("not yet"), None])

    def opened() -> Engine:
        if (error := next(doors)) is not None:
            raise error
        engine.close()
        return first

    engine = FallbackEngine(
        [Link("first", opened, 8_000, 1_000), Link("last", opens(last), 8_000, 1_000)], now_ms=still.clock
    )
    still.clock.advance(1_000)
    assert "last" == answered(engine, still.packet())
    assert (True, True) == (first.closed, last.closed)


def test_closing_a_chain_closes_all_of_it_whatever_one_raises(still: World) -> None:
    class Stuck(Scripted):
        def close(self) -> None:
            raise RuntimeError("stuck")

    first, last = Scripted("first"), Stuck("last")
    engine, _ = chain(still, first, last)
    with pytest.raises(RuntimeError, match="stuck"):
        engine.close()
    assert first.closed
