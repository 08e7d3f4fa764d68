"""The likeliest whole number of too many values to be listed: a search over its prefixes, the likeliest first.

A number is never likelier than its prefix, so the first that comes off the heap whole is the likeliest of all. It knows
tokens and slots, and nothing of what the number means.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush, nsmallest
from typing import TYPE_CHECKING

import numpy as np

from sds.decoding.errors import check_tokens
from sds.decoding.probabilities import Logits, Passing, best_of, log_mass
from sds.models.protocol import Row

if TYPE_CHECKING:
    from sds.grammars.tokens.matcher import ChoicePoint, TokenMatcher

PREFIXES_MAX = 64  # that come off the heap before the search is given up
WAVE_MAX = 4  # how many are read in one pass: the one that is due, and the next ones where these are nearly as likely,
WAVE_LOGP = 2.0  # by this

Step = tuple["ChoicePoint", int, Logits]


@dataclass(frozen=True, slots=True)
class Reader:
    """How the search reads on behind `slot`, which it leaves as it is, with at most `forks_max` forks at once; a decision
    of more than `tokens_max` tokens ends it.
    """

    slot: int
    forks_max: int
    tokens_max: int
    fork: Callable[[int], int]
    drop: Callable[[Sequence[int]], None]
    run: Callable[[list[Row]], Passing]


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The number found. `steps`: for each token that was a choice: its choice point, the token, the logits there. `slot`: a
    fork that has read the first `read` tokens of it; whoever asked drops it, and the others. `close`: whether noise might
    have made another the likeliest.
    """

    steps: tuple[Step, ...]
    slot: int | None
    read: int
    close: bool


@dataclass(slots=True, eq=False)
class _Prefix:
    """A prefix of the number. `score`: the log-probability of its tokens, of `path` once it was read."""

    matcher: TokenMatcher
    path: tuple[int, ...]
    score: float
    before: _Prefix | None = None
    steps: tuple[Step, ...] = ()
    logits: Logits | None = None  # after the last of `path` that must be read
    slot: int | None = None

    @property
    def known(self) -> int:
        return len(self.before.path) if self.before else 0


@dataclass(frozen=True, slots=True, order=True)
class _Next:
    """A prefix and one token more, on the heap. `cost`: what `tokens` log-probabilities add up to, without the sign."""

    cost: float
    order: int
    tokens: int = field(compare=False)
    before: _Prefix = field(compare=False)
    point: ChoicePoint = field(compare=False)
    token: int = field(compare=False)


def likeliest_number(
    matcher: TokenMatcher, logits: Logits, reader: Reader, *, noise_logp_max: float
) -> Generator[list[Row], list[Logits], Likeliest | None]:
    """Return the likeliest of the numbers that `matcher` can write now, None where PREFIXES_MAX do not tell.

    `logits`: what follows what `reader.slot` holds. A number counts with all that it forces through its end.
    """
    return (yield from _Search(reader, noise_logp_max).run(_Prefix(matcher.copy(), (), 0.0, logits=logits)))


class _Search:
    def __init__(self, reader: Reader, noise_logp_max: float) -> None:
        self._reader, self._noise = reader, noise_logp_max
        self._start: int | None = None
        self._heap: list[_Next] = []
        self._made: dict[int, _Prefix] = {}
        self._held: list[_Prefix] = []
        self._count = 0

    def run(self, root: _Prefix) -> Generator[list[Row], list[Logits], Likeliest | None]:
        self._start = root.matcher.number_start
        self._open(root)
        for _ in range(PREFIXES_MAX):
            entry = heappop(self._heap)
            found = self._prefix(entry)
            if self._unread(found):
                yield from self._read([found, *self._next(entry.cost + WAVE_LOGP)])
            if not self._whole(found):
                self._open(found)
            elif -found.score <= entry.cost:
                return self._found(entry, found)
            else:  # with what it forces through its end it is less likely
                heappush(self._heap, replace(entry, cost=-found.score, tokens=len(found.path)))
        return None

    def _whole(self, one: _Prefix) -> bool:
        return one.matcher.number_start != self._start

    def _unread(self, one: _Prefix) -> Sequence[int]:
        """Return what must be read of it, behind the prefix before it: of a whole number not the last token."""
        return one.path[one.known : len(one.path) - self._whole(one)] if one.logits is None else ()

    def _open(self, one: _Prefix) -> None:
        """Put all that may follow on the heap."""
        assert one.logits is not None  # noqa: S101  it was read
        point, mass = one.matcher.choice_point(), log_mass(one.logits)
        for token in point.tokens.tolist():
            self._count += 1
            cost = mass - float(one.logits[token]) - one.score
            heappush(self._heap, _Next(cost, self._count, len(one.path) + 1, one, point, token))

    def _prefix(self, entry: _Next) -> _Prefix:
        """Write it, with the digits that it forces."""
        if entry.order not in self._made:
            before, token = entry.before, entry.token
            assert before.logits is not None  # noqa: S101  it was read
            matcher = before.matcher.copy()
            matcher.accept(token)
            tokens = [token]
            while matcher.number_start == self._start and (forced := matcher.forced_token()) is not None:
                matcher.accept(forced)
                tokens.append(forced)
            steps = (*before.steps, (entry.point, token, before.logits))
            self._made[entry.order] = _Prefix(matcher, (*before.path, *tokens), -entry.cost, before, steps)
        return self._made[entry.order]

    def _next(self, cost_max: float) -> list[_Prefix]:
        """Return those that are due after this one and nearly as likely, as far as they must be read."""
        first = nsmallest(WAVE_MAX - 1, self._heap[: 2 ** (WAVE_MAX - 1) - 1])
        near = [self._prefix(entry) for entry in first if entry.cost <= cost_max]
        return [one for one in near if self._unread(one)]

    def _read(self, wave: Sequence[_Prefix]) -> Generator[list[Row], list[Logits], None]:
        wave = wave[: self._reader.forks_max]
        for one in wave:
            check_tokens(len(one.matcher.tokens), self._reader.tokens_max)
        if len(self._held) + len(wave) > self._reader.forks_max:
            self._let_go(self._held.copy())
        rows = [self._row(one) for one in wave]
        found = yield from self._reader.run(rows)
        for one, row, logits in zip(wave, rows, found, strict=True):
            for before, token in zip(logits, one.path[one.known + 1 :], strict=False):  # logits[-1]: after all of them
                one.score += float(before[token]) - log_mass(before)
            one.logits, one.slot = logits[-1], row.slot
            self._held.append(one)

    def _row(self, one: _Prefix) -> Row:
        """Return what must be read of it: behind the prefix before it where a fork still holds that."""
        assert one.before is not None  # noqa: S101  only the root has none, and that was read
        unread = self._unread(one)
        if one.before.slot is None:
            return Row(self._reader.fork(self._reader.slot), (*one.before.path, *unread), len(unread))
        return Row(self._reader.fork(one.before.slot), unread, len(unread))

    def _let_go(self, held: list[_Prefix]) -> None:
        self._reader.drop([one.slot for one in held if one.slot is not None])
        for one in held:
            one.slot = None
            self._held.remove(one)

    def _found(self, entry: _Next, found: _Prefix) -> Likeliest:
        others = [-other.cost for other in self._heap]
        lengths = [len(found.path), *(other.tokens for other in self._heap)]
        _, close = best_of(np.array([-entry.cost, *others]), lengths, self._noise)
        held, read = (entry.before, found.known) if found.slot is None else (found, len(found.path) - 1)
        return Likeliest(found.steps, held.slot, read, close)
