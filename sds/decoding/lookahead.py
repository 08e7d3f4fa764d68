"""What a decision reads beyond what it has written, where a pass reads some tokens more for next to nothing.

Then what the model says after the next choices is known before they are made. Of a number, those that the prompt
shows are read, for a model that writes one mostly copies the first it can; of any other choice, each token that may
come next, and where that leads to a number, the first one shown that may stand there. All with what they force. What is
less sure to save a pass has half the room: the second number and those after it, and tokens one of which leads to a
wide number that is not read along. What is read decides nothing: a choice falls by the same probabilities, up to the
rounding of another pass's shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sds.decoding.prefixes import Logits, Text

if TYPE_CHECKING:
    from sds.grammars.tokens.matcher import ChoicePoint, TokenMatcher

SHOWN_MAX = 64
After = tuple[Text, "TokenMatcher"]
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Tokens behind those written. What the model says after each of the last `outputs` of them is wanted."""

    text: Text
    outputs: int = 1


@dataclass(frozen=True, slots=True)
class LookaheadBudget:
    """How much may be read: so many different tokens, so many one behind the other, on so many forks."""

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


class LookaheadCache:
    """What is known to follow texts that go on from one place, and which forks hold such a text, read to its end."""

    def __init__(self) -> None:
        self._known: dict[Text, tuple[Logits, int | None]] = {}

    def note(self, beyond: Lookahead, fork: int, logits: NDArray[np.float32]) -> None:
        """`logits`: [outputs, vocab_size]."""
        for left, after in enumerate(reversed(logits)):
            self._known[beyond.text[: len(beyond.text) - left]] = after, None if left else fork

    def __contains__(self, text: Sequence[int]) -> bool:
        return tuple(text) in self._known

    @property
    def logits(self) -> dict[Text, Logits]:
        """What the model says after each text that was read."""
        return {text: logits for text, (logits, _) in self._known.items()}

    @property
    def forks(self) -> set[int]:
        return {fork for _, fork in self._known.values() if fork is not None}

    def follow(self, text: Sequence[int]) -> tuple[Logits, int | None] | None:
        """Return what comes after this text and the fork that holds it, if any; forget what does not begin with it.

        Where there is such a fork, what is left goes on from there.
        """
        path = tuple(text)
        self._known = {other: known for other, known in self._known.items() if other[: len(path)] == path}
        found = self._known.get(path)
        if found is not None and found[1] is not None:
            del self._known[path]
            self._known = {other[len(path) :]: known for other, known in self._known.items()}
        return found


def numbers_shown(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the numbers that a prompt shows; last those of what never changes, which comes first in it."""
    found = chain.from_iterable(_NUMBER.findall(text) for text in (*texts[1:], *texts[:1]))
    return tuple(dict.fromkeys(found))[:SHOWN_MAX]


def wholes(
    matcher: TokenMatcher, shown: Sequence[str], forced_after: Callable[[Text], After], room: LookaheadBudget
) -> list[Lookahead]:
    """Return what to read so that each alternative gets its probability as a whole: with what it forces, and the number
    shown behind that, where there is room for all; to its last token but one otherwise; nothing where even that is too much.
    """
    texts = [tuple(text) for _, text in matcher.alternatives()]

    def reading(reads: Iterable[Text]) -> list[Lookahead]:
        found = [Lookahead(read, len(read)) for read in dict.fromkeys(reads) if read]
        return found if room.holds(found) else []

    least = reading(text[:-1] for text in texts)
    if not least:
        return []
    after = [forced_after(text) for text in texts]
    every = reading(read or text[:-1] for text, (read, _) in zip(texts, after, strict=True))
    behind = [copy for copy, _ in _numbers_behind(dict(each for each in after if each[0]), shown, forced_after)]
    return [*every, *behind] if every and room.holds([*every, *behind]) else every or least


def further(
    matcher: TokenMatcher,
    fork: ChoicePoint,
    shown: Sequence[str],
    forced_after: Callable[[Text], After],
    room: LookaheadBudget,
) -> list[Lookahead]:
    """Return what to read while `fork`, where `matcher` stands, is not decided yet; nothing where that is too much.

    `forced_after`: all that must be read of a text and what it forces, nothing where it ends the decision, and the matcher
    behind it.
    """
    numbers = list[Lookahead]()
    for number in _shown_here(matcher, shown):
        read = forced_after(number)[0] or number[:-1]  # of what ends the decision not the last token
        more = [*numbers, Lookahead(read, len(read))] if read else numbers
        if not (room.half if numbers else room).holds(more):
            break
        numbers = more
    if numbers or len(fork.tokens) > room.tokens:
        return numbers
    every = {text: after for text, after in (forced_after((token,)) for token in fork.tokens.tolist()) if text}
    plain = [Lookahead(text) for text in every]
    behind = _numbers_behind(every, shown, forced_after)
    numbers = [copy for copy, _ in behind]
    wide = {text for text, after in every.items() if _is_wide(after.choice_point())}
    if wide <= {text for _, text in behind} and room.holds([*plain, *numbers]):
        return [*plain, *numbers]
    return plain if (room.half if wide else room).holds(plain) else []


def _numbers_behind(
    every: Mapping[Text, TokenMatcher], shown: Sequence[str], forced_after: Callable[[Text], After]
) -> list[tuple[Lookahead, Text]]:
    """Return each of these texts behind which a number that is shown may stand: with the first such number and what that
    forces, and as it is.
    """
    found = list[tuple[Lookahead, Text]]()
    for text, after in every.items():
        for number in islice(_shown_here(after, shown), 1):
            whole = forced_after((*text, *number))[0] or (*text, *number[:-1])
            found.append((Lookahead(whole, max(1, len(whole) - len(text))), text))
    return found


def _shown_here(matcher: TokenMatcher, shown: Iterable[str]) -> Iterator[Text]:
    """Yield the tokens of those numbers that may be written next."""
    return filter(None, map(matcher.tokens_for, shown))


def _is_wide(fork: ChoicePoint) -> bool:
    return bool(fork.labels) and not fork.finite
