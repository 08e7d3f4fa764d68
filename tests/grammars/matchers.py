"""Matchers driven to their end, and the envelopes they are made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from sds.grammars.tokens.matcher import ChoicePoint, TokenMatcher
from sds.kernel.envelope.envelope import DENY, ESCALATE_ONLY, Bound, DecisionEnvelope, KindBound, bound, envelope_of
from tests.scale import seeded
from tests.strategies import random_envelope

STEPS_MAX = 4000

Picking = Callable[[ChoicePoint], int]


def some(**params: Bound | None) -> DecisionEnvelope:
    chosen = tuple((name, allowed) for name, allowed in params.items() if allowed)
    return envelope_of([KindBound("PAY", ("LATE", "LATER"), chosen), KindBound(DENY, ("LATE", "NO"))])


def finished_by(matcher: TokenMatcher, pick: Picking) -> TokenMatcher:
    """Go to the end, choosing by `pick` an index into the tokens of each choice point."""
    for _ in range(STEPS_MAX):
        matcher.accept_forced()
        if matcher.finished:
            return matcher
        point = matcher.choice_point()
        matcher.accept(int(point.tokens[pick(point)]))
    raise AssertionError("the matcher does not end")


def at_random(rng: Random) -> Picking:
    return lambda point: rng.randrange(len(point.tokens))


def taken(matcher: TokenMatcher, *labels: str) -> None:
    """Take the token that leaves these labels open."""
    matcher.accept_forced()
    point = matcher.choice_point()
    matcher.accept(int(point.tokens[point.labels.index(labels)]))
    matcher.accept_forced()


def every_end(matcher: TokenMatcher) -> Iterator[TokenMatcher]:
    matcher.accept_forced()
    if matcher.finished:
        yield matcher
        return
    for token in matcher.choice_point().tokens.tolist():
        copied = matcher.copy()
        copied.accept(token)
        yield from every_end(copied)


SMALL = {
    "nothing but escalation": ESCALATE_ONLY,
    "two scales": some(amount=bound(95, 105, step=5, scale=2), days=bound(0, 12)),
    "below zero": some(amount=bound(-13, -1), days=bound(-250, -100, step=25, scale=1)),
    "around zero": some(amount=bound(-11, 11), days=bound(-20, 20, step=7, residue=3, scale=1)),
    "one value": some(amount=bound(-250, -250, scale=2), amount_extra=bound(7, 7), days=bound(1, 2)),
    "one end is the beginning of another": some(amount=bound(1, 1000, step=9)),
    "kinds and reasons that begin alike": envelope_of(
        [
            KindBound("PAY", ("A", "A0", "LATE", "LATER", "LATE_R"), (("x", bound(0, 1)),)),  # type: ignore[arg-type]
            KindBound("PAY_LATER", ("A",), (("x", bound(-1, 1)),)),  # type: ignore[arg-type]
            KindBound("PAYS", ("A", "AA")),
            KindBound(DENY, ("CREW", "CREWS")),
        ]
    ),
}
FEW = {name: envelope for name, envelope in SMALL.items() if name != "one end is the beginning of another"} | {
    "few, and one end is the beginning of another": some(amount=bound(1, 1000, step=37), days=bound(9, 11)),
}


def pool(seed: int, count: int, rationale: bool | None = None) -> Iterator[tuple[Random, DecisionEnvelope]]:
    rng = seeded(seed)
    while count:
        envelope = random_envelope(rng.randint)
        if rationale is None or rationale == bool(envelope.rationale_chars_max):
            count -= 1
            yield rng, envelope
