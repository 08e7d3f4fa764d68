"""Waking the streams of changes: when a ledger has grown, and not because it was longer once."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from sds.kernel.storage.store import Reader
from sds.service.operations.following import Tail


class Ledger:
    """What `head` asks: the index of the last entry."""

    def __init__(self, idx: int) -> None:
        self.idx = idx

    def value(self, _sql: str) -> int:
        return self.idx


def test_a_ledger_that_has_become_shorter_wakes_nobody_until_it_grows_again() -> None:
    ledger = Ledger(120)

    async def waits(tail: Tail, idx: int, within_s: float) -> bool:
        began_s = time.monotonic()
        await tail.grown({"toll": idx}, within_s)
        return time.monotonic() - began_s >= within_s

    async def run() -> None:
        tail = Tail(lambda: {"toll": cast("Reader", ledger)}, every_s=0.001, failed=lambda: None)
        async with tail.followed():
            assert not await waits(tail, 119, 5.0)
            ledger.idx = 115
            for _ in range(5_000):  # until it has looked
                await asyncio.sleep(0.001)
                if waited := await waits(tail, 115, 0.05):
                    break
            assert waited
            ledger.idx = 116
            assert not await waits(tail, 115, 5.0)

    asyncio.run(run())
