"""Engines of one model side by side. Each has a scheduler and a share of the cores; they share only the weights in memory.

A packet waits, until its expiry and first come first served, for a free slot of any of them. It gets the engine with
most free slots, of equals the one that was busy last. So no request waits for one engine while another has a free slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from sds.engines.native import COUNT_MS_MAX, NativeEngine
from sds.engines.protocol import BackgroundTask
from sds.engines.queueing import FairPool, after_waiting
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket, Decoding

REPLICAS_MAX = 64

T = TypeVar("T")


class Replicas:
    """One or more engines with the same number of slots. `close()` closes all of them."""

    def __init__(self, engines: Sequence[NativeEngine], *, now_ms: Callable[[], int]) -> None:
        self._engines, self._now_ms = tuple(engines), now_ms
        self.notices = engines[0].notices
        self._free = FairPool(*(self._engines * engines[0].slots))

    @property
    def model(self) -> str:
        return self._engines[0].model

    def check_contract(self, contract: Contract) -> None:
        self._engines[0].check_contract(contract)

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        asked_ms, until_ms = self._now_ms(), packet.expires_at_ms
        with self._one((until_ms - asked_ms) / 1000) as engine, after_waiting(asked_ms, self._now_ms(), until_ms):
            return engine.propose(packet, tokens_max=tokens_max)

    def run_background(self, packet: DecisionPacket, task: BackgroundTask[T], *, deadline_ms: int) -> T:
        """Run it on the first engine, which is the last to get a decision."""
        return self._engines[0].run_background(packet, task, deadline_ms=deadline_ms)

    @property
    def slots(self) -> int:
        """The number of decisions made at once."""
        return sum(engine.slots for engine in self._engines)

    def cancel(self, dfid: str) -> None:
        for engine in self._engines:
            engine.cancel(dfid)

    def count_tokens(self, text: str) -> int:
        with self._one(COUNT_MS_MAX / 1000) as engine:
            return engine.count_tokens(text)

    def _one(self, wait_s: float) -> AbstractContextManager[NativeEngine]:
        return self._free.acquired(wait_s, "no engine was free in time")

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
