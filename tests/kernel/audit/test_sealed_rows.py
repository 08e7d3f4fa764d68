"""The ledger's digests are of the rows as they were written: reading them back has to give the very same."""

from __future__ import annotations

import json
from enum import StrEnum

import numpy as np
import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import Decoding
from sds.kernel.flow.decision_record import RESERVED, SEALED, seal
from tests.kernel.durable import World, deny, nonsense, refund


class Named(StrEnum):
    OWN = "own"


def sealed(world: World, kind: str, dfid: str) -> dict[str, str]:
    body = world.store.value("SELECT body FROM ledger WHERE kind = ? AND dfid = ?", (kind, dfid))
    found: dict[str, str] = json.loads(body)["rows"]
    return found


@pytest.mark.parametrize(
    "decoding",
    [
        Decoding("m", 0.75, tokens=3, passes=1, duration_ms=1.5),
        Decoding("m", 1, duration_ms=2),
        Decoding("m", -0.0, duration_ms=1e300),
        Decoding(Named.OWN, np.float64(0.1), tokens=True, duration_ms=np.float64(7)),
        Decoding("m", float("nan")),
        Decoding("m", None, alternatives=None, facts={"prompt": "p", "seed": 7}),
    ],
    ids=["usual", "whole numbers", "minus zero", "other kinds of number and text", "not a number", "nothing measured"],
)
def test_what_was_sealed_is_what_is_read_back(world: World, decoding: Decoding) -> None:
    packet = world.packet()
    assert "CLOSED" == world.kernel.decide(packet, refund()(packet), decoding).state
    assert seal(world.store, packet.dfid, SEALED) == sealed(world, "DECIDED", packet.dfid)
    assert seal(world.store, packet.dfid, RESERVED) == sealed(world, "RESERVED", packet.dfid)
    assert () == verify.verify(world.store).faults
    world.close()


def test_attempts_and_a_deadline_are_sealed_with_the_last_one(world: World) -> None:
    packet = world.kernel.open(world.event(), deadline_ms=world.clock() + 60_000)
    for propose in (nonsense, nonsense, deny):
        world.kernel.decide(packet, propose(packet))  # type: ignore[arg-type]
    assert 2 == world.store.value("SELECT count(*) FROM attempts")
    assert seal(world.store, packet.dfid, SEALED) == sealed(world, "DECIDED", packet.dfid)
    assert () == verify.verify(world.store).faults
    world.close()
