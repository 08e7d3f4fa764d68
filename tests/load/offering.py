"""Send events to a service: one by one, a few at a time, or at a rate that does not wait for answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from tests.load.wire import Pool, Reply, request_of

ANSWERED_S_MAX = 120.0  # the longest wait for the last answers
QUEUE_EMPTY = "every event of the queue is decided: it is too short for this rate and time"


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. `intended_s`: when it was to be sent; `sent_s`: when it was; `at_s`: of the reply."""

    intended_s: float
    sent_s: float
    at_s: float
    status: int
    state: str = ""
    reason_code: str = ""

    @property
    def latency_ms(self) -> float:
        """The time from the intended moment to the reply, so that the sender's delays count."""
        return (self.at_s - self.intended_s) * 1000

    @property
    def lag_ms(self) -> float:
        """How much later than intended it was sent: the sender's own delay."""
        return (self.sent_s - self.intended_s) * 1000


@dataclass(slots=True)
class Offer:
    """The requests to one gate: its path, a key, the events that are not decided yet, and all outcomes."""

    pool: Pool
    path: str
    key: str
    events: deque[bytes]
    outcomes: list[Outcome] = field(default_factory=list)

    def request(self, event: bytes, deadline_ms: int | None) -> bytes:
        headers = {"Authorization": f"Bearer {self.key}"}
        return request_of(
            self.path, event, headers | ({} if deadline_ms is None else {"Deadline-Ms": str(deadline_ms)})
        )

    def take(self) -> bytes:
        if not self.events:
            raise RuntimeError(QUEUE_EMPTY)
        return self.events.popleft()

    def note(self, event: bytes, intended_s: float, sent_s: float, reply: Reply) -> Outcome:
        """Keep a request's outcome; an event that was not decided goes back to the queue."""
        outcome = Outcome(intended_s, sent_s, reply.at_s, reply.status)
        if reply.status == 200:
            said = json.loads(reply.body)
            outcome.state, outcome.reason_code = said["state"], said["reason_code"] or said["tag"] or ""
        else:
            self.events.append(event)
            if reply.body.startswith(b"{"):
                outcome.reason_code = json.loads(reply.body).get("reason_code", "")
        self.outcomes.append(outcome)
        return outcome


def queue_of(events: Iterable[Mapping[str, object]]) -> deque[bytes]:
    return deque(json.dumps(event).encode() for event in events)


async def one_by_one(offer: Offer, n: int) -> list[Outcome]:
    """Ask for `n` decisions, each after the one before: the cost of one without load."""
    outcomes = list[Outcome]()
    for _ in range(n):
        event, now_s = offer.take(), time.perf_counter()
        outcomes.append(offer.note(event, now_s, now_s, await offer.pool.asked(offer.request(event, None))))
    return outcomes


async def a_few_at_a_time(offer: Offer, clients: int, seconds: float) -> list[Outcome]:
    """Have `clients` clients ask without a pause for `seconds`, to measure the capacity."""
    ends_s = time.perf_counter() + seconds

    async def client() -> list[Outcome]:
        found = list[Outcome]()
        while time.perf_counter() < ends_s:
            found += await one_by_one(offer, 1)
        return found

    return [outcome for found in await asyncio.gather(*(client() for _ in range(clients))) for outcome in found]


async def at_a_rate(offer: Offer, per_s: float, seconds: float, deadline_ms: int, random: Random) -> list[Outcome]:
    """Send requests at random moments (a Poisson process), whether earlier ones are answered or not; wait for all replies."""
    outcomes, began_s = list[Outcome](), time.perf_counter()
    wanted, sending_is_over, all_there, at_s = 0, False, asyncio.Event(), began_s

    def send(intended_s: float) -> None:
        event, sent_s = offer.take(), time.perf_counter()

        def done(reply: Reply) -> None:
            outcomes.append(offer.note(event, intended_s, sent_s, reply))
            if len(outcomes) == wanted and sending_is_over:
                all_there.set()

        offer.pool.ask(offer.request(event, deadline_ms), done)

    while (at_s := at_s + random.expovariate(per_s)) < began_s + seconds:
        if (wait_s := at_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        wanted += 1
        send(at_s)
        if wanted % 16 == 0:
            await asyncio.sleep(0)  # a late sender still reads replies
    sending_is_over = True
    if len(outcomes) < wanted:
        await asyncio.wait_for(all_there.wait(), ANSWERED_S_MAX)
    return outcomes
