"""The figures that a part of the attack returns, each with the value that it must have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `must`: the value that it must have; None: any."""

    name: str
    value: int
    must: int | None = None

    @property
    def holds(self) -> bool:
        return self.must is None or self.value == self.must

    @property
    def line(self) -> str:
        wanted = "" if self.must is None else f" of {self.must}" if self.must else ""
        return f"  {self.value}{wanted} {self.name}{'' if self.holds else '   <-- DOES NOT HOLD'}"


def measured(name: str, value: int) -> Figure:
    return Figure(name, value)


def none(name: str, value: int) -> Figure:
    return Figure(name, value, 0)


def every(name: str, value: int, of: int) -> Figure:
    return Figure(name, value, of)


def added(rounds: Sequence[Sequence[Figure]]) -> list[Figure]:
    """Return the sums of the figures of several rounds, which have the same names in the same order."""
    return [
        Figure(
            same[0].name, sum(f.value for f in same), None if same[0].must is None else sum(f.must or 0 for f in same)
        )
        for same in zip(*rounds, strict=True)
    ]
