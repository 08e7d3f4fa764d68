"""Wake the streams of changes when a ledger has grown. One task reads the ledgers' heads for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from starlette.concurrency import run_in_threadpool

from sds.kernel.errors import SdsError
from sds.kernel.storage.store import Reader
from sds.service.operations.changes import head


class Tail:
    """Reads the heads of some ledgers every `every_s` seconds while there are followers. For one event loop.

    A ledger that cannot be read counts as not grown, and `failed` is called.
    """

    def __init__(
        self, records: Callable[[], Mapping[str, Reader]], *, every_s: float, failed: Callable[[], object]
    ) -> None:
        self._records, self._every_s, self._failed = records, every_s, failed
        self._heads = dict[str, int]()
        self._grown = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self.followers = 0

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Count as a follower for a block."""
        self.followers += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self.followers -= 1
            if not self.followers and self._watching is not None:
                self._watching.cancel()
                self._watching = None

    async def grown(self, positions: Mapping[str, int], within_s: float) -> None:
        """Return once a ledger has grown beyond its position, or after `within_s` seconds."""
        if any(self._heads.get(gate, 0) > idx for gate, idx in positions.items()):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._grown.wait()

    async def _watch(self) -> None:
        while True:
            heads = await run_in_threadpool(self._look)
            grown = any(idx > self._heads.get(gate, 0) for gate, idx in heads.items())
            self._heads.update(heads)  # also where one has become shorter, as after a restore
            if grown:
                self._grown.set()
                self._grown = asyncio.Event()
            await asyncio.sleep(self._every_s)

    def _look(self) -> dict[str, int]:
        heads = dict[str, int]()
        for gate, record in self._records().items():
            try:
                heads[gate] = head(record)
            except SdsError:
                self._failed()
        return heads
