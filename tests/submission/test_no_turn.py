"""A model that is full is no reason for a human: on every way to it a case waits, uncharged, and is decided later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sds.engines.breaker import Breaker
from sds.engines.fallback import FallbackEngine, Link
from sds.engines.protocol import Engine
from sds.engines.queueing import QueueTimeoutError
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import ModelError
from sds.kernel.human.cases import waiting
from sds.kernel.registry import escalation_budget
from sds.pipeline import Stream
from sds.policy.engine import PolicyEngine
from sds.policy.language_model import LanguageModel
from sds.policy.readers import ModelReader
from sds.sagas import SagaStream
from tests.kernel.authority import AGENT, status
from tests.kernel.durable import World, contract, whole
from tests.kernel.sagas import SAGAS, most
from tests.policy.scripted import Says as Read
from tests.proposers import Says

POLICY = """
readings:
  tone: {question: 'How is it written?', values: {calm: without anger, angry: with anger}}
policy:
  - {kind: DENY, reason: NOT_ELIGIBLE, when: "reading.tone == 'angry'"}
  - otherwise: MODEL
"""


class Full(Says):
    """A model whose queue is full until a test makes room."""

    def __init__(self) -> None:
        super().__init__(most)
        self.full = True

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        if self.full:
            raise QueueTimeoutError("1024 decisions wait already", reason_code="QUEUE_FULL")
        return super().propose(packet, tokens_max=tokens_max)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with whole(World(tmp_path, terms=contract(("per_hour: 1000000", "per_hour: 3"), more=POLICY + SAGAS))) as made:
        yield made


def stream(world: World, engine: Engine) -> Stream:
    return Stream(
        world.kernel, engine, now_ms=world.clock, sleep=lambda seconds: world.clock.advance(round(seconds * 1000))
    )


def unharmed(world: World) -> bool:
    """Tell whether nobody was asked, and nothing held against the agent."""
    left = escalation_budget.left(world.store, AGENT, 3, world.clock())
    return (status(world), waiting(world.store, world.contract), left) == ("ACTIVE", [], 3)


def policy(world: World, full: Full, answers: object) -> PolicyEngine:
    breaker = Breaker(whole_ms=world.contract.budget.ttl_ms, now_ms=world.clock)
    model = LanguageModel(lambda: full, needed=True, breaker=breaker)
    return PolicyEngine(
        world.contract,
        {"tone": answers},
        None,
        language_model=model,
        now_ms=world.clock,
        facts={},  # type: ignore[dict-item]
    )


def chosen_by_the_model(world: World, full: Full) -> Engine:
    return policy(world, full, Read({"calm": 1.0, "angry": 0.0}))


def read_by_the_model(world: World, full: Full) -> Engine:
    return policy(world, full, ModelReader("tone", world.contract.readings["tone"], full))


def links(world: World, *engines: Engine) -> FallbackEngine:
    made = [Link(f"link{n}", lambda engine=engine: engine, 1_000, 1_000) for n, engine in enumerate(engines)]  # type: ignore[misc]
    return FallbackEngine(made, now_ms=world.clock)


def failing(_packet: DecisionPacket) -> bytes:
    raise ModelError("the server is gone", reason_code="BACKEND_FAILED")


WAYS: dict[str, Callable[[World, Full], Engine]] = {
    "the model itself": lambda _world, full: full,
    "a policy that asks it": chosen_by_the_model,
    "a policy that has it read": read_by_the_model,
    "the last of a chain": lambda world, full: links(world, Says(failing), full),
    "the first of a chain whose last is down": lambda world, full: links(world, full, Says(failing)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_full_model_decides_nothing_asks_nobody_and_is_asked_again(world: World, way: str):
    full = Full()
    asked = stream(world, WAYS[way](world, full))
    for _ in range(10):  # more often than the agent may escalate, or be rejected in a row
        answer = asked.decide(world.event())
        assert ("ABORTED", "NOT_DECIDED", "QUEUE_FULL", True) == (
            answer.state,
            answer.tag,
            answer.reason_code,
            answer.retryable,
        )
    assert unharmed(world)


@pytest.mark.parametrize("way", ["the model itself", "a policy that asks it", "the last of a chain"])
def test_once_there_is_room_the_case_is_decided(world: World, way: str):
    full = Full()
    asked = stream(world, WAYS[way](world, full))
    assert asked.decide(world.event()).retryable
    full.full = False
    assert "SUCCESS" == asked.decide(world.event()).execution


def test_a_saga_whose_step_gets_no_turn_stays_open_and_is_driven_again(world: World):
    full = Full()
    sagas = SagaStream(world.kernel, lambda kernel: stream_of(kernel, world, full), now_ms=world.clock)
    for _ in range(5):
        found = sagas.decide("BOTH", world.event())
        assert (True, "STEPS") == (found.answer.pending, found.phase)
    assert unharmed(world)
    full.full = False
    assert "CLOSED" == sagas.decide("BOTH", world.event()).answer.state
    assert 2 == len(world.rail.paid())


def stream_of(kernel: object, world: World, engine: Engine) -> Stream:
    return Stream(kernel, engine, now_ms=world.clock, sleep=lambda _s: None)  # type: ignore[arg-type]
