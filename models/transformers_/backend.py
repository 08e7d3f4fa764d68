"""transformers behind the `Backend` protocol: token ids only, several prompts side by side, one thread.

It runs a checkpoint folder (config.json, safetensors, tokenizer.json), or a GGUF file, which is de-quantised into
memory and keeps llama.cpp's tokenizer. Nothing is downloaded, no code of the model's is run, no pickle is read. Needs
the extra `hf`. torch has one number of threads for the whole process; loading a model sets it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sds.models.cache.kv_cache import BatchRow
from sds.models.cache.prefix_cache import CALL_TOKENS_MAX, PrefixCachingBackend
from sds.models.protocol import CARD_SLOTS_MAX, CONTEXT_TOKENS, BackendError, Dtype, check_slots, extra_hint, importing

with importing("transformers and torch are not installed", extra_hint("hf")):
    import torch

    from sds.models.transformers_.fused import fuse
    from sds.models.transformers_.kv_cache import HfKVCache, kv_cache_for
    from sds.models.transformers_.loading import device_of, failing, fingerprint_of, loaded

if TYPE_CHECKING:
    from numpy.typing import NDArray

PADDING_TOKENS_MAX = 64  # in one call; more would cost more than another call
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class HfBackend(PrefixCachingBackend):
    """One model with a cache for several prompts. Give each thread its own; call `close()` when done.

    Attention is eager; on a GPU it is fused, and passes of few shapes are captured. Rows of one pass share a call, padded on
    the left. Models with sliding windows or recurrent states run one row a call, and continue from a copy of the cached state.
    """

    _kv_cache: HfKVCache

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
        """Load weights. Raises BackendError when transformers cannot run `path`, or not on `device`."""
        check_slots(slots, CARD_SLOTS_MAX)
        if dtype not in DTYPES:
            raise BackendError(
                f"transformers does not support the dtype {dtype} here", hint=f"choose {', '.join(DTYPES)}"
            )
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
                if self._device.type == "cuda":
                    fuse(self._model)
            kv_cache = kv_cache_for(self._model, self._device, slots=slots, context=self.context_tokens_max)
        except BaseException:
            words.release()
            self._free_words()
            raise
        super().__init__(slots=slots, words=words, template=template, kv_cache=kv_cache)

    @property
    def module(self) -> Any:
        """The model itself, for a library that drives it."""
        self._ready()
        return self._model

    def _call(self, rows: Sequence[BatchRow]) -> list[NDArray[np.float32]]:
        logits: dict[int, NDArray[np.float32]] = {}
        for group in self._groups(rows):
            logits |= zip(group, self._padded_call([rows[n] for n in group]), strict=True)
        return [logits[n] for n in range(len(rows))]

    def _groups(self, rows: Sequence[BatchRow]) -> Iterator[list[int]]:
        """Split rows into calls of similar length, to keep padding small. The split depends on the rows' lengths alone."""
        group: list[int] = []
        real = 0
        for n in sorted(range(len(rows)), key=lambda n: len(rows[n].tokens)):
            tokens = len(rows[n].tokens)
            area, real = (len(group) + 1) * tokens, real + tokens
            full = area > CALL_TOKENS_MAX or area - real > PADDING_TOKENS_MAX
            if group and (full or not self._kv_cache.batched):
                yield group
                group, real = [], tokens
            group.append(n)
        if group:
            yield group

    def _padded_call(self, rows: Sequence[BatchRow]) -> list[NDArray[np.float32]]:
        """Run the head only where logits are wanted, and move these in the model's own type."""
        outputs = max(row.outputs for row in rows)
        found = self._kv_cache.run(rows, self._logits)
        values = found[:, found.shape[1] - outputs :].cpu().float().numpy()
        return [of_row[outputs - row.outputs :] for of_row, row in zip(values, rows, strict=True)]

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        with failing(what), torch.inference_mode():
            yield

    def _free(self) -> None:
        self._free_words()
        del self._model, self._kv_cache

    def _logits(self, outputs: int, **inputs: Any) -> torch.Tensor:
        if not outputs:
            states = self._model.base_model(**inputs, use_cache=True).last_hidden_state
            return states.new_zeros((len(inputs["input_ids"]), 0, self.vocab_size))  # type: ignore[no-any-return]
        return self._model(**inputs, use_cache=True, logits_to_keep=outputs).logits  # type: ignore[no-any-return]
