"""The vocabulary of a loaded llama.cpp model: text to tokens, tokens to bytes, and which tokens steer the model."""

from __future__ import annotations

from ctypes import create_string_buffer

import llama_cpp as lib
from llguidance import LLTokenizer, TokenizerWrapper

from sds.models.protocol import BackendError

TEXT_BYTES_MAX = 1 << 20
PIECE_BYTES_MAX = 1 << 14


class Vocabulary:
    """Points into the model: after `release()`, and so after the model is freed, every use raises `BackendError`."""

    def __init__(self, vocab: lib.llama_vocab_p) -> None:
        self._vocab: lib.llama_vocab_p | None = vocab
        self.size = lib.llama_vocab_n_tokens(vocab)
        self.bos = lib.llama_vocab_bos(vocab)
        self.eos = lib.llama_vocab_eos(vocab)
        self.adds_bos = bool(lib.llama_vocab_get_add_bos(vocab))
        self._buffer = create_string_buffer(PIECE_BYTES_MAX)

    def release(self) -> None:
        self._vocab = None

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        if len(text) > TEXT_BYTES_MAX:
            raise BackendError(f"a text of {len(text)} bytes is longer than {TEXT_BYTES_MAX}")
        room = len(text) + 16
        buffer = (lib.llama_token * room)()
        count = lib.llama_tokenize(self._live(), text, len(text), buffer, room, False, special)
        if count < 0:
            raise BackendError("a text could not be tokenized")
        tokens = list(buffer[:count])
        return tokens if special else self._without_control(text, tokens)

    def piece(self, token: int) -> bytes:
        return b"" if self.is_control(token) else self.spelling(token)

    def spelling(self, token: int) -> bytes:
        """Return how a token is written, control tokens too: `<|im_end|>`."""
        if not 0 <= token < self.size:
            raise BackendError("a token is outside the vocabulary")
        count = lib.llama_token_to_piece(self._live(), token, self._buffer, PIECE_BYTES_MAX, 0, True)
        if count < 0:
            raise BackendError(f"token {token} has no spelling within {PIECE_BYTES_MAX} bytes")
        return self._buffer.raw[:count]

    def is_control(self, token: int) -> bool:
        attributes = lib.llama_vocab_get_attr(self._live(), token)
        if attributes & lib.LLAMA_TOKEN_ATTR_CONTROL:
            return True
        spelled = self.spelling(token) if attributes & lib.LLAMA_TOKEN_ATTR_USER_DEFINED else b""
        return spelled.startswith(b"<") and spelled.endswith(b">")

    def grammar_tokenizer(self) -> LLTokenizer:
        """Build the tokenizer for masks; takes a quarter of a second."""
        return LLTokenizer(TokenizerWrapper(_Spellings(self)))

    def _without_control(self, text: bytes, tokens: list[int]) -> list[int]:
        """Break up what reads as a control token all the same: llama.cpp always matches user-defined ones."""
        spelled = next((self.spelling(token) for token in tokens if self.is_control(token)), b"")
        at = text.find(spelled) + 1 if spelled else 0
        if not at:
            return tokens
        return self.tokenize(text[:at], special=False) + self.tokenize(text[at:], special=False)

    def _live(self) -> lib.llama_vocab_p:
        if self._vocab is None:
            raise BackendError("the model is closed")
        return self._vocab


class _Spellings:
    """What llguidance asks of a tokenizer: the bytes of every token, and how text is written."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        every = range(vocabulary.size)
        self.eos_token_id = vocabulary.eos
        self.bos_token_id = None
        self.tokens = [vocabulary.spelling(token) for token in every]
        self.special_token_ids = [token for token in every if vocabulary.is_control(token)]
        self._vocabulary = vocabulary

    def __call__(self, text: bytes) -> list[int]:
        return self._vocabulary.tokenize(text, special=False)
