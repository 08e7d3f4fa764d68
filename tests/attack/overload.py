"""Events at ten times the engine's speed, through the real queue: no human is asked, no agent suspended, all are decided."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from random import Random

from sds import Gate
from sds.engines.scheduler import Scheduler
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.flow.states import Answer
from sds.kernel.registry.registry import agents
from sds.models.protocol import Row
from tests.engines.batches import make
from tests.engines.hashing import HashBackend, Logits
from tests.scale import scale

from .figures import Figure, every, measured, none
from .testbed import Clock, Teller, Testbed, contract, faults

SLOTS, PASS_S, TOKENS = 2, 0.01, 3
SPEED_PER_S = SLOTS / (PASS_S * TOKENS)  # the engine's highest rate
TIMES = 10
QUEUE_MAX = 40
CALLERS = 64
PATIENCE_S = (0.05, 1.0)  # between two tries of a caller: at first, and at most


class SlowBackend(HashBackend):
    """A backend of known speed."""

    def run(self, rows: Sequence[Row]) -> list[Logits]:
        time.sleep(PASS_S)
        return super().run(rows)


class Queued(Teller):
    """The teller, at the speed of a model behind the scheduler's queue."""

    def __init__(self, clock: Clock) -> None:
        self._scheduler = Scheduler(SlowBackend(SLOTS), now_ms=clock, queue_max=QUEUE_MAX)
        self._numbers = count()

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        sections = [[1, 2, 3], [next(self._numbers) % 17]]
        self._scheduler.submit(make(sections, TOKENS), sections, packet.expires_at_ms)
        return super().propose(packet, tokens_max=tokens_max)

    def close(self) -> None:
        self._scheduler.close()


class Callers:
    """Sends each event when it is due, and again while the answer is `retryable`."""

    def __init__(self, bed: Testbed, gate: Gate, rng: Random) -> None:
        self._bed, self._gate = bed, gate
        self._began = time.monotonic()
        self._jitter = [rng.uniform(0.5, 1.5) for _ in range(97)]
        self.refused: Counter[str] = Counter()

    def settle(self, number: int) -> Answer:
        time.sleep(max(0.0, self._began + number / (TIMES * SPEED_PER_S) - time.monotonic()))
        pause_s, longest_s = PATIENCE_S
        while (answer := self._gate.decide(self._bed.event(number))).retryable:
            self.refused[str(answer.reason_code)] += 1
            time.sleep(pause_s * self._jitter[number % len(self._jitter)])
            pause_s = min(longest_s, 2 * pause_s)
        return answer


def attack(folder: Path, rng: Random) -> list[Figure]:
    events = scale(150, 1_000)
    bed = Testbed(folder, terms=contract(ttl_ms=4_000))
    bed.open_accounts(range(events))
    engine = Queued(bed.clock)
    with bed.gate(engine=engine) as gate, ThreadPoolExecutor(CALLERS) as pool:
        callers = Callers(bed, gate, rng)
        answers = list(pool.map(callers.settle, range(events)))
        refused = callers.refused
        found = [
            measured(f"events at {TIMES} times the engine's {SPEED_PER_S:.0f} a second, {CALLERS} callers", events),
            *(measured(f"times sent back for {code}", times) for code, times in refused.most_common()),
            every("paid in the end", sum(answer.execution == "SUCCESS" for answer in answers), events),
            none("escalated", len(gate.escalations())),
            every("agents ACTIVE", [agent.status for agent in agents(gate.store)].count("ACTIVE"), 1),
            none("paid twice", bed.paid_twice()),
            none("faults of the record", faults(gate)),
        ]
    engine.close()
    return [*found, Figure("the queue was too short, as it should be", int(refused.total() > 0), 1)]
