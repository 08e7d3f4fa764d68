"""Readers that say what a test gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from sds.engines.breaker import Breaker
from sds.engines.protocol import Engine
from sds.kernel.contract.schema import Contract, parse_contract
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import ModelError
from sds.models.readers.protocol import Reading
from sds.policy.distribution import Readings
from sds.policy.engine import PolicyEngine
from sds.policy.judgement import Threshold
from sds.policy.language_model import LanguageModel
from tests.kernel import world

SECTIONS = """\
readings:
  mood:
    question: How does the customer write?
    values: {calm: without anger, angry: with anger, odd: like nobody}
  risk: {question: 'Should it be feared?', score: [claim.minutes, reading.mood]}
policy:
  - {kind: DENY, reason: NOT_OWED, when: "reading.risk > 0.8"}
  - {kind: PAY, reason: LATE, when: "reading.mood == 'angry'", params: {amount: "min(account.left, 500)"}}
  - {kind: PAY, reason: OWED, when: "reading.mood == 'odd' && claim.minutes < 90", params: {amount: "min(account.left, 500)"}}
  - {kind: GRANT, reason: GRANTED, when: claim.minutes > 90}
  - {kind: ESCALATE, when: claim.minutes == 13}
  - otherwise: MODEL
"""


def contract(more: str = "", *edits: tuple[str, str]) -> Contract:
    text = world.edited(*edits) + SECTIONS + more
    return parse_contract(text)


@dataclass
class Says:
    """One reading. `found`: what it was given of the readings before it, call by call."""

    probabilities: Mapping[str, float]
    familiar: bool = True
    error: Exception | None = None
    name: str = "scripted"
    found: list[Readings] = field(default_factory=list)

    def answer(self, packet: DecisionPacket, found: Readings) -> Reading:
        self.found.append(found)
        if self.error is not None:
            raise self.error
        return Reading(dict(self.probabilities), self.familiar)


def on_demand(engine: Engine) -> LanguageModel:
    """Return an engine as the language model that a policy needs, under a clock that stands still."""
    breaker = Breaker(whole_ms=1_000, now_ms=lambda: world.NOW_MS)
    return LanguageModel(lambda: engine, needed=True, breaker=breaker)


def no_model() -> LanguageModel:
    """Return a language model that does not open."""

    def refuse() -> Engine:
        raise ModelError("no language model here")

    breaker = Breaker(whole_ms=1_000, now_ms=lambda: world.NOW_MS)
    return LanguageModel(refuse, needed=False, breaker=breaker)


def engine_of(
    terms: Contract,
    mood: Says,
    risk: float = 0.1,
    *,
    least: float | None = None,
    language_model: LanguageModel | None = None,
    now_ms: Callable[[], int] = lambda: world.NOW_MS,
) -> PolicyEngine:
    thresholds = {
        kind: Threshold(max_error=str(Decimal("0.02")), least=least, accepted=0, wrong=0, missing=0)
        for kind in terms.kinds
    }
    return PolicyEngine(
        terms,
        {"mood": mood, "risk": Says({"score": risk})},
        thresholds,
        language_model=language_model or no_model(),
        now_ms=now_ms,
        facts={"mode": "policy", "judgement": "ab" * 32},
    )
