"""Rows that continue the same tokens, as one tree (tree attention): common tokens are read once. Knows only token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ROOT = -1


@dataclass(slots=True)
class TokenTree:
    """Tokens after the first `position` tokens of cache slot `root`; each follows its parent.

    `parents`: indices into `tokens`, or ROOT. `depths`: how many tokens of the tree precede each.
    """

    root: int
    position: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _first_row: list[int] = field(default_factory=list)  # most other rows begin with it

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Add a row that begins at the root; return the index of each of its tokens in the tree."""
        shared = self._first_row if [*tokens[: len(self._first_row)]] == self._first_row else []
        path = [*range(len(shared))]
        for token in tokens[len(shared) :]:
            path.append(self._child(path[-1] if path else ROOT, token))
        self._first_row = self._first_row or [*tokens]
        return path

    def attention_mask(self) -> NDArray[np.bool_]:
        """Return which tokens of the tree each token attends to, [tokens, tokens]: itself and its ancestors."""
        count = len(self.tokens)
        if self.parents == list(range(ROOT, count - 1)):
            return np.tri(count, dtype=np.bool_)
        rows = list[bytearray]()
        for index, parent in enumerate(self.parents):
            row = bytearray(count) if parent == ROOT else rows[parent].copy()
            row[index] = 1
            rows.append(row)
        return np.frombuffer(b"".join(rows), np.bool_).reshape(count, count)

    def _child(self, parent: int, token: int) -> int:
        index = self._children.setdefault((parent, token), len(self.tokens))
        if index == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
        return index
