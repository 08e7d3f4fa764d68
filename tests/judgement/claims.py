"""A small gate with readings, labels for it, and fitters that need no library: words counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any

from sds.definitions.definition import LabelledCase
from sds.judgement.fitting import Fitters, Input, Row
from sds.kernel.canonical import sha256_hex
from sds.kernel.contract.schema import Contract, parse_contract
from sds.models.readers.protocol import Reader, ReaderError, Reading

CLAIMS = """
gate: claims
agent_id: claims-agent
version: 1.0.0
owner: claims@rail.example
effective_from: "2026-01-01"
mission: Decide claims of passengers.
authority: [PAY, DENY]
event: {id: claim_id, key: trip_id, evidence: text}
snapshot: {trip.delay_min: int, trip.open_minor: fixed(2), trip.known: bool}
kinds:
  PAY:
    when: trip.known && trip.open_minor > 0
    params:
      amount: {lo: 100, hi: trip.open_minor, step: 100, scale: 2}
    draws: {trip.open_minor: amount}
    spends: amount
    reasons: [FAULT]
  DENY:
    reasons: [STORM, TOO_SHORT]
readings:
  cause:
    question: Which cause is stated?
    values: {fault: the train broke down, storm: the weather, none: no cause is stated}
policy:
  - {kind: DENY, reason: TOO_SHORT, when: trip.delay_min < 60}
  - {kind: PAY, reason: FAULT, when: 'reading.cause == "fault"', params: {amount: "1000"}}
  - {kind: DENY, reason: STORM, when: 'reading.cause == "storm"'}
  - otherwise: ESCALATE
max_error: 0.05
"""

SCORED = """
  risk:
    question: How likely is it fraud?
    score: [trip.delay_min, reading.cause]
"""

_WORDS = {
    "fault": ["engine", "door", "brake", "motor", "smoke", "broke", "wheel"],
    "storm": ["wind", "snow", "rain", "flood", "tree", "ice", "storm"],
    "none": ["late", "please", "angry", "ticket", "phone", "sorry", "money"],
}
_OTHER = [
    "the",
    "train",
    "was",
    "again",
    "and",
    "we",
    "my",
    "at",
    "in",
    "there",
    "then",
    "because",
    "when",
    "long",
    "night",
]


@cache
def contract(text: str = CLAIMS) -> Contract:
    return parse_contract(text)


@cache
def scored() -> Contract:
    """The same with a score besides that no line needs more than once."""
    text = CLAIMS.replace(
        "policy:\n", SCORED.lstrip("\n") + "policy:\n  - {kind: DENY, reason: STORM, when: reading.risk > 0.9}\n"
    )
    return parse_contract(text)


def cases(count: int, *, seed: int = 1, noise: float = 0.0, risk: bool = False) -> list[LabelledCase]:
    """Return labelled claims, different texts each; of `noise` the text says another cause than is labelled."""
    rng, found = Random(seed), list[LabelledCase]()
    for number in range(count):
        cause = rng.choice(list(_WORDS))
        said = rng.choice(list(_WORDS)) if rng.random() < noise else cause
        words = [*rng.sample(_WORDS[said], 2), *rng.sample(_OTHER, 5)]
        rng.shuffle(words)
        delay = rng.choice([30, 90, 120, 200])
        readings = {"cause": cause} | ({"risk": "1" if cause == "none" and delay > 100 else "0"} if risk else {})
        found.append(
            LabelledCase(
                text=f"{' '.join(words)} {number}",
                fields={"trip.delay_min": delay, "trip.open_minor": 5000, "trip.known": True},
                readings=readings,
                style=rng.choice(["plain", "typos"]),
                amount_minor=1000,
            )
        )
    return found


@dataclass
class WordReader:
    """Naive Bayes over words, from a JSON file; of what it knows no word it is not familiar with."""

    values: tuple[str, ...]
    counts: Mapping[str, Mapping[str, int]]
    sha256: str = ""
    kind: str = "head"
    closed: bool = False

    def read(self, text: str, fields: Any = None, readings: Any = None) -> Reading:
        words = [word for word in text.split() if any(word in each for each in self.counts.values())]
        scores = {value: sum(log(0.1 + self.counts[value].get(word, 0)) for word in words) for value in self.values}
        top = max(scores.values())
        weights = {value: exp(score - top) for value, score in scores.items()}
        total = sum(weights.values())
        return Reading({value: weight / total for value, weight in weights.items()}, familiar=bool(words))

    def close(self) -> None:
        self.closed = True


@dataclass
class RiskReader:
    """Knows the true rule, from the probabilities beside the fields: nothing to learn, something to wire."""

    values: tuple[str, ...] = ("score",)
    sha256: str = ""
    kind: str = "tabular"

    def read(self, text: str, fields: Any = None, readings: Any = None) -> Reading:
        if "trip.delay_min" not in fields:
            raise ReaderError("`trip.delay_min` is missing")
        none = readings["cause"]["none"] if readings else 0.3
        return Reading({"score": none * (fields["trip.delay_min"] > 100)}, familiar=True)

    def close(self) -> None: ...


@dataclass
class Fitted:
    reader_: Any
    is_calibrated: bool = False
    tuned: list[list[Any]] = field(default_factory=list)

    def calibrated(self, first: Sequence[Any], second: Sequence[Any]) -> Fitted:
        assert len(first) == len(second) > 0
        self.tuned.append(list(first))
        return Fitted(self.reader_, is_calibrated=True)

    def export(self, folder: Path) -> str:
        assert self.is_calibrated
        folder.mkdir(parents=True)
        said = json.dumps(
            {"kind": self.reader_.kind, "values": self.reader_.values, "counts": getattr(self.reader_, "counts", {})}
        )
        (folder / "reader.json").write_text(said)
        return sha256_hex(said.encode())

    def reader(self) -> Reader:
        return self.reader_  # type: ignore[no-any-return]


def opened(folder: Path, *, sha256: str = "") -> Reader:
    """Open what `Fitted` exported, as `open_reader` opens a real one."""
    raw = (folder / "reader.json").read_bytes()
    if sha256 and sha256 != sha256_hex(raw):
        raise ReaderError("`reader.json` is not what was fitted")
    said = json.loads(raw)
    if said["kind"] == "tabular":
        return RiskReader(sha256=sha256_hex(raw))
    return WordReader(tuple(said["values"]), said["counts"], sha256_hex(raw))


@dataclass
class Calls:
    """What the fitters were given."""

    texts: list[list[str]] = field(default_factory=list)
    rows: list[list[Row]] = field(default_factory=list)
    tuned: list[list[Row]] = field(default_factory=list)
    inputs: list[Sequence[Input]] = field(default_factory=list)


def fitters(calls: Calls | None = None) -> Fitters:
    calls = calls or Calls()

    def text(
        texts: Sequence[str],
        values: Sequence[str],
        *,
        names: Sequence[str],
        seed: int,
        distractions: Sequence[str] = (),
        on_progress: Callable[..., None] | None,
    ) -> Fitted:
        calls.texts.append(list(texts))
        counts = {name: Counter[str]() for name in names}
        for each, value in zip(texts, values, strict=True):
            counts[value].update(each.split())
        if on_progress:
            on_progress(1, 1, "words")
        return Fitted(WordReader(tuple(names), counts))

    def table(
        rows: Sequence[Row],
        truth: Sequence[bool],
        *,
        inputs: Sequence[Input],
        seed: int,
        on_progress: Callable[..., None] | None,
    ) -> Fitted:
        calls.rows.append(list(rows))
        calls.inputs.append(inputs)
        return Fitted(RiskReader(), tuned=calls.tuned)

    return Fitters("head", text, table, opened, {"name": "words", "sha256": "0" * 64})


def quiet(done: int, total: int, what: str) -> None:
    """See no progress."""
