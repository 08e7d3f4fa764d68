"""The rationale after the decision on a model that others use: what one holds is never gone on with by another."""

from __future__ import annotations

from dataclasses import replace

from sds.engines.native import NativeEngine
from sds.kernel.packet import DecisionPacket
from tests.decoder.small_backend import HashBackend
from tests.kernel.durable import START_MS, World, deny

CHARS_MAX = 40
FAR_MS = START_MS + 10**9


def explained(engine: NativeEngine, packet: DecisionPacket, chars_max: int = CHARS_MAX) -> str:
    return engine.explain(packet, deny(packet), chars_max=chars_max, deadline_ms=FAR_MS)


def test_two_rationales_in_one_cache_do_not_go_on_with_each_others_text(world: World) -> None:
    packet = world.packet("C1")
    other = replace(packet, texts=(packet.texts[0], "another case"))
    calls, between = 0, list[str]()

    def clock() -> int:
        nonlocal calls
        calls += 1
        if calls == 5:  # the rationale of another gate comes between two passes of the first
            between.append(explained(engine, other))
        return START_MS

    engine = NativeEngine(HashBackend(), now_ms=clock)
    first = explained(engine, packet)
    assert [explained(engine, packet), explained(engine, other)] == [first, *between]
