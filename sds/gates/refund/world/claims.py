"""Claims: texts of the corpus, each for a latent cause that only the adjudication knows.

The corpus (`sds/gates/refund/corpus`) was written for this project in 13 styles. Some texts press on the reader's
feelings, others try to give a model orders. The queue draws only from the test part, which no reader was fitted on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

from sds.kernel.errors import StateError

from .flights import Flight

Part = Literal["train", "calibrate", "test"]

CORPUS = Path(__file__).parents[1] / "corpus"
TEXT_CHARS_MAX = 780
SEVERE = frozenset({"storm", "snow", "fog", "wind"})


class Cause(Enum):
    """The cause of an incident, as the passenger heard it from the airline."""

    TECHNICAL = "technical"
    CREW = "crew"
    LATE_INBOUND = "late_inbound"
    OPERATIONS = "operations"
    WEATHER = "weather"
    ATC_STRIKE = "atc_strike"
    SECURITY = "security"
    BIRD_STRIKE = "bird_strike"
    UNSTATED = "unstated"


@dataclass(frozen=True, slots=True)
class CorpusText:
    """One text of the corpus, the cause that it states, and its style."""

    text: str
    cause: Cause
    style: str


@dataclass(frozen=True, slots=True)
class Claim:
    """One trigger. The fields after `text` are latent: the adjudication sees them, the model never does."""

    claim_id: str
    ticket_id: str
    text: str
    cause: Cause
    style: str

    @property
    def event(self) -> dict[str, str]:
        """The trigger as it arrives from outside."""
        return {"claim_id": self.claim_id, "ticket_id": self.ticket_id, "claim_text": self.text}


_WEIGHTS = {
    Cause.TECHNICAL: 24,
    Cause.CREW: 12,
    Cause.LATE_INBOUND: 18,
    Cause.OPERATIONS: 10,
    Cause.WEATHER: 8,
    Cause.ATC_STRIKE: 7,
    Cause.SECURITY: 5,
    Cause.BIRD_STRIKE: 3,
    Cause.UNSTATED: 13,
}
WEATHER_WEIGHT_WHEN_SEVERE = 240


@cache
def corpus(part: Part) -> tuple[CorpusText, ...]:
    """Return the texts of one part, in order. Raises StateError where the file is missing or malformed."""
    path = CORPUS / f"{part}.jsonl"
    try:
        lines = map(json.loads, path.read_text(encoding="ascii").splitlines())
        return tuple(CorpusText(line["text"], Cause(line["cause"]), line["style"]) for line in lines)
    except (OSError, ValueError, KeyError) as error:
        raise StateError(f"`{path}` cannot be read", hint="install this package again") from error


class Deck:
    """Deals texts of a cause in a random order, each once before any comes again."""

    def __init__(self, texts: tuple[CorpusText, ...]) -> None:
        self._texts: Mapping[Cause, list[CorpusText]] = {
            cause: [text for text in texts if text.cause is cause] for cause in Cause
        }
        self._left = dict[Cause, list[CorpusText]]()

    def deal(self, cause: Cause, rng: Random) -> CorpusText:
        if not self._left.get(cause):
            self._left[cause] = rng.sample(self._texts[cause], len(self._texts[cause]))
        return self._left[cause].pop()


def weights_of(weather: str) -> dict[Cause, int]:
    """Return how often each cause is stated. Severe weather on record makes the weather likely, but not the only cause."""
    return _WEIGHTS | ({Cause.WEATHER: WEATHER_WEIGHT_WHEN_SEVERE} if weather in SEVERE else {})


def write_claim(claim_id: str, ticket_id: str, flight: Flight, deck: Deck, rng: Random) -> Claim:
    """Make a claim about a flight: printable ASCII, at most `TEXT_CHARS_MAX` characters."""
    weights = weights_of(flight.weather)
    written = deck.deal(rng.choices(tuple(weights), tuple(weights.values()))[0], rng)
    return Claim(claim_id, ticket_id, written.text, written.cause, written.style)
