"""Rows that go on from the same place, as one tree: what they have in common is read once. Purely tokens and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MASKED = -3.38e38  # nearly the least number of BF16: under it no score is left that exp() makes anything of
ROOT = -1
LINES_TOKENS_MAX = 512  # of several trees in a call
LINE_TOKENS, HELD_TOKENS = 8, 32  # lines, and what stands before them, are multiples of these


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


@dataclass(frozen=True, slots=True)
class Call:
    """Trees of one shape side by side: what `held` others at most stand before them, on lines of `longest` tokens.

    Held tokens stand at the left, a tree at the right end of its line.
    """

    held: int
    longest: int
    trees: list[TokenTree] = field(default_factory=list)

    def full(self, held_max: int) -> bool:
        """Return whether another tree would make it larger than a call may be."""
        lines = len(self.trees) + 1
        return lines * self.longest > LINES_TOKENS_MAX or lines * self.held > held_max

    def inputs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Return tokens and positions, [lines, longest], and what is added to scores, [lines, 1, longest, held + longest].

        What fills a line up sees everything, is seen by nothing and answers nothing.
        """
        shape = len(self.trees), self.longest
        ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        mask = np.zeros((shape[0], 1, self.longest, self.held + self.longest), np.float32)
        for line, tree in enumerate(self.trees):
            start = self.longest - len(tree.tokens)
            ids[line, start:] = tree.tokens
            positions[line, start:] = np.add(tree.depths, tree.position)
            mask[line, 0, start:, tree.position : self.held + start] = MASKED
            mask[line, 0, start:, self.held + start :] = np.where(tree.sees(), np.float32(0), np.float32(MASKED))
        return ids, positions, mask


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row's tokens are: in which call, on which line of it, and where on the line."""

    call: int
    line: int
    path: NDArray[np.intp]


def calls_of(
    rows: Iterable[tuple[tuple[int, int], Sequence[int]]], *, context: int, held_max: int
) -> tuple[list[Call], list[Place]]:
    """Return the calls that read rows (where each goes on, (seat, position), and its tokens), and where each row is.

    `context`: how many tokens a seat holds at most; `held_max`: how many stand before all trees of a call, if not of one.

    Rows that go on from one place are a tree, and only trees of one shape share a call: what a tree shares it with then
    leaves no trace in its numbers. Lengths are few, for a library prepares itself for each new one.
    """
    trees: dict[tuple[int, int], TokenTree] = {}
    paths = [(place, trees.setdefault(place, TokenTree(*place)).add(tokens)) for place, tokens in rows]
    calls: list[Call] = []
    filling: dict[tuple[int, int], int] = {}
    lines: dict[tuple[int, int], tuple[int, int, int]] = {}
    for place, tree in trees.items():
        shape = min(context, _up(tree.position, HELD_TOKENS)), _line(len(tree.tokens))
        number = filling.get(shape)
        if number is None or calls[number].full(held_max):
            number = filling[shape] = len(calls)
            calls.append(Call(*shape))
        call = calls[number]
        lines[place] = number, len(call.trees), call.longest - len(tree.tokens)
        call.trees.append(tree)
    places = []
    for at, path in paths:
        number, line, start = lines[at]
        places.append(Place(number, line, np.array(path, np.intp) + start))
    return calls, places


def _line(tokens: int) -> int:
    """Return how long a line of so many tokens is; one alone, the commonest of all, stays alone."""
    return tokens if tokens == 1 else _up(tokens, LINE_TOKENS)


def _up(tokens: int, to: int) -> int:
    return -(-tokens // to) * to
