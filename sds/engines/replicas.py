"""Engines of one model side by side: each decides alone, as it would without the others, on its own share of the cores.

They share the weights in memory and nothing else. A packet waits until one of them has a free slot, its expiry at most, first
come first served; the one with most free slots is asked first, of equals the one that was free last, for its cache is warm.
Where each has some slots, what one does beside its passes goes on while another's run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from sds.engines.native import COUNT_MS_MAX, NativeEngine
from sds.engines.queueing import FairPool, after_waiting
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket, Decoding

REPLICAS_MAX = 64


class Replicas:
    """At least one engine, of as many slots each. `close()` ends all of them."""

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

    def explain(self, packet: DecisionPacket, data: bytes, *, chars_max: int, deadline_ms: int) -> str:
        """Say why, always with the first engine, between its passes: with one slot it decides only when all others are busy."""
        return self._engines[0].explain(packet, data, chars_max=chars_max, deadline_ms=deadline_ms)

    def count_tokens(self, text: str) -> int:
        with self._one(COUNT_MS_MAX / 1000) as engine:
            return engine.count_tokens(text)

    def _one(self, wait_s: float) -> AbstractContextManager[NativeEngine]:
        return self._free.lent(wait_s, "no engine was free in time")

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
