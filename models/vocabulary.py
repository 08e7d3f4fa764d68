"""The vocabulary of a loaded llama.cpp model: text to tokens, tokens to bytes, and which tokens steer the model."""

from __future__ import annotations

from ctypes import create_string_buffer

import llama_cpp as lib

from sds.models.protocol import BackendError

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

    def encode(self, text: bytes, *, special: bool) -> list[int]:
        room = len(text) + 16
        buffer = (lib.llama_token * room)()
        count = lib.llama_tokenize(self._live(), text, len(text), buffer, room, False, special)
        if count < 0:
            raise BackendError("a text could not be tokenized")
        return list(buffer[:count])

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

    def _live(self) -> lib.llama_vocab_p:
        if self._vocab is None:
            raise BackendError("the model is closed")
        return self._vocab
