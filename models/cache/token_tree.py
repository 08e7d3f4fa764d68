"""Rows that go on from the same place, as one tree: what they have in common is read once. Purely tokens and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MASKED = -3.38e38  # nearly the least number of BF16: under it no score is left that exp() makes anything of
ROOT = -1
CALL_TOKENS_MAX = 512  # of several trees in a call
LINES_TOKENS_MAX = 2 * CALL_TOKENS_MAX  # of their lines, filled up
TOKENS_STEP = 32  # so many tokens or a multiple are read of several trees, for numbers that come again
LINE_TOKENS = 8  # lines are multiples of these
# What stands before a tree, or all that a token sees, is a multiple of these: the places of numbers that are added at once.
HELD_TOKENS = 32
SURPLUS_TOKENS_MAX = 16  # by which a line alone may be longer for a length that the library is prepared for


@dataclass(slots=True)
class TokenTree:
    """Tokens behind `position` others that the seat `root` holds; each stands behind its parent."""

    root: int
    position: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _trunk: list[int] = field(default_factory=list)  # the first row, which others mostly go on from

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Return the places of a row's tokens in the tree."""
        trunk = self._trunk if [*tokens[: len(self._trunk)]] == self._trunk else []
        path = [*range(len(trunk))]
        for token in tokens[len(trunk) :]:
            path.append(self._child(path[-1] if path else ROOT, token))
        self._trunk = self._trunk or [*tokens]
        return path

    def sees(self) -> NDArray[np.bool_]:
        """Return which tokens each sees of the tree, [tokens, tokens]: itself and those above it."""
        count = len(self.tokens)
        if self.parents == list(range(ROOT, count - 1)):
            return np.tri(count, dtype=np.bool_)
        rows = list[bytearray]()
        for place, parent in enumerate(self.parents):
            row = bytearray(count) if parent == ROOT else rows[parent].copy()
            row[place] = 1
            rows.append(row)
        return np.frombuffer(b"".join(rows), np.bool_).reshape(count, count)

    def _child(self, at: int, token: int) -> int:
        found = self._children.setdefault((at, token), len(self.tokens))
        if found == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(at)
            self.depths.append(0 if at == ROOT else self.depths[at] + 1)
        return found


class Inputs(NamedTuple):
    """What a call reads: tokens and positions, [1, tokens]; what is added to scores, [lines, 1, longest, held + longest];
    which of the tokens stands where on the lines, [lines, longest], and where on them, end to end, each stands, [1, tokens].
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.float32]
    lines: NDArray[np.int64]
    places: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Call:
    """Trees side by side: what `held` others at most stand before them, on lines of `longest` tokens.

    Held tokens stand at the left, a tree at the right end of its line. `padded`: what fills the lines up is read, too.
    """

    held: int
    longest: int
    trees: list[TokenTree] = field(default_factory=list)
    padded: bool = True

    def _numbers(self) -> NDArray[np.int64]:
        """Return which token stands where on the lines, [lines, longest]; what fills a line up is its own first token: what
        is only masked must be no other prompt's, for it may be no number.
        """
        if self.padded:
            return np.arange(len(self.trees) * self.longest).reshape(-1, self.longest)
        found, count = np.zeros((len(self.trees), self.longest), np.int64), 0
        for line, tree in enumerate(self.trees):
            found[line] = count
            found[line, self.longest - len(tree.tokens) :] = np.arange(count, count + len(tree.tokens))
            count += len(tree.tokens)
        return found

    def inputs(self) -> Inputs:
        """What fills a line up sees everything, is seen by nothing and answers nothing."""
        shape = len(self.trees), self.longest
        ids, positions, real = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, self.padded)
        mask = np.zeros((shape[0], 1, self.longest, self.held + self.longest), np.float32)
        for line, tree in enumerate(self.trees):
            start = self.longest - len(tree.tokens)
            ids[line, start:] = tree.tokens
            positions[line, start:] = np.add(tree.depths, tree.position)
            real[line, start:] = True
            mask[line, 0, start:, tree.position : self.held + start] = MASKED
            mask[line, 0, start:, self.held + start :] = np.where(tree.sees(), np.float32(0), np.float32(MASKED))
        places = np.flatnonzero(real)
        if not self.padded:  # its first token several times
            places = np.concatenate([places, np.full(-len(places) % TOKENS_STEP, places[0])])
        return Inputs(ids.ravel()[None, places], positions.ravel()[None, places], mask, self._numbers(), places[None])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row's tokens are: in which call, on which line of it, and where on the line."""

    call: int
    line: int
    path: NDArray[np.intp]

    def stretches(self) -> Iterator[tuple[int, slice]]:
        """Yield where on the line tokens stand one behind the other, and which of the row's is the first of them."""
        breaks = np.flatnonzero(np.diff(self.path) != 1) + 1
        for start, end in pairwise([0, *breaks.tolist(), len(self.path)]):
            at = int(self.path[start])
            yield start, slice(at, at + end - start)


def calls_of(
    rows: Iterable[tuple[tuple[int, int], Sequence[int]]],
    *,
    held_max: int,
    mixed_max: float,
    lengths: Sequence[int] = (),
) -> tuple[list[Call], list[Place]]:
    """Return the calls that read rows (where each goes on, (seat, position), and its tokens), and where each row is.

    Rows that go on from one place are a tree. `held_max`: how many tokens stand before all trees of a call, if not of one.
    `mixed_max`: as long as no token sees more places than these, what fills lines up leaves no trace in the library's
    numbers, where all that it sees ends at a multiple of HELD_TOKENS. Then trees of any shape share a call, and one alone
    has the next of `lengths`, for which the library is prepared. Else only trees of one shape do, and shapes are few, for a
    library prepares itself for each new one.
    """
    trees: dict[tuple[int, int], TokenTree] = {}
    paths = [(place, trees.setdefault(place, TokenTree(*place)).add(tokens)) for place, tokens in rows]
    calls = list[Call]()
    lines: dict[tuple[int, int], tuple[int, int, int]] = {}
    for group in _groups(trees.values(), held_max, mixed_max):
        call = _call(group, lengths, mixed_max) if _seen(group) <= mixed_max else Call(*_shape(group[0])[::-1], group)
        for line, tree in enumerate(group):
            lines[tree.root, tree.position] = len(calls), line, call.longest - len(tree.tokens)
        calls.append(call)
    places = []
    for at, path in paths:
        number, line, start = lines[at]
        places.append(Place(number, line, np.array(path, np.intp) + start))
    return calls, places


def prepared_for(tokens: int, lengths: Sequence[int]) -> list[int]:
    """Return for which of `lengths` a line alone of so many tokens may be filled up."""
    return [length for length in lengths if tokens <= length <= tokens + SURPLUS_TOKENS_MAX]


def _call(trees: list[TokenTree], lengths: Sequence[int], mixed_max: float) -> Call:
    """Return the call of trees that may be of different shapes, the longest first."""
    tokens, alone = len(trees[0].tokens), len(trees) == 1
    fitting = [length for length in prepared_for(tokens, lengths) if _seen(trees, length) <= mixed_max]
    longest = min(fitting) if alone and fitting else _line(tokens)
    return Call(_seen(trees, longest) - longest, longest, trees, padded=alone)


def _seen(trees: Sequence[TokenTree], longest: int = 0) -> int:
    """Return how many places the tokens of mixed trees see, on lines of `longest` tokens, or as long as these need."""
    longest = longest or max(_line(len(tree.tokens)) for tree in trees)
    return _up(max(tree.position for tree in trees) + longest, HELD_TOKENS)


def _groups(trees: Iterable[TokenTree], held_max: int, mixed_max: float) -> Iterator[list[TokenTree]]:
    """Split trees into calls as large as they may be: the longest first, so that little of a line is filled up."""

    def order(tree: TokenTree) -> tuple[int, ...]:
        return _seen([tree]) <= mixed_max, *_shape(tree), len(tree.tokens)

    group = list[TokenTree]()
    for tree in sorted(trees, key=order, reverse=True):
        both = [*group, tree]
        longest, held = max(map(_shape, both))[0], max(_shape(each)[1] for each in both) + HELD_TOKENS
        if group and (
            not _alike(group, tree, mixed_max)
            or sum(len(each.tokens) for each in both) > CALL_TOKENS_MAX
            or len(both) * longest > LINES_TOKENS_MAX
            or len(both) * held > held_max
        ):
            yield group
            both = [tree]
        group = both
    if group:
        yield group


def _alike(group: Sequence[TokenTree], tree: TokenTree, mixed_max: float) -> bool:
    """Tell whether a tree gets the same numbers in a call with these as in one of its own."""
    if _seen([tree]) <= mixed_max:
        return _seen([*group, tree]) <= mixed_max
    longest, _ = shape = _shape(tree)
    filled_up = (len(group) + 1) * longest <= CALL_TOKENS_MAX  # as one shape has it, all of which is read
    return _seen(group) > mixed_max and shape == _shape(group[0]) and filled_up


def _shape(tree: TokenTree) -> tuple[int, int]:
    """Return how long a line for this tree is, and for how many tokens there is room before it."""
    return _line(len(tree.tokens)), _up(tree.position, HELD_TOKENS)


def _line(tokens: int) -> int:
    """Return how long a line of so many tokens is; one alone, the commonest of all, stays alone."""
    return tokens if tokens == 1 else _up(tokens, LINE_TOKENS)


def _up(tokens: int, to: int) -> int:
    return -(-tokens // to) * to
