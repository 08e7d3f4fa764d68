"""The tokens a language permits next, from llguidance: a second opinion on matchers.

llguidance's matcher never raises on bad grammars or tokens: it falls into an error state and stays there, and a caller
who does not ask goes on unconstrained. Here every call asks, and every error is a `LanguageError` (MASK_FAILED).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from sds.benchmarks.peer.llguidance_tokenizer import llguidance_tokenizer
from sds.grammars.tokens.matcher import MASK_FAILED
from sds.kernel.errors import LanguageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sds.grammars.language import Language
    from sds.models.llamacpp.backend import LlamaBackend
    from sds.models.transformers_.backend import HfBackend

_T = TypeVar("_T")


class Mask:
    """One matcher through one language, token by token. After an error every further call fails too."""

    def __init__(self, tokenizer: LLTokenizer, language: Language) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._end_tokens = np.array(tokenizer.eos_tokens, dtype=np.intp)
        grammar = LLMatcher.grammar_from_lark(language.lark())
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._refuse_error()

    @property
    def finished(self) -> bool:
        """Whether what was written is a whole sentence of the language and nothing can follow it."""
        return self._ask(self._matcher.is_accepting) and self._ask(self._matcher.is_stopped)

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as far as their spelling is settled; possibly none."""
        return self._ask(self._matcher.compute_ff_tokens)

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, shape [vocab_size]; at least one. End tokens are never among them."""
        bits = np.frombuffer(self._ask(self._matcher.compute_bitmask), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)
        allowed[self._end_tokens] = False
        if not allowed.any():
            raise LanguageError("the mask permits no token", reason_code=MASK_FAILED)
        return allowed

    def advance(self, tokens: Sequence[int]) -> None:
        """Take these tokens as written; raise when the language does not permit them."""
        if tokens and not self._ask(lambda: self._matcher.consume_tokens(list(tokens))):
            raise LanguageError("the mask refused a token", reason_code=MASK_FAILED)

    def _ask(self, question: Callable[[], _T]) -> _T:
        try:
            answer = question()
        except Exception as error:
            raise LanguageError("the mask failed", reason_code=MASK_FAILED) from error
        self._refuse_error()
        return answer

    def _refuse_error(self) -> None:
        if self._matcher.is_error():
            line = (self._matcher.get_error().splitlines() or ["unknown cause"])[0]
            raise LanguageError(f"the mask failed: {line[:200]}", reason_code=MASK_FAILED)


_OF: WeakKeyDictionary[LlamaBackend | HfBackend, LLTokenizer] = WeakKeyDictionary()


def tokenizer_of(backend: LlamaBackend | HfBackend) -> LLTokenizer:
    """Return a backend's tokenizer for masks, made once."""
    if backend not in _OF:
        _OF[backend] = llguidance_tokenizer(backend.words)
    return _OF[backend]
