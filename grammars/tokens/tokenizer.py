"""How a model's own tokenizer spells fixed text, digits and free text. Looked up once for each tokenizer.

A tokenizer that cuts digits one by one, or in twos or threes from the left, is followed exactly. With any other, digits
are written one by one: every number can still be said, but not always in that tokenizer's spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sds.grammars.language import TEXT_CLASS
from sds.kernel.errors import LanguageError

LANGUAGE_UNSPEAKABLE = "LANGUAGE_UNSPEAKABLE"
CHUNK_DIGITS_MAX = 3
_TEXT = re.compile(f"{TEXT_CLASS}+".encode())
# Numbers that show how a tokenizer cuts digits.
_NUMBERS = ("1", "12", "123", "1234", "12345", "1234567", "1000", "2024", "99999999", "100000", "31415926535")


class Tokenizer(Protocol):
    """What a compiled grammar needs of a tokenizer; every backend is one. `special`: whether control tokens may be made."""

    @property
    def vocab_size(self) -> int: ...

    def tokenize(self, text: bytes, *, special: bool) -> list[int]: ...

    def piece(self, token: int) -> bytes: ...


class TokenizerIndex:
    """The tokens that one tokenizer makes of fixed text, digits and free text.

    `digits`: the token of every run of digits that is one token, and of the point. `chunk`: the number of digits in such a
    run; only the last run before the point or the end is shorter. Raises LanguageError where a digit has no token of its own.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._pieces: dict[int, bytes] = {}  # of the tokens seen so far
        self.chunk = next((size for size in range(CHUNK_DIGITS_MAX, 1, -1) if _cuts(tokenizer, size)), 1)
        runs = [f"{n:0{width}}" for width in range(1, self.chunk + 1) for n in range(10**width)]
        self.digits = {run: self._one(run) for run in (*runs, ".")}

    def fixed(self, text: bytes, *, before: bytes = b"", after: bytes = b"") -> tuple[int, ...]:
        """Return the tokens of `text` as it is spelled between `before` and `after`.

        Where a token reaches across an edge, the text is spelled alone. Raises LanguageError when no tokens spell it.
        """
        for left, right in ((before, after), (b"", b"")):
            tokens = self.tokenizer.tokenize(left + text + right, special=False)
            pieces = [self.piece(token) for token in tokens]
            edges = list(accumulate(map(len, pieces), initial=0))
            first, last = len(left), len(left) + len(text)
            if first in edges and last in edges:
                within = slice(edges.index(first), edges.index(last))
                if b"".join(pieces[within]) == text:
                    return tuple(tokens[within])
        shown = text.decode("ascii", "replace")
        raise LanguageError(f"no tokens of the model spell `{shown}`", reason_code=LANGUAGE_UNSPEAKABLE)

    def piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self.tokenizer.piece(token)
        return piece

    def number(self, unsigned: str) -> Iterator[int]:
        """Yield the tokens of a literal without its sign, or of the rest of one after whole runs."""
        for i, part in enumerate(unsigned.split(".")):
            if i:
                yield self.digits["."]
            for at in range(0, len(part), self.chunk):
                yield self.digits[part[at : at + self.chunk]]

    def text(self, chars_max: int) -> NDArray[np.intp]:
        """Return the tokens of free text with at most so many characters."""
        tokens, lengths = self._text
        return tokens[: np.searchsorted(lengths, chars_max, side="right")]

    @cached_property
    def _text(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The tokens of free text, the shortest first, and their lengths."""
        pieces = (self.tokenizer.piece(token) for token in range(self.tokenizer.vocab_size))
        lengths = np.array([len(piece) if _TEXT.fullmatch(piece) else 0 for piece in pieces], dtype=np.intp)
        order = np.argsort(lengths, kind="stable")
        order = order[np.searchsorted(lengths[order], 1) :]
        return order, lengths[order]

    @cached_property
    def text_chars(self) -> dict[int, int]:
        """The number of characters of each token of free text."""
        tokens, lengths = self._text
        return dict(zip(tokens.tolist(), lengths.tolist(), strict=True))

    def _one(self, text: str) -> int:
        tokens = self.fixed(text.encode())
        if len(tokens) != 1:
            raise LanguageError(f"no token of the model spells `{text}`", reason_code=LANGUAGE_UNSPEAKABLE)
        return tokens[0]


def _cuts(tokenizer: Tokenizer, size: int) -> bool:
    """Return whether digits are cut into runs of `size` from the left."""
    every = (f"{n:0{size}}" for n in range(10**size))
    for number in (*_NUMBERS, *every):
        pieces = [tokenizer.piece(token) for token in tokenizer.tokenize(number.encode(), special=False)]
        if pieces != [number[at : at + size].encode() for at in range(0, len(number), size)]:
            return False
    return True
