"""A checkpoint folder, or a GGUF, as Outlines' transformers model, with a prompt in tokens."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import outlines

from sds.models.protocol import BackendError, ChatFrame, Dtype, extra_hint
from sds.models.transformers_.backend import HfBackend

try:
    import torch
    from outlines.models.transformers import TransformerTokenizer
    from transformers import AutoTokenizer, GenerationConfig
except ImportError as error:
    raise BackendError("transformers is not installed", hint=extra_hint("hf")) from error


for _kernel in ("outlines_core.kernels.torch", "llguidance.torch"):
    with warnings.catch_warnings(), suppress(ImportError):  # what torch loads with them is deprecated by torch itself
        warnings.simplefilter("ignore", DeprecationWarning)
        import_module(_kernel)


class _TokenPrompt(TransformerTokenizer):  # type: ignore[misc,unused-ignore]  # untyped
    """Outlines' tokenizer, which reads the tokens it holds: in a text it would take spelled control tokens for real."""

    held: list[int]

    def encode(self, _prompt: Any, **_options: Any) -> Any:  # type: ignore[override]
        ids = torch.tensor([self.held])  # shape [1, len(held)]
        return ids, torch.ones_like(ids)

    def decode(self, token_ids: Any) -> list[str]:
        found: list[str] = self.tokenizer.batch_decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return found


class DrivenTransformers:
    """One model; the weights are loaded as for our own engine, which also frames the prompt. `limits`: greedy."""

    tokens_name = "max_new_tokens"

    def __init__(self, path: Path, *, device: str, dtype: Dtype, n_ctx: int, threads: int | None) -> None:
        self._backend = HfBackend(path, device=device, dtype=dtype, n_ctx=n_ctx, threads=threads)
        self.name, self.fingerprint = self._backend.name, self._backend.fingerprint
        self.context_tokens_max = self._backend.context_tokens_max
        self.end_token, self.words = self._backend.end_token, self._backend.words
        where = {"pretrained_model_name_or_path": path} if path.is_dir() else _gguf(path)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(**where, local_files_only=True, trust_remote_code=False)
            self.outlines_model: Any = outlines.from_transformers(self._backend.module, tokenizer)
            self._prompt = self.outlines_model.tokenizer = _TokenPrompt(tokenizer)
        except Exception as error:
            self._backend.close()
            raise BackendError(f"Outlines does not take the tokenizer of `{path}`: {type(error).__name__}") from error
        # A checkpoint's own settings may ask for sampling, penalties or another end.
        self._backend.module.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, eos_token_id=self.end_token, pad_token_id=self.end_token
        )
        self.limits: dict[str, Any] = {}

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return self._backend.tokenize(text, special=special)

    def frame(self) -> ChatFrame:
        return self._backend.frame()

    def hold(self, prompt: list[int]) -> None:
        self._prompt.held = prompt

    def running(self) -> AbstractContextManager[object]:
        """Masks are applied as written: compiling that one line takes a minute and a C++ compiler."""
        found: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return found

    def close(self) -> None:
        self.outlines_model = None
        self._backend.close()


def _gguf(path: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
