"""The rationale after the decision on a model that others use: what one holds is never gone on with by another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from sds.engines.native import NativeEngine
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import ModelError
from sds.models.protocol import BackendError, Row
from sds.rationale import writer_of
from tests.decoding.small_backend import PIECES, HashBackend
from tests.engines.batches import until
from tests.engines.conftest import running_ms, world
from tests.kernel.durable import START_MS, World, deny

__all__ = ["world"]

CHARS_MAX = 40
FAR_MS = START_MS + 10**9


def explained(engine: NativeEngine, packet: DecisionPacket, chars_max: int = CHARS_MAX) -> str:
    return writer_of(engine).explain(packet, deny(packet), chars_max=chars_max, deadline_ms=FAR_MS)


def test_two_rationales_at_once_do_not_go_on_with_each_others_text(world: World) -> None:
    packet = world.packet("C1")
    other = replace(packet, texts=(packet.texts[0], "another case"))
    with closing(NativeEngine(HashBackend(), now_ms=lambda: START_MS)) as engine, ThreadPoolExecutor(2) as pool:
        expected = [explained(engine, packet), explained(engine, other)]
        assert expected * 4 == list(pool.map(partial(explained, engine), [packet, other] * 4))


class Told(HashBackend):
    """Calls `on_pass` with each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.on_pass: Callable[[Sequence[Row]], None] = lambda _: None

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        self.on_pass(rows)
        return super().run(rows)


def test_a_rationale_that_gave_its_slot_up_goes_on_with_what_it_had_written(world: World) -> None:
    packet = world.packet("C1")
    backend, passes, decided = Told(), list[int](), list[Future[object]]()
    with closing(NativeEngine(backend, now_ms=lambda: START_MS)) as engine, ThreadPoolExecutor(1) as pool:
        expected = explained(engine, packet)

        def interrupt(rows: Sequence[Row]) -> None:
            passes.append(len(rows[0].tokens))
            if len(passes) == 4:
                decided.append(pool.submit(engine.propose, packet, tokens_max=4000))
                until(lambda: bool(engine._scheduler._waiting))

        backend.on_pass = interrupt
        assert expected == explained(engine, packet)
        decided[0].result()
    assert passes[0] + 4 in passes[4:], "it read the tokens it had written again, in one pass"


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
