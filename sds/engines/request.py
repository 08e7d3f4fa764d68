"""A decision that has a slot: what it wants to be read, and what has been, part by part. It knows rows and tokens only."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sds.models.protocol import Row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sds.engines.scheduler import Request

T = TypeVar("T")
Passes = Generator[list[Row], "list[NDArray[np.float32]]", T]


@dataclass(eq=False)
class Running:
    """A decision in a slot. `reads`: whether it begins with sections that must be read; `rows`: what it still wants to be
    read; `found`: for each row it asked for the logits of those parts that were; `left_out`: passes without it, in a row.
    """

    pending: Request[Any]
    slot: int
    passes: Passes[Any]
    reads: bool
    rows: list[Row] = field(default_factory=list)
    found: list[list[NDArray[np.float32]]] = field(default_factory=list)
    begun: bool = False
    left_out: int = 0

    def ask(self, rows: list[Row]) -> None:
        self.rows, self.found = rows, [[] for _ in rows]

    @property
    def read_in_part(self) -> bool:
        return any(self.found)

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    def parts(self, room: int) -> list[Row]:
        """Return as much of its rows as `room` tokens hold, in order."""
        found = list[Row]()
        for row in self.rows:
            if room <= 0:
                break
            found.append(_beginning(row, room))
            room -= len(row.tokens)
        return found

    def take(self, parts: list[Row], logits: list[NDArray[np.float32]]) -> bool:
        """Note what was read; return whether it was the last of it."""
        first = len(self.found) - len(self.rows)
        for n, of_row in enumerate(logits):
            self.found[first + n].append(of_row)
        left = [_remainder(row, part) for row, part in zip(self.rows, parts, strict=False)]
        self.rows = [row for row in left if row] + self.rows[len(parts) :]
        return not self.rows

    def answer(self) -> list[NDArray[np.float32]]:
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in self.found]


def _beginning(row: Row, tokens: int) -> Row:
    """Return the first `tokens` tokens of a row, with those outputs that lie there."""
    later = max(0, len(row.tokens) - tokens)
    return Row(row.slot, row.tokens[:tokens], max(0, row.outputs - later)) if later else row


def _remainder(row: Row, part: Row) -> Row | None:
    """Return what of a row comes after its beginning `part`."""
    left = row.tokens[len(part.tokens) :]
    return Row(row.slot, left, row.outputs - part.outputs) if left else None
