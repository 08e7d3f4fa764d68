"""What a part of the attack has found, as figures: each with what it must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """`must`: what `value` must be, None where nothing is promised of it."""

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


def told(name: str, value: int) -> Figure:
    return Figure(name, value)


def none(name: str, value: int) -> Figure:
    return Figure(name, value, 0)


def every(name: str, value: int, of: int) -> Figure:
    return Figure(name, value, of)


def added(rounds: Sequence[Sequence[Figure]]) -> list[Figure]:
    """Add up the figures of several rounds, which have the same names in the same order."""
    return [
        Figure(
            same[0].name, sum(f.value for f in same), None if same[0].must is None else sum(f.must or 0 for f in same)
        )
        for same in zip(*rounds, strict=True)
    ]
