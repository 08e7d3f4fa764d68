"""Fixed text as the model's own tokenizer spells it, and the tries it makes between two numbers.

A trie holds every way from one number, or the start, to the next one, or the end. Two ways part where their tokens do;
each is spelled as a whole, with a digit or a letter beside it where one will stand, so the spelling is the tokenizer's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from sds.kernel.errors import LanguageError

LANGUAGE_UNSPEAKABLE = "LANGUAGE_UNSPEAKABLE"


class Words(Protocol):
    """What a plan needs of a tokenizer; every backend has it."""

    @property
    def vocab_size(self) -> int: ...

    def tokenize(self, text: bytes, *, special: bool) -> list[int]: ...

    def piece(self, token: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Fact:
    """An option that a path takes: its choice, its label, and where the label stands in the path's text."""

    choice: str
    label: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class NumberEnd:
    """A number begins here, its sign written. `start`: where in the path's text, the sign counted to the number.

    `kind`, `param`: its place in the envelope. `signs`: how many signs the number may have. `then`: what follows it.
    """

    kind: int
    param: int
    name: str
    negative: bool
    signs: int
    start: int
    then: Node


@dataclass(frozen=True, slots=True)
class TextEnd:
    """Free text begins here; `then` closes it."""

    name: str
    then: Node


class TailEnd:
    """Nothing is open any more: the context reference and the end follow."""


End = NumberEnd | TextEnd | TailEnd


@dataclass(frozen=True, slots=True)
class Path:
    tokens: tuple[int, ...]
    pieces: tuple[bytes, ...]
    facts: tuple[Fact, ...]
    end: End

    def closes(self, fact: int) -> int:
        """Return how many tokens it takes to go past the end of an option."""
        reached = accumulate(map(len, self.pieces))
        return next(n for n, size in enumerate(reached, 1) if size > self.facts[fact].stop)


@dataclass(slots=True, eq=False)
class Node:
    """A place in a trie. `depth`: tokens before it. `fact`: which fact of its paths is open, where tokens part here
    over a choice; `first`: whether nothing of that choice was decided before."""

    depth: int = 0
    piece: bytes = b""
    children: dict[int, Node] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    end: End | None = None
    fact: int | None = None
    first: bool = True
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


def _told(facts: Iterable[Fact]) -> list[tuple[str, str, int, int]]:
    return [(fact.choice, fact.label, fact.start, fact.stop) for fact in facts]


def _ending(end: End) -> tuple[object, ...]:
    if isinstance(end, NumberEnd):
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
    if len(node.children) > 1:
        node.fact = _parting(node.paths)
        if node.fact is not None:
            node.first = node.fact not in seen
            seen |= {node.fact}
    for child in node.children.values():
        _note(child, seen)
    if node.only:
        ((token, child),) = node.children.items()
        tokens, data, last = child.run or ((), b"", child)
        node.run = ((token, *tokens), child.piece + data, last)


def _parting(paths: Iterable[Path]) -> int | None:
    """Return the first fact in which the paths differ; None where all have the same (they differ in a sign)."""
    for i, facts in enumerate(zip(*(path.facts for path in paths), strict=False)):
        if len({fact.label for fact in facts}) > 1:
            return i
    return None


def spelled(words: Words, text: bytes, *, before: bytes = b"", after: bytes = b"") -> tuple[int, ...]:
    """Return the tokens of `text` as it is spelled between `before` and `after`.

    Where a token reaches across an edge the text is spelled alone. Raises LanguageError when no tokens spell it.
    """
    for left, right in ((before, after), (b"", b"")):
        tokens = words.tokenize(left + text + right, special=False)
        edges = list(accumulate((len(words.piece(token)) for token in tokens), initial=0))
        first, last = len(left), len(left) + len(text)
        if first in edges and last in edges:
            within = tokens[edges.index(first) : edges.index(last)]
            if b"".join(map(words.piece, within)) == text:
                return tuple(within)
    shown = text.decode("ascii", "replace")[:40]
    raise LanguageError(f"no tokens of the model spell `{shown}`", reason_code=LANGUAGE_UNSPEAKABLE)
