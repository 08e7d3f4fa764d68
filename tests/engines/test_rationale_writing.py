"""The rationale after the decision on a model that others use: what one holds is never gone on with by another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from sds.decoding.errors import DEADLINE_EXCEEDED
from sds.engines.native import NativeEngine
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import ModelError
from sds.models.protocol import BackendError, Row
from sds.rationale.writing import PriorityLock
from tests.decoding.small_backend import PIECES, HashBackend
from tests.engines.conftest import running_ms
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


def test_a_rationale_waits_for_the_cache_no_longer_than_it_has_time() -> None:
    turns = PriorityLock()
    with (
        turns.between(lambda: 1.0),
        pytest.raises(ModelError) as caught,
        turns.between(lambda: 0.05),
    ):  # somebody else's pass
        pytest.fail("it had the cache")
    assert ("there was no time for a rationale", DEADLINE_EXCEEDED) == (str(caught.value), caught.value.reason_code)
    with turns.between(lambda: 0.05):
        pass


class Narrow(HashBackend):
    """Never ends a text, and refuses what its slots have no room for, as real backends do: before anything is read."""

    context_tokens_max = 300
    refused = 0

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        if any(len(self.held[row.slot]) + len(row.tokens) > self.context_tokens_max for row in rows):
            self.refused += 1
            raise BackendError("more tokens than the context holds")
        return super().run(rows)

    def logits(self, tokens: Sequence[int], rows: Sequence[Row]) -> NDArray[np.float32]:
        found = super().logits(tokens, rows)
        found[[b'"' in piece for piece in PIECES]] = -100
        return found


def test_a_rationale_that_outgrows_its_slot_fails_no_decision_beside_it(world: World) -> None:
    packet = replace(world.packet("C1"), texts=("contract", "case"), expires_at_ms=FAR_MS)
    backend = Narrow(slots=2)
    engine = NativeEngine(backend, now_ms=running_ms, noise_logp_max=0.0)
    with closing(engine), ThreadPoolExecutor(1) as pool:
        text = pool.submit(explained, engine, packet, 2000)
        decided = [engine.propose(packet, tokens_max=250)[0]]
        while not text.done():
            decided.append(engine.propose(packet, tokens_max=250)[0])
        with pytest.raises(ModelError) as skipped:
            text.result()
    assert (0, "TOKEN_BUDGET_EXCEEDED") == (backend.refused, skipped.value.reason_code), (
        "a refused pass fails all in it"
    )
    assert 1 == len(set(decided))
