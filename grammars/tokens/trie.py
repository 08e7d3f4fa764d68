"""Tries of tokens: every way from the start, or from a number, to the next number, or to the end.

Two ways part where their tokens do. What may follow a number is a trie of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class OptionMark:
    """An option that a path takes: its choice, its label, and where the label stands in the path's text."""

    choice: str
    label: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class NumberSlot:
    """A number begins here, its sign written. `start`: where in the path's text, the sign counted to the number.

    `kind`, `param`: its place in the envelope. `then`: what follows it.
    """

    kind: int
    param: int
    name: str
    negative: bool
    start: int
    then: Node


@dataclass(frozen=True, slots=True)
class TextEnd:
    """Free text begins here; `then` closes it."""

    name: str
    then: Node


class Suffix:
    """Nothing is open any more: the context reference and the end follow."""


End = NumberSlot | TextEnd | Suffix


@dataclass(frozen=True, slots=True)
class Path:
    tokens: tuple[int, ...]
    pieces: tuple[bytes, ...]
    facts: tuple[OptionMark, ...]
    end: End

    def closes(self, fact: int) -> int:
        """Return how many tokens it takes to go past the end of an option."""
        reached = accumulate(map(len, self.pieces))
        return next(n for n, size in enumerate(reached, 1) if size > self.facts[fact].stop)


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Where the options of a choice part: the tokens, and for each the labels it leaves open.

    `start`: where the choice begins in the paths' text. `alternatives`: where nothing of it was decided before, each
    label with all tokens from here through the one that goes past its end.
    """

    choice: str
    start: int
    tokens: NDArray[np.intp]
    labels: tuple[tuple[str, ...], ...]
    alternatives: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(slots=True, eq=False)
class Node:
    """A place in a trie. `depth`: tokens before it. `run`: what is forced from here, and where it leads.

    `parting`: where tokens part over a choice, what they leave open.
    """

    depth: int = 0
    piece: bytes = b""
    children: dict[int, Node] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    end: End | None = None
    parting: Branch | None = None
    run: tuple[tuple[int, ...], bytes, Node] | None = None
    sha256: str = ""  # what `digest` found

    def digest(self) -> str:
        """Return the SHA-256 of a plan, asked of its root: every way in tokens, the options it takes, where numbers stand.

        How digits are spelled is the tokenizer's, and what numbers there may be the envelope's.
        """
        if not self.sha256:  # several paths may lead on to one trie
            ways = [(path.tokens, _told(path.facts), *_ending(path.end)) for path in self.paths]
            self.sha256 = hashlib.sha256(repr(ways).encode()).hexdigest()
        return self.sha256

    @property
    def only(self) -> bool:
        """Whether one token, and nothing else, can follow."""
        return len(self.children) == 1 and self.end is None


def _told(facts: Iterable[OptionMark]) -> list[tuple[str, str, int, int]]:
    return [(fact.choice, fact.label, fact.start, fact.stop) for fact in facts]


def _ending(end: End) -> tuple[object, ...]:
    if isinstance(end, NumberSlot):
        return end.kind, end.param, end.name, end.negative, end.then.digest()
    return (end.name, end.then.digest()) if isinstance(end, TextEnd) else ()


def grow(root: Node, paths: Iterable[Path]) -> None:
    """Put the paths into the trie at `root`, note what parts where, and what is forced from there."""
    for path in paths:
        node = root
        node.paths.append(path)
        for token, piece in zip(path.tokens, path.pieces, strict=True):
            node = node.children.setdefault(token, Node(node.depth + 1, piece))
            node.paths.append(path)
        node.end = path.end
    _note(root, frozenset())


def _note(node: Node, seen: frozenset[int]) -> None:
    if len(node.children) > 1 and (fact := _open_fact(node.paths)) is not None:
        node.parting = _parting(node, fact, first=fact not in seen)
        seen |= {fact}
    for child in node.children.values():
        _note(child, seen)
    if node.only:
        ((token, child),) = node.children.items()
        tokens, data, last = child.run or ((), b"", child)
        node.run = ((token, *tokens), child.piece + data, last)


def _parting(node: Node, at: int, *, first: bool) -> Branch:
    fact, children = node.paths[0].facts[at], node.children
    tokens = np.fromiter(children, dtype=np.intp, count=len(children))
    tokens.flags.writeable = False  # every fork here hands out the same
    labels = tuple(tuple(dict.fromkeys(path.facts[at].label for path in each.paths)) for each in children.values())
    spelled = ((path.facts[at].label, path.tokens[node.depth : path.closes(at)]) for path in node.paths)
    return Branch(fact.choice, fact.start, tokens, labels, tuple(dict.fromkeys(spelled)) if first else ())


def _open_fact(paths: Iterable[Path]) -> int | None:
    """Return the first fact in which the paths differ; None where all have the same (they differ in a sign)."""
    for i, facts in enumerate(zip(*(path.facts for path in paths), strict=False)):
        if len({fact.label for fact in facts}) > 1:
            return i
    return None
