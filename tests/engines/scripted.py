"""Engines that do as they are bid, and a chain of them with a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from sds.engines.fallback import FallbackEngine, Link
from sds.engines.protocol import Engine
from sds.kernel.decision.packet import DecisionPacket, Decoding
from tests.kernel.durable import Clock, World, deny


class Scripted:
    """An engine that does as it is told; user space may be anything."""

    def __init__(self, name: str, clock: Clock | None = None) -> None:
        self.model = name
        self.clock = clock
        self.failure: BaseException | None = None
        self.takes_ms = 0
        self.asked = 0
        self.deadlines: list[int] = []
        self.closed = False

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        self.asked += 1
        self.deadlines.append(packet.expires_at_ms)
        if self.clock is not None:
            self.clock.advance(self.takes_ms)
        if self.failure is not None:
            raise self.failure
        return deny(packet), Decoding(self.model, 0.9)

    def count_tokens(self, text: str) -> int:
        return len(text)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def still(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.tickets.put("T1")
    yield made
    made.close()


def opens(engine: Engine) -> Callable[[], Engine]:
    return lambda: engine


def chain(world: World, *engines: Scripted, timeout_ms: int = 8_000) -> tuple[FallbackEngine, list[tuple[str, object]]]:
    links = [Link(engine.model, opens(engine), timeout_ms, 1_000) for engine in engines]
    logged: list[tuple[str, object]] = []

    def log(event: str, facts: Mapping[str, object]) -> None:
        logged.append((event, dict(facts)))

    return FallbackEngine(links, now_ms=world.clock, log=log), logged


def answered(engine: FallbackEngine, packet: DecisionPacket) -> str:
    return engine.propose(packet, tokens_max=4096)[1].model
