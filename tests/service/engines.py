"""Engines that wait: for a test to let them go, or for some milliseconds."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.flow.intake import PREVIEW
from tests.proposers import Greedy
from tests.service.operations.waiting import wait_until


class Held(Greedy):
    """Decides nothing until it is let go; `entered` counts who waits, or has waited."""

    def __init__(self) -> None:
        super().__init__("WAIVE")
        self.let_go = threading.Event()
        self.entered = threading.Semaphore(0)

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        if packet.dfid != PREVIEW:  # what health asks for
            self.entered.release()
            assert self.let_go.wait(20)
        return super().propose(packet, tokens_max=tokens_max)


class HeldByFiles(Greedy):
    """The same for a process of its own: the file `entered` says that one waits, and `let-go` lets them go."""

    def __init__(self, folder: Path) -> None:
        super().__init__("WAIVE")
        self.entered, self.let_go = folder / "entered", folder / "let-go"

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        if packet.dfid != PREVIEW:
            self.entered.touch()
            wait_until(self.let_go.exists)
        return super().propose(packet, tokens_max=tokens_max)


class Slow(Greedy):
    """Takes `takes_s` for each decision."""

    def __init__(self, takes_s: float) -> None:
        super().__init__("WAIVE")
        self.takes_s = takes_s

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        if packet.dfid != PREVIEW:
            time.sleep(self.takes_s)
        return super().propose(packet, tokens_max=tokens_max)
