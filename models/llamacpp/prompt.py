"""What one sequence of llama.cpp's cache holds: sections and cells. It knows nothing of the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from sds.models.llamacpp.kv_cache import Span

Section = tuple[int, ...]


@dataclass(slots=True)
class Prompt:
    """`origin`: the slot it belongs to. `spans`: its sections' cells. `writes`: what a fork holds beyond its slot, tokens by
    the number of the pass that wrote them: forks of a fork share what it had.
    """

    sequence: int
    origin: int
    sections: list[Section] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    position: int = 0
    writes: dict[int, int] = field(default_factory=dict)

    def truncate(self, sections: int) -> None:
        del self.sections[sections:], self.spans[sections:]
        self.position = sum(map(len, self.sections))

    def is_all(self, sections: Sequence[Section]) -> bool:
        """Tell whether these sections are all that it has read."""
        return self.sections == list(sections) and self.position == sum(map(len, sections))

    def restore(self, sections: Sequence[Section]) -> None:
        """Note that it holds these sections and nothing else, from the first cell on."""
        ends = list(accumulate(map(len, sections), initial=0))
        self.sections, self.spans, self.position = list(sections), list(pairwise(ends)), ends[-1]
