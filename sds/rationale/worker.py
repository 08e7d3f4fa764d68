"""The rationale after the decision: the answer is out, the order is sent, then the model says why.

One thread and one bounded queue. What does not fit, fails, or is late is skipped, and the log says so: the decision
stands without it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

from sds.engines.protocol import Explains
from sds.kernel.context.rationale import explain
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import SdsError
from sds.kernel.flow.kernel import Kernel
from sds.models.protocol import ENDINGS

QUEUE_MAX = 64
DRAIN_S_MAX = 5.0

Log = Callable[[str, Mapping[str, object]], None]


class Rationales:
    """Has rationales written and recorded, in the order of the decisions. Safe in several threads."""

    def __init__(self, kernel: Kernel, writer: Explains, *, now_ms: Callable[[], int], log: Log) -> None:
        self._kernel, self._writer, self._now_ms, self._log = kernel, writer, now_ms, log
        self._jobs: deque[tuple[DecisionPacket, bytes]] = deque()
        self._changed = threading.Condition()
        self._recording = threading.Lock()
        self._closed = self._abandoned = False
        self._worker: threading.Thread | None = None

    def ask(self, packet: DecisionPacket, data: bytes) -> None:
        """Have a rationale of this decision written some time, or skip it; never waits."""
        with self._changed:
            why = "CLOSED" if self._closed else "QUEUE_FULL" if len(self._jobs) >= QUEUE_MAX else self._start()
            if not why:
                self._jobs.append((packet, data))
                self._changed.notify()
        if why:
            self._skip(packet, why)

    def close(self, drain_s: float = DRAIN_S_MAX) -> None:
        """Take no more; let what waits be written for at most `drain_s`, then skip the rest."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._worker is not None:
            self._worker.join(drain_s)
        with self._recording:  # from here on nothing more is recorded: the store may be closed
            self._abandoned = True
        while (job := self._next(wait=False)) is not None:
            self._skip(job[0], "CLOSED")

    def _start(self) -> str:
        """Start the worker with the first decision; return why it cannot be."""
        if self._worker is None:  # a daemon: an engine that hangs does not keep the process alive
            worker = threading.Thread(target=self._work, name="sds-rationales", daemon=True)
            try:
                worker.start()
            except RuntimeError:  # the machine has no thread to spare
                return "NO_THREAD"
            self._worker = worker
        return ""

    def _work(self) -> None:
        while (job := self._next(wait=True)) is not None:
            self._write(*job)

    def _next(self, *, wait: bool) -> tuple[DecisionPacket, bytes] | None:
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._jobs or self._closed)
            return self._jobs.popleft() if self._jobs else None

    def _write(self, packet: DecisionPacket, data: bytes) -> None:
        contract = self._kernel.contract
        deadline_ms = self._now_ms() + contract.budget.ttl_ms
        try:
            text = self._writer.explain(packet, data, chars_max=contract.explanation_chars_max, deadline_ms=deadline_ms)
            with self._recording:
                if not self._abandoned:
                    explain(self._kernel.store, contract, packet.dfid, text, now_ms=self._now_ms())
                    self._log("rationale.recorded", {"dfid": packet.dfid})
                    return
            self._skip(packet, "CLOSED")
        except SdsError as error:
            self._skip(packet, error.reason_code)
        except ENDINGS:
            raise
        except BaseException as error:  # noqa: BLE001  an engine may fail in any way; the decision stands
            self._skip(packet, type(error).__name__)

    def _skip(self, packet: DecisionPacket, why: str) -> None:
        self._log("rationale.skipped", {"dfid": packet.dfid, "reason": why})
