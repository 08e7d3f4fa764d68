"""Rows that go on from the same place, as one tree: what they have in common is read once. Purely tokens and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MASKED = -3.38e38  # nearly the least number of BF16: under it no score is left that exp() makes anything of
ROOT = -1
CALL_TOKENS_MAX = 512  # of several trees in a call
LINES_TOKENS_MAX = 2 * CALL_TOKENS_MAX  # of their lines, filled up
TOKENS_STEP = 32  # so many tokens or a multiple are read of several trees, for numbers that come again
LINE_TOKENS = 16  # lines are multiples of as many numbers as a processor adds at once,
HELD_TOKENS = 32  # and so is what stands before them


@dataclass(slots=True)
class TokenTree:
    """Tokens behind `position` others that the seat `root` holds; each stands behind its parent."""

    root: int
    position: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Return the places of a row's tokens in the tree."""
        path, at = [], ROOT
        for token in tokens:
            at = self._child(at, token)
            path.append(at)
        return path

    def sees(self) -> NDArray[np.bool_]:
        """Return which tokens each sees of the tree, [tokens, tokens]: itself and those above it."""
        count = len(self.tokens)
        if self.parents == list(range(ROOT, count - 1)):
            return np.tri(count, dtype=np.bool_)
        found = np.eye(count, dtype=np.bool_)
        for place, parent in enumerate(self.parents):
            if parent != ROOT:
                found[place] |= found[parent]
        return found

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

    def numbers(self) -> NDArray[np.int64]:
        """Return which token stands where on the lines, [lines, longest]; the first one where none does."""
        if self.padded:
            return np.arange(len(self.trees) * self.longest).reshape(-1, self.longest)
        found, count = np.zeros((len(self.trees), self.longest), np.int64), 0
        for line, tree in enumerate(self.trees):
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
        return Inputs(ids.ravel()[None, places], positions.ravel()[None, places], mask, self.numbers(), places[None])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row's tokens are: in which call, on which line of it, and where on the line."""

    call: int
    line: int
    path: NDArray[np.intp]


def calls_of(
    rows: Iterable[tuple[tuple[int, int], Sequence[int]]], *, context: int, held_max: int, mixed: bool
) -> tuple[list[Call], list[Place]]:
    """Return the calls that read rows (where each goes on, (seat, position), and its tokens), and where each row is.

    `context`: how many tokens a seat holds at most; `held_max`: how many stand before all trees of a call, if not of one.
    `mixed`: what fills a line up leaves no trace in the library's numbers, so that any trees may share a call; else only
    those of one shape do.

    Rows that go on from one place are a tree. Lengths are few, for a library prepares itself for each new one.
    """
    trees: dict[tuple[int, int], TokenTree] = {}
    paths = [(place, trees.setdefault(place, TokenTree(*place)).add(tokens)) for place, tokens in rows]
    shapes = {
        place: (_line(len(tree.tokens)), min(context, _up(tree.position, HELD_TOKENS))) for place, tree in trees.items()
    }
    tokens = {place: len(tree.tokens) for place, tree in trees.items()}
    calls = list[Call]()
    lines: dict[tuple[int, int], tuple[int, int, int]] = {}
    for group in _groups(shapes, tokens, held_max, mixed=mixed):
        longest, held = (max(sizes) for sizes in zip(*(shapes[place] for place in group), strict=True))
        for line, place in enumerate(group):
            lines[place] = len(calls), line, longest - len(trees[place].tokens)
        calls.append(Call(held, longest, [trees[place] for place in group], padded=not mixed or len(group) == 1))
    places = []
    for at, path in paths:
        number, line, start = lines[at]
        places.append(Place(number, line, np.array(path, np.intp) + start))
    return calls, places


def _groups(
    shapes: Mapping[tuple[int, int], tuple[int, int]],
    tokens: Mapping[tuple[int, int], int],
    held_max: int,
    *,
    mixed: bool,
) -> Iterator[list[tuple[int, int]]]:
    """Split trees into calls as large as they may be: the longest first, so that little of a line is filled up."""
    group = list[tuple[int, int]]()
    for place in sorted(shapes, key=shapes.__getitem__, reverse=True):
        if group:
            both = [*group, place]
            longest, held = shapes[group[0]][0], max(shapes[each][1] for each in both)
            if (
                not (mixed or shapes[place] == shapes[group[0]])
                or sum(tokens[each] if mixed else longest for each in both) > CALL_TOKENS_MAX
                or len(both) * longest > LINES_TOKENS_MAX
                or len(both) * held > held_max
            ):
                yield group
                group = []
        group.append(place)
    if group:
        yield group


def _line(tokens: int) -> int:
    """Return how long a line of so many tokens is; one alone, the commonest of all, stays alone."""
    return tokens if tokens == 1 else _up(tokens, LINE_TOKENS)


def _up(tokens: int, to: int) -> int:
    return -(-tokens // to) * to
