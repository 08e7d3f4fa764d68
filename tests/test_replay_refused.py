"""What cannot be replayed is refused in one line: nothing that a native model decided, or no decision at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sds.engines.protocol import Engine
from sds.host.clock import now_ms
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import ModelError, UsageError
from sds.pipeline import Stream
from sds.replay import replay
from tests.kernel.durable import Propose, World, deny
from tests.proposers import Says
from tests.scale import scale

EVENTS = scale(4, 40)
SEALS = tuple(f"table {name} differs from its seal" for name in ("context_snapshots", "policy_proposals"))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def raising(error: Exception) -> Propose:
    def say(packet: DecisionPacket) -> bytes:
        raise error

    return say


def no_model(facts: Mapping[str, Any]) -> Engine:
    raise AssertionError("what is refused opens no model")


def refused(world: World, dfid: str, why: str) -> UsageError:
    with pytest.raises(UsageError, match=why) as raised:
        replay(world.store, dfid, open_it=no_model, now_ms=now_ms)
    return raised.value


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        (Decoding("not asked"), "no model was asked in flow `.*`: only one decision was possible"),
        (Decoding("server:m", alternatives=None), "decided by `server:m`, an engine that cannot be replayed"),
        (Decoding("older@123", 0.9), "does not say what its decision depended on"),
        (Decoding("m@1", 0.9, facts={"mode": "beam"}), "a mode that this program does not have"),
        (ModelError("no model"), r"ended without a proposal \(MODEL_UNAVAILABLE\)"),
    ],
)
def test_what_no_native_model_decided_is_refused(world: World, measured: Decoding | ModelError, why: str) -> None:
    engine = Says(deny, measured) if isinstance(measured, Decoding) else Says(raising(measured))
    stream = Stream(world.kernel, engine, now_ms=world.clock, sleep=lambda _: None)
    refused(world, stream.decide(world.event()).dfid, why)


def test_a_flow_that_is_unknown_or_open_or_was_ended_by_the_runtime_is_refused(world: World) -> None:
    refused(world, "nobody", "there is no flow `nobody` in the record")
    packet = world.packet()
    refused(world, packet.dfid, "is not decided yet")
    world.clock.advance(world.contract.budget.ttl_ms + world.contract.budget.dispatch_ms_max + 1_001)
    after = world.packet()
    assert isinstance(after, DecisionPacket)
    assert after.dfid in refused(world, packet.dfid, r"ended without a proposal \(INTERRUPTED\)").hint
