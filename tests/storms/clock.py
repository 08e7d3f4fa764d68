"""Clocks of three processes jump by seconds, hours and days, forwards and back, during decisions."""

from __future__ import annotations

import time
from functools import partial
from random import Random

from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.attack.figures import Figure, measured, none
from tests.attack.forks import in_child, in_children
from tests.attack.outside import Bank
from tests.attack.testbed import Clock, Teller, Testbed, contract

from .ground import Ground, bed_of, decide, reckon

WHAT = "the clock of each of 3 processes jumps, up to a month, forwards and back, in the middle of decisions"
PROCESSES = 3
SECOND_MS, HOUR_MS, DAY_MS = 1_000, 3_600_000, 86_400_000
JUMPS_MS = tuple(sign * jump for jump in (0, SECOND_MS, HOUR_MS, DAY_MS, 30 * DAY_MS) for sign in (-1, 1))
TTL_MS, DISPATCH_MS = 600, 400
TOOK_S_MAX = 15.0  # for one decision, on a busy machine; a clock that goes back must not lengthen its waits
JUMPS = 0.3  # probability of a jump
FOREIGN = 0.1  # share of the other processes' events, which were decided by another clock


class Jumping:
    """Sets a clock off by one of JUMPS_MS now and then, and counts that."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        self._clock, self._rng = clock, rng
        self.count = 0

    def __call__(self) -> None:
        if self._rng.random() < JUMPS:
            self._clock.ahead_ms = self._rng.choice(JUMPS_MS)
            self.count += 1


class JumpyTeller(Teller):
    def __init__(self, jump: Jumping) -> None:
        self._jump = jump

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        self._jump()
        return super().propose(packet, tokens_max=tokens_max)


class JumpyBank(Bank):
    def __init__(self, bed: Testbed, jump: Jumping) -> None:
        super().__init__(bed.folder / "bank.db", bed.clock)
        self._jump = jump

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self._jump()
        receipt = super().dispatch(intent, key, deadline_s)
        self._jump()
        return receipt


def storm(ground: Ground) -> list[Figure]:
    bed = bed_of(ground, contract(ttl_ms=TTL_MS, dispatch_ms=DISPATCH_MS))
    bed.open_accounts(range(ground.n))
    in_child(lambda: bed.gate().close())
    parts = [partial(_work, bed, part, ground.n, Random(ground.rng.random())) for part in range(PROCESSES)]
    jumps, slow = zip(*in_children(parts, PROCESSES), strict=True)
    return [
        measured("jumps", sum(jumps)),
        none("processes whose clock never jumped", jumps.count(0)),
        none(f"decisions that took longer than {TOOK_S_MAX:.0f} s", sum(slow)),
        *reckon(bed, range(ground.n)),
    ]


def _work(bed: Testbed, part: int, n: int, rng: Random) -> tuple[int, int]:
    """Decide one share of the events, and some of the others'; return the numbers of jumps and of slow decisions."""
    slow, jump = 0, Jumping(bed.clock, rng)
    numbers = [number for number in range(n) if number % PROCESSES == part or rng.random() < FOREIGN]
    with bed.gate(engine=JumpyTeller(jump), executor=JumpyBank(bed, jump)) as gate:
        for number in numbers:
            jump()
            began = time.monotonic()
            decide(gate, bed, number)
            slow += time.monotonic() - began > TOOK_S_MAX
            if rng.random() < JUMPS:
                gate.recover()
    return jump.count, slow
