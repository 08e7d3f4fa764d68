"""A GGUF as Outlines' llama.cpp model, with a prompt in tokens."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import llama_cpp as lib
import outlines

from sds.models.files.fingerprint import gguf_fingerprint
from sds.models.llamacpp.tokenizer import LlamaTokenizer
from sds.models.llamacpp.weights import UNFIT_HINT, chat_template, trained_context, unfit
from sds.models.protocol import BackendError, ChatFrame
from sds.models.tokenizer.tokenizer import model_frame, tokens_of


class _TokenPrompt(lib.Llama):
    """llama-cpp-python's model, reading the tokens it holds: in a text it would take spelled control tokens for real."""

    held: list[int]

    def __call__(self, _prompt: str, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        return super().__call__(self.held, *args, **options)  # type: ignore[arg-type]  # tokens are what it takes as well


# a build for a card would use it for long passes even with no layer on it
ON_PROCESSOR: dict[str, Any] = {
    "n_gpu_layers": 0,
    "split_mode": lib.LLAMA_SPLIT_MODE_NONE,
    "main_gpu": -1,
    "offload_kqv": False,
    "op_offload": False,
}


class DrivenLlama:
    """One model and one context; `limits` make it greedy."""

    tokens_name = "max_tokens"

    def __init__(self, path: Path, *, n_ctx: int, threads: int | None) -> None:
        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)
        self.name, self.fingerprint = path.name, gguf_fingerprint(path)
        count = threads or os.cpu_count() or 1
        try:
            self._llama = _TokenPrompt(
                str(path), n_ctx=n_ctx, n_threads=count, n_threads_batch=count, verbose=False, **ON_PROCESSOR
            )
        except (ValueError, OSError, MemoryError) as error:
            raise BackendError(f"`{path}` is damaged or of a kind this llama.cpp does not know") from error
        if why := unfit(self._llama.model):
            self._llama.close()
            raise BackendError(why, hint=UNFIT_HINT)
        self.context_tokens_max = trained_context(self._llama.model, n_ctx)
        self.words = LlamaTokenizer(lib.llama_model_get_vocab(self._llama.model))
        self.end_token = self.words.eos
        self.outlines_model = outlines.from_llamacpp(self._llama, chat_mode=False)
        self.limits: dict[str, Any] = {"temperature": 0.0, "repeat_penalty": 1.0}

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return tokens_of(self.words, text, special=special)

    def frame(self) -> ChatFrame:
        return model_frame(chat_template(self._llama.model), self.words)

    def hold(self, prompt: list[int]) -> None:
        self._llama.held = prompt

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        self.words.release()
        self._llama.close()
