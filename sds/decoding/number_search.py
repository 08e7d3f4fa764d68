"""Searches the likeliest whole number where the values are too many to be listed: a best-first search over its prefixes.

A number is never likelier than its prefix, so the first whole number that comes off the heap is the likeliest of all.
The search knows tokens and slots, and not what the number means.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush, nsmallest
from typing import TYPE_CHECKING

import numpy as np

from sds.decoding.probabilities import Logits, Passing, best_of, log_mass
from sds.models.protocol import Row

if TYPE_CHECKING:
    from sds.grammars.tokens.matcher import ChoicePoint, TokenMatcher

PREFIXES_MAX = 64  # taken off the heap before the search is given up
WAVE_MAX = 4  # prefixes read in one pass: the likeliest, and the next ones whose log-probability is less
WAVE_LOGP = 2.0  # by at most this

Step = tuple["ChoicePoint", int, Logits]  # a choice point, the token chosen, the logits there


@dataclass(frozen=True, slots=True)
class Reader:
    """How the search reads behind `slot`, which it leaves unchanged. It holds at most `forks_max` forks at once.
    `check_tokens` raises ModelError where a decision of so many tokens would have too many.
    """

    slot: int
    forks_max: int
    check_tokens: Callable[[int], None]
    fork: Callable[[int], int]
    drop: Callable[[Sequence[int]], None]
    run: Callable[[list[Row]], Passing]


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The number found. `steps`: one for each token that was a choice. `slot`: a fork that has read its first `read` tokens,
    or None; the caller drops it and the others. `close`: whether noise might have made another number the likeliest.
    """

    steps: tuple[Step, ...]
    slot: int | None
    read: int
    close: bool


@dataclass(slots=True, eq=False)
class _Prefix:
    """A prefix of the number. `score`: the log-probability of `path`, its forced tokens only once they are read.
    `offset`: the length of its parent's path.
    """

    matcher: TokenMatcher
    path: tuple[int, ...]
    score: float
    parent: _Prefix | None = None
    steps: tuple[Step, ...] = ()
    logits: Logits | None = None  # after the last token of `path` that must be read
    slot: int | None = None

    @property
    def offset(self) -> int:
        return len(self.parent.path) if self.parent else 0


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    """An entry of the heap: a prefix and one more token. `cost`: minus the sum of `tokens` log-probabilities."""

    cost: float
    order: int
    tokens: int = field(compare=False)
    parent: _Prefix = field(compare=False)
    point: ChoicePoint = field(compare=False)
    token: int = field(compare=False)


def likeliest_number(
    matcher: TokenMatcher, logits: Logits, reader: Reader, *, noise_logp_max: float
) -> Generator[list[Row], list[Logits], Likeliest | None]:
    """Return the likeliest of the numbers that `matcher` can write now; None where PREFIXES_MAX prefixes do not settle it.

    `logits`: those after the text in `reader.slot`. A number counts with all that it forces through its end.
    """
    return (yield from _Search(reader, noise_logp_max).run(_Prefix(matcher.copy(), (), 0.0, logits=logits)))


class _Search:
    def __init__(self, reader: Reader, noise_logp_max: float) -> None:
        self._reader, self._noise = reader, noise_logp_max
        self._start: int | None = None
        self._heap: list[_Entry] = []
        self._made: dict[int, _Prefix] = {}
        self._held: list[_Prefix] = []
        self._count = 0

    def run(self, root: _Prefix) -> Generator[list[Row], list[Logits], Likeliest | None]:
        self._start = root.matcher.number_start
        self._expand(root)
        for _ in range(PREFIXES_MAX):
            entry = heappop(self._heap)
            found = self._prefix_of(entry)
            if self._unread(found):
                yield from self._read([found, *self._nearly_due(entry.cost + WAVE_LOGP)])
            if not self._whole(found):
                self._expand(found)
            elif -found.score <= entry.cost:
                return self._result(entry, found)
            else:  # the forced tokens through its end, read now, make it less likely
                heappush(self._heap, replace(entry, cost=-found.score, tokens=len(found.path)))
        return None

    def _whole(self, prefix: _Prefix) -> bool:
        return prefix.matcher.number_start != self._start

    def _unread(self, prefix: _Prefix) -> Sequence[int]:
        """Return the tokens that must be read behind the parent: of a whole number all but the last."""
        return prefix.path[prefix.offset : len(prefix.path) - self._whole(prefix)] if prefix.logits is None else ()

    def _expand(self, prefix: _Prefix) -> None:
        """Put the prefix with each token that may follow on the heap."""
        assert prefix.logits is not None  # noqa: S101  it was read
        point, mass = prefix.matcher.choice_point(), log_mass(prefix.logits)
        for token in point.tokens.tolist():
            self._count += 1
            cost = mass - float(prefix.logits[token]) - prefix.score
            heappush(self._heap, _Entry(cost, self._count, len(prefix.path) + 1, prefix, point, token))

    def _prefix_of(self, entry: _Entry) -> _Prefix:
        """Write the entry's token, with the digits that it forces. An entry is written once."""
        if entry.order not in self._made:
            parent, token = entry.parent, entry.token
            assert parent.logits is not None  # noqa: S101  it was read
            matcher = parent.matcher.copy()
            matcher.accept(token)
            tokens = [token]
            while matcher.number_start == self._start and (forced := matcher.forced_token()) is not None:
                matcher.accept(forced)
                tokens.append(forced)
            steps = (*parent.steps, (entry.point, token, parent.logits))
            self._made[entry.order] = _Prefix(matcher, (*parent.path, *tokens), -entry.cost, parent, steps)
        return self._made[entry.order]

    def _nearly_due(self, cost_max: float) -> list[_Prefix]:
        """Return the unread prefixes among the next of the heap whose cost is at most `cost_max`."""
        first = nsmallest(WAVE_MAX - 1, self._heap[: 2 ** (WAVE_MAX - 1) - 1])
        near = [self._prefix_of(entry) for entry in first if entry.cost <= cost_max]
        return [prefix for prefix in near if self._unread(prefix)]

    def _read(self, wave: Sequence[_Prefix]) -> Generator[list[Row], list[Logits], None]:
        wave = wave[: self._reader.forks_max]
        for prefix in wave:
            self._reader.check_tokens(len(prefix.matcher.tokens))
        if len(self._held) + len(wave) > self._reader.forks_max:
            self._drop_forks()
        rows = [self._row(prefix) for prefix in wave]
        found = yield from self._reader.run(rows)
        for prefix, row, logits in zip(wave, rows, found, strict=True):
            forced = prefix.path[prefix.offset + 1 :]
            for after, token in zip(logits, forced, strict=False):  # the last logits come after all of them
                prefix.score += float(after[token]) - log_mass(after)
            prefix.logits, prefix.slot = logits[-1], row.slot
            self._held.append(prefix)

    def _row(self, prefix: _Prefix) -> Row:
        """Return the row that reads a prefix, on a fork of its parent's slot if that is held, else of the reader's."""
        assert prefix.parent is not None  # noqa: S101  only the root has none, and that was read
        unread = self._unread(prefix)
        if prefix.parent.slot is None:
            return Row(self._reader.fork(self._reader.slot), (*prefix.parent.path, *unread), len(unread))
        return Row(self._reader.fork(prefix.parent.slot), unread, len(unread))

    def _drop_forks(self) -> None:
        self._reader.drop([prefix.slot for prefix in self._held if prefix.slot is not None])
        for prefix in self._held:
            prefix.slot = None
        self._held.clear()

    def _result(self, entry: _Entry, found: _Prefix) -> Likeliest:
        others = [-other.cost for other in self._heap]
        lengths = [len(found.path), *(other.tokens for other in self._heap)]
        _, close = best_of(np.array([-entry.cost, *others]), lengths, self._noise)
        held, read = (entry.parent, found.offset) if found.slot is None else (found, len(found.path) - 1)
        return Likeliest(found.steps, held.slot, read, close)
