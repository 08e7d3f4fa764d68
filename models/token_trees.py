"""Rows that go on from the same place, as one tree: what they have in common is read once. Purely tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MASKED = -1e9
ROOT = -1
LINE_TOKENS = 8  # lines are multiples of it: a library prepares itself for each new length, which costs more


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
class Forest:
    """Trees side by side, each at the right end of its line; `paths`: for each row its line, and its places in it."""

    trees: tuple[TokenTree, ...]
    paths: tuple[tuple[int, NDArray[np.intp]], ...]
    held: int
    longest: int

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
            mask[line, 0, start:, : self.held - tree.position] = MASKED
            mask[line, 0, start:, self.held : self.held + start] = MASKED
            mask[line, 0, start:, self.held + start :] = np.where(tree.sees(), np.float32(0), np.float32(MASKED))
        return ids, positions, mask


def forest(rows: Iterable[tuple[tuple[int, int], Sequence[int]]]) -> Forest:
    """Return the trees of rows: where each goes on, (seat, position), and its tokens."""
    trees: dict[tuple[int, int], TokenTree] = {}
    places: list[tuple[tuple[int, int], list[int]]] = []
    for place, tokens in rows:
        places.append((place, trees.setdefault(place, TokenTree(*place)).add(tokens)))
    lines = {place: line for line, place in enumerate(trees)}
    longest = _line(max(len(tree.tokens) for tree in trees.values()))
    paths = tuple(
        (lines[place], np.array(path, np.intp) + (longest - len(trees[place].tokens))) for place, path in places
    )
    return Forest(tuple(trees.values()), paths, max(tree.position for tree in trees.values()), longest)


def _line(tokens: int) -> int:
    """Return how long a line of so many tokens is; one alone, the commonest of all, stays alone."""
    return tokens if tokens == 1 else -(-tokens // LINE_TOKENS) * LINE_TOKENS
