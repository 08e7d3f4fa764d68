"""Cases that wait for a human, and humans at their desk: what several tests of their decisions share."""

from __future__ import annotations

import pytest

from sds.kernel.decision.packet import Decoding
from sds.kernel.errors import SdsError, UsageError, WorldError
from sds.kernel.executor.protocol import Receipt
from sds.kernel.flow.states import Answer
from sds.kernel.human.cases import Decision
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Store
from tests.kernel.durable import Propose, World, contract, escalate, refund

ALWAYS = (
    "escalation: {per_hour: 1000000}",
    "escalation: {always: [COMPENSATE, REFUND_TICKET, DENY], impact_high_minor: 50000, per_hour: 1000}",
)
HUMAN = """
human:
  kinds:
    GOODWILL:
      params: {amount: {lo: 0, hi: 5000, scale: 2}}
      spends: amount
      impact: LOW
      reasons: [SHORT_DELAY, APOLOGY]
"""
TERMS = contract(ALWAYS, more=HUMAN)
HOUR_MS = 3_600_000
# Reasons of which nothing can be seen: blanks, control characters, half a character, zero width, fillers and selectors
NO_REASONS = (
    "",
    " ",
    "\t\n",
    "\x00\x1b\x7f",
    "\udcff",
    "\u200b\u2060\ufeff",
    "\u202e",
    "\u3164\u2800",
    "\ufe0f \U000e0100",
)


def escalated(world: World, propose: Propose = escalate, name: str = "C1", ticket: str = "T1") -> str:
    """Let the agent hand a case over; return its flow, two hours later."""
    packet = world.packet(name, ticket)
    answer = world.kernel.decide(packet, propose(packet), Decoding(confidence=0.5))
    assert "ESCALATED" == answer.state
    world.clock.advance(2 * HOUR_MS)
    return answer.dfid


def desk(world: World, store: Store | None = None) -> HumanReview:
    return HumanReview(world.open_kernel(store), now_ms=world.clock)


def change(action: str, reason: str, **params: str) -> str:
    numbers = ",".join(f'"{name}":{text}' for name, text in params.items())
    return f'{{"action":"{action}","params":{{{numbers}}},"reason":"{reason}"}}'


PAY = change("REFUND_TICKET", "NOT_TRAVELLED", amount="40.00")
SORRY = change("GOODWILL", "APOLOGY", amount="50.00")


def resolve(
    world: World,
    dfid: str,
    decision: Decision,
    text: str = "",
    *,
    seen: str = "",
    acknowledged: bool = True,
    who: str = "ada",
    store: Store | None = None,
) -> Answer:
    wanted = Resolution(decision, who, "looked into it", text, seen, acknowledged)
    return desk(world, store).resolve(dfid, wanted)


def refused(world: World, dfid: str, decision: Decision, text: str = "", **how: object) -> SdsError:
    """Return the refusal of a resolution, having made sure that it has changed nothing."""
    before = ledger.head(world.store), list(world.rail.sent)
    with pytest.raises((UsageError, WorldError)) as caught:
        resolve(world, dfid, decision, text, **how)  # type: ignore[arg-type]  # passed on by name
    assert before == (ledger.head(world.store), world.rail.sent)
    assert [] == world.column("SELECT 1 FROM human_decisions WHERE dfid = ?", dfid)
    assert ["ESCALATED"] == world.column("SELECT state FROM decision_flows WHERE dfid = ?", dfid)
    return caught.value


class Silent:
    """A rail that carries out what it is sent and never answers, and can neither look up nor void."""

    idempotent = False

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.known = Receipt("unknown")

    def dispatch(self, intent: object, key: str, deadline_s: float) -> Receipt:
        self.sent.append(key)
        return Receipt("unknown")

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return self.known


def unknown(world: World, silent: Silent) -> str:
    """Return a flow whose order was sent, and whose end nobody knows."""
    dfid = escalated(world, refund("40.00"))
    kernel = world.open_kernel(executor=silent)
    at_the_desk = HumanReview(kernel, now_ms=world.clock)
    assert "UNKNOWN" == at_the_desk.resolve(dfid, Resolution("OVERRIDE", "ada", "why", acknowledged=True)).execution
    return dfid
