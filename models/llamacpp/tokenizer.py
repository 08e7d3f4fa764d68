"""The tokenizer of a loaded llama.cpp model: text to tokens, tokens to bytes, and control tokens."""

from __future__ import annotations

from ctypes import create_string_buffer
from functools import lru_cache

import llama_cpp as lib

from sds.models.protocol import BackendError

PIECE_BYTES_MAX = 1 << 14
TEXTS_CACHED = 64  # prompts start alike
BYTES_HINT = "use a model whose tokenizer has a token for every byte"
_GUARD = b"\x02"


class LlamaTokenizer:
    """Points into the model. After `release()`, which precedes freeing the model, every use raises `BackendError`."""

    def __init__(self, vocab: lib.llama_vocab_p) -> None:
        self._vocab: lib.llama_vocab_p | None = vocab
        self.size = lib.llama_vocab_n_tokens(vocab)
        self.bos = lib.llama_vocab_bos(vocab)
        self.eos = lib.llama_vocab_eos(vocab)
        self.adds_bos = bool(lib.llama_vocab_get_add_bos(vocab))
        self._buffer = create_string_buffer(PIECE_BYTES_MAX)
        self._controls: dict[int, bool] = {}
        self._encoded = lru_cache(TEXTS_CACHED)(self._tokens)
        self._guard: int | None = None
        if lib.llama_vocab_type(vocab) == lib.LLAMA_VOCAB_TYPE_SPM:
            self._refuse_lacking_bytes()
            self._guard = self._encode(_GUARD, special=False)[-1]

    def release(self) -> None:
        self._vocab = None

    def encode(self, text: bytes, *, special: bool) -> list[int]:
        self._live()
        return list(self._encoded(text, special=special))

    def _tokens(self, text: bytes, *, special: bool) -> list[int]:
        if self._guard is None:
            return self._encode(text, special=special)
        # SentencePiece puts a space before a text. Let it precede a byte that joins with nothing, and drop both.
        tokens = self._encode(_GUARD + text, special=special)
        return tokens[tokens.index(self._guard) + 1 :]

    def _encode(self, text: bytes, *, special: bool) -> list[int]:
        room = len(text) + 16
        buffer = (lib.llama_token * room)()
        count = lib.llama_tokenize(self._live(), text, len(text), buffer, room, False, special)
        if count < 0:
            raise BackendError("a text could not be tokenized")
        return list(buffer[:count])

    def spelling(self, token: int) -> bytes:
        """Return the text of a token, also of a control token: `<|im_end|>`."""
        if not 0 <= token < self.size:
            raise BackendError("a token is outside the vocabulary")
        count = lib.llama_token_to_piece(self._live(), token, self._buffer, PIECE_BYTES_MAX, 0, True)
        if count < 0:
            raise BackendError(f"token {token} has no spelling within {PIECE_BYTES_MAX} bytes")
        return self._buffer.raw[:count]

    def is_control(self, token: int) -> bool:
        self._live()
        known = self._controls.get(token)
        if known is None:
            known = self._controls[token] = self._steers(token)
        return known

    def _steers(self, token: int) -> bool:
        attributes = lib.llama_vocab_get_attr(self._live(), token)
        if attributes & lib.LLAMA_TOKEN_ATTR_CONTROL:
            return True
        spelled = self.spelling(token) if attributes & lib.LLAMA_TOKEN_ATTR_USER_DEFINED else b""
        return spelled.startswith(b"<") and spelled.endswith(b">")

    def _refuse_lacking_bytes(self) -> None:
        """Raise BackendError for a tokenizer without tokens for some byte: llama.cpp would end the process at such a text."""
        texts = {lib.llama_vocab_get_text(self._live(), token) for token in range(self.size)}
        lacking = [byte for byte in range(256) if not texts & {b"<0x%02X>" % byte, bytes([byte])}]
        if lacking:
            raise BackendError(f"the tokenizer has no token for {len(lacking)} of 256 bytes", hint=BYTES_HINT)

    def _live(self) -> lib.llama_vocab_p:
        if self._vocab is None:
            raise BackendError("the model is closed")
        return self._vocab
