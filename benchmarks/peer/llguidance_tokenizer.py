"""A model's vocabulary for llguidance, for the benchmark, and for the tests that compare our grammar with it."""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper

from sds.models.tokenizer.tokenizer import Tokenizer, tokens_of


def llguidance_tokenizer(words: Tokenizer) -> LLTokenizer:
    """Build llguidance's tokenizer; it takes a quarter of a second."""
    return LLTokenizer(TokenizerWrapper(_Spellings(words)))


class _Spellings:
    """What llguidance needs of a tokenizer: the bytes of every token, and the tokens of a text."""

    def __init__(self, words: Tokenizer) -> None:
        every = range(words.size)
        self.eos_token_id = words.eos
        self.bos_token_id = None
        self.tokens = [words.spelling(token) for token in every]
        self.special_token_ids = [token for token in every if words.is_control(token)]
        self._words = words

    def __call__(self, text: bytes) -> list[int]:
        return tokens_of(self._words, text, special=False)
