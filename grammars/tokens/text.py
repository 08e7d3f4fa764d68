"""The language of a bounded text alone, token by token: `TEXT"}`, which follows `"rationale":"` when nothing else does.

It needs no compiled grammar: whether a token is permitted depends on its characters and on how many are left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sds.grammars.tokens.matcher import MASK_FAILED
from sds.grammars.tokens.tokenizer import TokenizerIndex
from sds.kernel.errors import LanguageError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class TextTokens:
    """The tokens of one vocabulary that may continue a text. Reads the whole vocabulary once; stores no state of a text.

    Raises LanguageError where no token ends a text.
    """

    def __init__(self, index: TokenizerIndex) -> None:
        self._index, self._end = index, index.fixed(b'"}', before=b"a")[0]
        self._chars = index.text_chars

    def allowed(self, chars_left: int) -> NDArray[np.intp]:
        """Return the tokens that may come next: first the one that ends the text, then those that continue it."""
        return np.append(np.array([self._end], np.intp), self._index.text(chars_left))

    def read(self, token: int) -> tuple[str, bool]:
        """Return the characters that a permitted token adds, and whether it ends the text."""
        if token == self._end:
            return "", True
        if token not in self._chars:
            raise LanguageError("the token is not allowed in a text", reason_code=MASK_FAILED)
        return self._index.piece(token).decode(), False
