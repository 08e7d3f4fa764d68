"""A gate whose engine thinks for as long as a test lets it."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from sds.gate import Gate
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.storage.store import Row
from tests.attack.testbed import Teller

PATIENCE_S = 20


class Thinking(Teller):
    """Thinks about the events it is told to, until `done` is set; `begun` counts them. About others it does not."""

    def __init__(self, *events: str) -> None:
        self._events = frozenset(events)
        self.done, self.begun = threading.Event(), threading.Semaphore(0)
        self.asked: list[str] = []

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        self.asked.append(packet.event_id)
        if packet.event_id in self._events:
            self.begun.release()
            self.done.wait(PATIENCE_S)
        return super().propose(packet, tokens_max=tokens_max)

    def wait_until_begun(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.begun.acquire(timeout=PATIENCE_S)


@contextmanager
def write_locks(gate: Gate) -> Iterator[list[str]]:
    """Yield the threads that take the write lock of a gate's record, as they come."""
    taken: list[str] = []
    transaction = gate.store.transaction

    def counted(first: str = "", values: Row = (), **how: bool) -> AbstractContextManager[list[Row]]:
        taken.append(threading.current_thread().name)
        return transaction(first, values, **how)

    gate.store.transaction = counted  # type: ignore[method-assign]
    yield taken
    gate.store.transaction = transaction  # type: ignore[method-assign]


def flows(gate: Gate) -> list[tuple[str, str | None]]:
    return gate.store.rows("SELECT state, tag FROM decision_flows ORDER BY rowid")


def in_a_fork(work: Callable[[], object]) -> int:
    """Do something in a process that is forked off; return its exit code: 0, unless it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 on: what it warns of is what is tested
        child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
