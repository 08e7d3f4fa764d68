"""The language of a bounded text alone, token by token: `TEXT"}`, what stands after `"rationale":"` when nothing follows.

It needs no automaton: a token is permitted by what it spells and by the characters that are left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from sds.grammars.emit_regex import TEXT_CLASS
from sds.kernel.errors import LanguageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PIECE = re.compile(rf'({TEXT_CLASS}*)("\}}?)?'.encode())
_NEVER = np.iinfo(np.int32).max


class TextTokens:
    """Which tokens of one vocabulary may go on with a text. Made once for a model; holds nothing of a text."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        """`pieces`: what each token spells, in the order of their ids; nothing for a control token."""
        self._spelled = [_PIECE.fullmatch(piece) if piece else None for piece in pieces]
        self._chars = np.array([len(found[1]) if found else _NEVER for found in self._spelled], np.int32)
        if not any(found and found[2] for found in self._spelled):
            raise LanguageError("no token of this vocabulary ends a text", reason_code="LANGUAGE_EMPTY")

    def allowed(self, chars_left: int) -> NDArray[np.intp]:
        """Return the tokens that may come next, at least one: with nothing left, those that end the text."""
        ids = np.flatnonzero(self._chars <= chars_left)
        if not len(ids):
            raise LanguageError("the text cannot be ended here", reason_code="LANGUAGE_EMPTY")
        return ids

    def read(self, token: int) -> tuple[str, bool]:
        """Return the characters a permitted token adds, and whether it ends the text."""
        found = self._spelled[token]
        if found is None:
            raise LanguageError("the token is not one of a text", reason_code="MASK_FAILED")
        return found[1].decode(), bool(found[2])
