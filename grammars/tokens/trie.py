"""A trie of token paths: all token sequences from the start, or from behind a number or text, to the next number, text or end.

Paths share nodes as long as their tokens are the same. What may follow a number or a text is a trie of its own.
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
    """An option that a path takes: its choice, its label, and the byte range of the label in the path's text."""

    choice: str
    label: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class NumberSlot:
    """A path's end where a number begins. `negative`: its sign is already written.

    `kind`, `param`: indices into `envelope.kinds` and its `params`. `start`: the number's byte offset in the path's
    text, sign included. `then`: the trie of what follows the number.
    """

    kind: int
    param: int
    name: str
    negative: bool
    start: int
    then: TrieNode


@dataclass(frozen=True, slots=True)
class TextEnd:
    """A path's end where free text begins. `then`: the trie of what closes and follows it."""

    name: str
    then: TrieNode


class Suffix:
    """A path's end without a further choice: only the context reference and the closing brace follow."""


End = NumberSlot | TextEnd | Suffix


@dataclass(frozen=True, slots=True)
class Path:
    """One token sequence: its tokens, the same as bytes, the options it takes in order, and its end."""

    tokens: tuple[int, ...]
    pieces: tuple[bytes, ...]
    options: tuple[OptionMark, ...]
    end: End

    def tokens_through(self, option: int) -> int:
        """Return how many tokens it takes to go past the end of an option's label."""
        reached = accumulate(map(len, self.pieces))
        return next(n for n, size in enumerate(reached, 1) if size > self.options[option].stop)


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """The choice that a node's tokens decide: the tokens, and the labels that each leaves open.

    `start`: the choice's byte offset in the paths' text. `alternatives`: where nothing of the choice was decided
    before, each label with all tokens from here through the one that goes past its end; else ().
    """

    choice: str
    start: int
    tokens: NDArray[np.intp]
    labels: tuple[tuple[str, ...], ...]
    alternatives: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(slots=True, eq=False)
class TrieNode:
    """`depth`: number of tokens before it. `paths`: those through it. `branch`: the choice that its tokens decide, if any.

    `run`: the longest token sequence that is forced from here, its bytes, and the node it leads to.
    """

    depth: int = 0
    piece: bytes = b""
    children: dict[int, TrieNode] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    end: End | None = None
    branch: Branch | None = None
    run: tuple[tuple[int, ...], bytes, TrieNode] | None = None
    sha256: str = ""  # the result of `digest`

    def digest(self) -> str:
        """Return the SHA-256 of a compiled grammar, called on its root: every path's tokens, options and end.

        The spelling of digits belongs to the tokenizer and the bounds to the envelope: neither is part of it.
        """
        if not self.sha256:  # several paths may share the trie that follows
            paths = [(path.tokens, _option_fields(path), *_end_fields(path.end)) for path in self.paths]
            self.sha256 = hashlib.sha256(repr(paths).encode()).hexdigest()
        return self.sha256


def _option_fields(path: Path) -> list[tuple[str, str, int, int]]:
    return [(mark.choice, mark.label, mark.start, mark.stop) for mark in path.options]


def _end_fields(end: End) -> tuple[object, ...]:
    if isinstance(end, NumberSlot):
        return end.kind, end.param, end.name, end.negative, end.then.digest()
    return (end.name, end.then.digest()) if isinstance(end, TextEnd) else ()


def insert(root: TrieNode, paths: Iterable[Path]) -> None:
    """Put all paths of a trie into its root, then find its branches and forced runs."""
    for path in paths:
        node = root
        node.paths.append(path)
        for token, piece in zip(path.tokens, path.pieces, strict=True):
            node = node.children.setdefault(token, TrieNode(node.depth + 1, piece))
            node.paths.append(path)
        node.end = path.end
    _annotate(root, frozenset())


def _annotate(node: TrieNode, decided: frozenset[int]) -> None:
    """Set `branch` and `run` of a node and all below it. `decided`: the options that nodes above have begun to decide."""
    if len(node.children) > 1 and (option := _undecided(node.paths)) is not None:
        node.branch = _branch(node, option, first=option not in decided)
        decided |= {option}
    for child in node.children.values():
        _annotate(child, decided)
    if len(node.children) == 1 and node.end is None:
        ((token, child),) = node.children.items()
        tokens, data, last = child.run or ((), b"", child)
        node.run = ((token, *tokens), child.piece + data, last)


def _branch(node: TrieNode, option: int, *, first: bool) -> Branch:
    mark, children = node.paths[0].options[option], node.children
    tokens = np.fromiter(children, dtype=np.intp, count=len(children))
    tokens.flags.writeable = False  # every choice point here hands out the same array
    labels = tuple(tuple(dict.fromkeys(path.options[option].label for path in n.paths)) for n in children.values())
    spelled = (
        (path.options[option].label, path.tokens[node.depth : path.tokens_through(option)]) for path in node.paths
    )
    return Branch(mark.choice, mark.start, tokens, labels, tuple(dict.fromkeys(spelled)) if first else ())


def _undecided(paths: Iterable[Path]) -> int | None:
    """Return the index of the first option in which the paths differ; None where they differ only in a sign."""
    for i, marks in enumerate(zip(*(path.options for path in paths), strict=False)):
        if len({mark.label for mark in marks}) > 1:
            return i
    return None
