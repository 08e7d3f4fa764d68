"""llama.cpp's own judgement of a GBNF: its grammar sampler, asked token by token over a real vocabulary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from ctypes import byref
from pathlib import Path
from random import Random

import llama_cpp as lib

from sds.models.llamacpp.tokenizer import LlamaTokenizer
from sds.models.tokenizer.tokenizer import ModelTokenizer

PIECE_BYTES_MAX = 16


class GbnfVocabulary:
    """The printable pieces and the single bytes of a GGUF's vocabulary; no weights are loaded."""

    def __init__(self, path: Path) -> None:
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.vocab_only = True
        self._model = lib.llama_model_load_from_file(os.fsencode(path), params)
        self.pointer = lib.llama_model_get_vocab(self._model)
        words = ModelTokenizer(LlamaTokenizer(self.pointer))
        self.end = words.words.eos
        self.tokens = {
            piece: token
            for token in range(words.vocab_size)
            if (piece := words.piece(token))
            and (
                len(piece) == 1 or (len(piece) <= PIECE_BYTES_MAX and piece.isascii() and piece.decode().isprintable())
            )
        }

    def close(self) -> None:
        lib.llama_model_free(self._model)

    def cut(self, data: bytes, rng: Random) -> Iterator[int | None]:
        """Spell `data` in tokens of up to a random length; None is a byte that this vocabulary does not have."""
        longest, at = rng.randint(1, PIECE_BYTES_MAX), 0
        while at < len(data):
            size = next((n for n in range(longest, 1, -1) if data[at : at + n] in self.tokens), 1)
            yield self.tokens.get(data[at : at + size])
            at += size


class GbnfMatcher:
    def __init__(self, vocabulary: GbnfVocabulary, grammar: str) -> None:
        self._vocabulary = vocabulary
        self._sampler = lib.llama_sampler_init_grammar(vocabulary.pointer, grammar.encode(), b"root")
        assert self._sampler, "llama.cpp refused the grammar"
        self._one = (lib.llama_token_data * 1)()
        self._array = lib.llama_token_data_array(self._one, 1, -1, False)

    def permits(self, token: int) -> bool:
        self._one[0].id, self._one[0].logit = token, 1.0
        lib.llama_sampler_apply(self._sampler, byref(self._array))
        return bool(self._one[0].logit == 1.0)

    def accepts(self, data: bytes, rng: Random) -> bool:
        """Tell whether the sampler permits every token in turn, and the end after the last."""
        lib.llama_sampler_reset(self._sampler)
        for token in self._vocabulary.cut(data, rng):
            if token is None or not self.permits(token):
                return False
            lib.llama_sampler_accept(self._sampler, token)
        return self.permits(self._vocabulary.end)

    def close(self) -> None:
        lib.llama_sampler_free(self._sampler)
