"""llama.cpp behind the `Backend` protocol: purely token ids, one context, one sequence, one thread.

Built on llama-cpp-python's low-level functions. Flash attention is off: with it on, the same prefix cut elsewhere gives
other logits; with it off they are bit-equal. It does not schedule, sample, or run two prompts at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import llama_cpp as lib
import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from sds.models.protocol import BackendError, ChatFrame, shared_sections
from sds.models.vocabulary import Vocabulary
from sds.models.words import grammar_tokenizer, model_frame, tokens_of

CONTEXT_TOKENS = 4096
BATCH_TOKENS = 512
_GGUF_MAGIC = b"GGUF"


class LlamaBackend:
    """One GGUF model with one cache. Give each thread its own; call `close()` when done."""

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int = CONTEXT_TOKENS,
        n_batch: int = BATCH_TOKENS,
        threads: int | None = None,
    ) -> None:
        """Load weights; raise `BackendError` when `path` is not a GGUF file that llama.cpp can run."""
        self.name = path.name
        self.fingerprint = gguf_fingerprint(path)
        self.context_tokens_max = n_ctx
        self._batch_tokens = min(n_batch, n_ctx)
        self._model, self._vocabulary = load_gguf(path)
        self.vocab_size = self._vocabulary.size
        self._context = _context(self._model, n_ctx, self._batch_tokens, threads or os.cpu_count() or 1)
        self._batch = lib.llama_batch_init(self._batch_tokens, 0, 1)
        self._held: list[tuple[int, ...]] = []
        self._position = 0
        self._open = True
        self._tokenizer: LLTokenizer | None = None
        self._frame: ChatFrame | None = None

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return tokens_of(self._vocabulary, text, special=special)

    def piece(self, token: int) -> bytes:
        return self._vocabulary.piece(token)

    def frame(self) -> ChatFrame:
        self._ready()
        if self._frame is None:
            self._frame = model_frame(chat_template(self._model), self._vocabulary)
        return self._frame

    def grammar_tokenizer(self) -> LLTokenizer:
        self._ready()
        if self._tokenizer is None:
            self._tokenizer = grammar_tokenizer(self._vocabulary)
        return self._tokenizer

    def begin(self, sections: Sequence[Sequence[int]]) -> None:
        self._ready()
        wanted = [tuple(section) for section in sections]
        self._fits(sum(map(len, wanted)))
        kept = shared_sections(wanted, self._held)
        self._held = wanted[:kept]
        self._position = sum(map(len, self._held))
        if not lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), 0, self._position, -1):
            self._forget()
            raise BackendError("the model's cache cannot be cut back")
        for section in wanted[kept:]:
            self._decode(section)
            self._held.append(section)

    def step(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self._ready()
        if not tokens:
            raise BackendError("a step needs at least one token")
        self._fits(self._position + len(tokens))
        self._decode(tokens)
        row = lib.llama_get_logits_ith(self._context, -1)
        if not row:
            raise BackendError("the model returned no logits")
        return np.ctypeslib.as_array(row, shape=(self.vocab_size,)).copy()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._vocabulary.release()
            lib.llama_batch_free(self._batch)
            lib.llama_free(self._context)
            lib.llama_model_free(self._model)

    def _ready(self) -> None:
        if not self._open:
            raise BackendError("the model is closed")

    def _fits(self, tokens: int) -> None:
        if tokens > self.context_tokens_max:
            raise BackendError(
                f"{tokens} tokens are more than the model's context of {self.context_tokens_max}",
                hint="shorten the prompt or load the model with a larger context",
            )

    def _decode(self, tokens: Sequence[int]) -> None:
        if any(not 0 <= token < self.vocab_size for token in tokens):
            raise BackendError("a token is outside the vocabulary")
        for start in range(0, len(tokens), self._batch_tokens):
            part = tokens[start : start + self._batch_tokens]
            self._fill(part)
            code = lib.llama_decode(self._context, self._batch)
            if code != 0:
                self._forget()
                raise BackendError(f"the model could not be run on {len(part)} tokens (llama.cpp code {code})")
            self._position += len(part)

    def _fill(self, tokens: Sequence[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self._position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 0
        batch.logits[len(tokens) - 1] = 1  # only the last row's logits are computed

    def _forget(self) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        self._held, self._position = [], 0


def gguf_fingerprint(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
                raise BackendError(f"`{path}` is not a GGUF file", hint="name a GGUF file or a checkpoint folder")
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BackendError(f"`{path}` cannot be read: {(error.strerror or 'unknown cause').lower()}") from error


def load_gguf(path: Path, *, vocab_only: bool = False) -> tuple[lib.llama_model_p, Vocabulary]:
    """Load a model, or no more than its vocabulary; the caller frees it. Raises BackendError."""
    # llama.cpp logs through this logger's level and straight to standard error; failures are raised here instead.
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.vocab_only = vocab_only
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    vocab = lib.llama_model_get_vocab(model) if model else None
    if model is None or vocab is None:
        raise BackendError(f"`{path}` is damaged or of a kind this llama.cpp does not know")
    return model, Vocabulary(vocab)


def chat_template(model: lib.llama_model_p) -> str | None:
    template = lib.llama_model_chat_template(model, None)
    return template.decode() if template else None


def _context(model: lib.llama_model_p, n_ctx: int, n_batch: int, threads: int) -> lib.llama_context_p:
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_batch
    params.n_threads = params.n_threads_batch = threads
    params.n_outputs_max = 1
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context: lib.llama_context_p | None = lib.llama_init_from_model(model, params)
    if context is None:
        lib.llama_model_free(model)
        raise BackendError(f"no memory for a context of {n_ctx} tokens", hint="load the model with a smaller context")
    return context
