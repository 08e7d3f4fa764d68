"""Lookahead: a pass reads tokens beyond those written, on backends that read a few extra tokens cheaply.

The logits after the next choices are then known before these are made. A candidate is read with all it forces:
- for a number, the numbers that the prompt shows, because a model mostly copies the first it can;
- for any other choice, each token that may come next, and the first shown number where that leads to a number.
Candidates that are less likely to save a pass get half the budget: every number but the first, and tokens of which one
leads to a wide number that is not read along. Lookahead decides nothing: a choice falls by the same probabilities, up to
the rounding of another pass's shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

from sds.decoding.probabilities import Text

if TYPE_CHECKING:
    from sds.grammars.tokens.matcher import ChoicePoint, TokenMatcher

SHOWN_MAX = 64
After = tuple[Text, "TokenMatcher"]  # a text with all it forces, and the matcher after it
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Lookahead:
    """A candidate: tokens that may follow those written. `outputs`: after how many of its last tokens logits are wanted."""

    text: Text
    outputs: int = 1


@dataclass(frozen=True, slots=True)
class LookaheadBudget:
    """What may be read: `tokens` distinct tokens in all, at most `longest` in one candidate, on at most `forks` forks."""

    tokens: int
    longest: int
    forks: int

    @property
    def half(self) -> LookaheadBudget:
        return replace(self, tokens=self.tokens // 2)

    def holds(self, each: Sequence[Lookahead]) -> bool:
        if len(each) > self.forks or any(len(one.text) > self.longest for one in each):
            return False
        return len({one.text[:end] for one in each for end in range(1, len(one.text) + 1)}) <= self.tokens


def numbers_shown(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct numbers in a prompt, at most SHOWN_MAX; those of its first, static text come last."""
    found = chain.from_iterable(_NUMBER.findall(text) for text in (*texts[1:], *texts[:1]))
    return tuple(dict.fromkeys(found))[:SHOWN_MAX]


def lookahead_alternatives(
    matcher: TokenMatcher, shown: Sequence[str], forced_after: Callable[[Text], After], budget: LookaheadBudget
) -> list[Lookahead]:
    """Return what to read so that each whole alternative gets its probability.

    Each is read with what it forces and the shown number behind it where the budget holds all of these; else up to its
    last token but one; not at all where even that is over the budget.
    """
    texts = [tuple(text) for _, text in matcher.alternatives()]

    def reading(reads: Iterable[Text]) -> list[Lookahead]:
        found = [Lookahead(read, len(read)) for read in dict.fromkeys(reads) if read]
        return found if budget.holds(found) else []

    least = reading(text[:-1] for text in texts)
    if not least:
        return []
    after = [forced_after(text) for text in texts]
    every = reading(read or text[:-1] for text, (read, _) in zip(texts, after, strict=True))
    behind = [copy for copy, _ in _numbers_behind(dict(each for each in after if each[0]), shown, forced_after)]
    return [*every, *behind] if every and budget.holds([*every, *behind]) else every or least


def lookahead_tokens(
    matcher: TokenMatcher,
    point: ChoicePoint,
    shown: Sequence[str],
    forced_after: Callable[[Text], After],
    budget: LookaheadBudget,
) -> list[Lookahead]:
    """Return what to read before the choice at `point` is made; nothing where that is over the budget.

    `forced_after(text)`: the text with what it forces (empty where it ends the decision), and the matcher after it.
    """
    numbers = list[Lookahead]()
    for number in _shown_here(matcher, shown):
        read = forced_after(number)[0] or number[:-1]  # the last token of a decision is never read
        more = [*numbers, Lookahead(read, len(read))] if read else numbers
        if not (budget.half if numbers else budget).holds(more):
            break
        numbers = more
    if numbers or len(point.tokens) > budget.tokens:
        return numbers
    every = {text: after for text, after in (forced_after((token,)) for token in point.tokens.tolist()) if text}
    plain = [Lookahead(text) for text in every]
    behind = _numbers_behind(every, shown, forced_after)
    numbers = [copy for copy, _ in behind]
    wide = {text for text, after in every.items() if _is_wide(after.choice_point())}
    if wide <= {text for _, text in behind} and budget.holds([*plain, *numbers]):
        return [*plain, *numbers]
    return plain if (budget.half if wide else budget).holds(plain) else []


def _numbers_behind(
    every: Mapping[Text, TokenMatcher], shown: Sequence[str], forced_after: Callable[[Text], After]
) -> list[tuple[Lookahead, Text]]:
    """Return a candidate for each text that a shown number may follow: the text, the first such number and what that
    forces. With it, the text itself.
    """
    found = list[tuple[Lookahead, Text]]()
    for text, after in every.items():
        for number in islice(_shown_here(after, shown), 1):
            whole = forced_after((*text, *number))[0] or (*text, *number[:-1])
            found.append((Lookahead(whole, max(1, len(whole) - len(text))), text))
    return found


def _shown_here(matcher: TokenMatcher, shown: Iterable[str]) -> Iterator[Text]:
    """Yield the tokens of those shown numbers that may be written next."""
    return filter(None, map(matcher.tokens_for, shown))


def _is_wide(point: ChoicePoint) -> bool:
    return bool(point.labels) and not point.finite
