"""transformers behind the `Backend` protocol: purely token ids, some prompts side by side, one thread.

A checkpoint folder (config.json, safetensors, tokenizer.json), or a GGUF file: that one is de-quantised into memory and
keeps llama.cpp's tokenizer. Nothing is downloaded, no code of the model's is run, no pickle is read. Needs the extra
`hf`. torch has one number of threads for the whole process: loading a model sets it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sds.models.cache.prefix_caching import Part, PrefixCachingBackend
from sds.models.protocol import CONTEXT_TOKENS, BackendError, Dtype, check_slots, extra_hint

try:
    import torch

    from sds.models.transformers_.kv_cache import HfStore, store_of
    from sds.models.transformers_.loading import device_of, failing, fingerprint_of, loaded
except ImportError as error:
    raise BackendError("transformers and torch are not installed", hint=extra_hint("hf")) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class HfBackend(PrefixCachingBackend):
    """One model with a cache for some prompts. Give each thread its own; call `close()` when done.

    Attention is eager. Models with sliding windows or recurrent states run one row at a time, and go on from a
    copy of what was kept.
    """

    _store: HfStore

    def __init__(
        self,
        path: Path,
        *,
        device: str = "cpu",
        dtype: Dtype = "fp32",
        n_ctx: int = CONTEXT_TOKENS,
        threads: int | None = None,
        slots: int = 1,
    ) -> None:
        """Load weights; raise `BackendError` when `path` or `device` is nothing that transformers can run."""
        check_slots(slots)
        if dtype not in DTYPES:
            raise BackendError(f"transformers does not compute in {dtype} here", hint=f"choose {', '.join(DTYPES)}")
        self._device = device_of(device)
        torch.set_num_threads(threads or os.cpu_count() or 1)
        self.name = path.name
        self.fingerprint = fingerprint_of(path)
        self._model, words, template, self._free_words = loaded(path, DTYPES[dtype])
        self.vocab_size = int(self._model.get_output_embeddings().weight.shape[0])
        config = self._model.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None)
        self.context_tokens_max = min(n_ctx, longest) if isinstance(longest, int) else n_ctx
        try:
            with failing(f"the model cannot be moved to `{device}`"):
                self._model.eval().to(self._device)
            store = store_of(self._model, self._device, seats=slots, context=self.context_tokens_max)
        except BaseException:
            words.release()
            self._free_words()
            raise
        super().__init__(slots=slots, words=words, template=template, store=store)

    @property
    def module(self) -> Any:
        """The model itself, for a library that drives it on its own."""
        self._ready()
        return self._model

    @property
    def end_token(self) -> int:
        return self._words.eos

    def _call(self, parts: Sequence[Part]) -> list[NDArray[np.float32]]:
        """Run the head only where logits are wanted."""
        outputs = max(part.outputs for part in parts)
        found = self._store.run(parts, partial(self._logits, outputs), repeated=outputs == 1)
        values = found[:, found.shape[1] - outputs :].float().cpu().numpy()
        return [of_part[outputs - part.outputs :] for of_part, part in zip(values, parts, strict=True)]

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        with failing(what), torch.inference_mode():
            yield

    def _free(self) -> None:
        self._words.release()
        self._free_words()
        del self._model, self._store

    def _logits(self, outputs: int, **inputs: Any) -> torch.Tensor:
        if not outputs:
            states = self._model.base_model(**inputs, use_cache=True).last_hidden_state
            return states.new_zeros((len(inputs["input_ids"]), 0, self.vocab_size))  # type: ignore[no-any-return]
        return self._model(**inputs, use_cache=True, logits_to_keep=outputs).logits  # type: ignore[no-any-return]
