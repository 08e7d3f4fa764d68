"""Outlines on transformers, on the device and with the weights that ours has just decided with.

The packet's tokens are the same as ours; the contract's part of the prompt stays in the cache from one decision to the
next; attention is the library's quickest. The expression is compiled for each packet, for each has bounds of its own.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sds.engines.text import END_TOKENS, grammar_of
from sds.grammars.language import language
from sds.kernel.decision.packet import DecisionPacket
from sds.models.protocol import Backend, prompt_sections

BACKENDS = ("outlines_core", "llguidance")


class OutlinesOnDevice:
    """One way to drive `module`, a model of transformers: `decide(packet)` returns the text and the milliseconds it took."""

    def __init__(self, module: Any, folder: Path, backend: Backend, masks: str) -> None:
        """Raise ImportError where Outlines, or what makes its masks, is not installed."""
        import outlines  # noqa: PLC0415  a peer may be missing
        import torch  # noqa: PLC0415
        from outlines import backends  # noqa: PLC0415
        from outlines.models.transformers import TransformerTokenizer  # noqa: PLC0415
        from transformers import AutoTokenizer, DynamicCache, GenerationConfig  # noqa: PLC0415

        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        end = tokenizer.eos_token_id
        configure: Any = GenerationConfig
        module.generation_config = configure(do_sample=False, eos_token_id=end, pad_token_id=end)
        self._torch, self._module, self._words = torch, module, backend
        self._new_cache: Callable[[], Any] = lambda: DynamicCache(config=module.config)
        self._cache, self._static = self._new_cache(), list[int]()
        held: list[list[int]] = [[]]

        class TokenPrompt(TransformerTokenizer):  # type: ignore[misc,unused-ignore]  # untyped
            """Outlines gives text only: its tokenizer returns the tokens that ours has."""

            def encode(self, _prompt: Any, **_options: Any) -> Any:  # type: ignore[override]
                ids = torch.tensor(held)
                return ids, torch.ones_like(ids)

        self._held = held
        self._driven: Any = outlines.from_transformers(module, tokenizer)
        self._driven.tokenizer = TokenPrompt(tokenizer)
        kinds = {"outlines_core": backends.OutlinesCoreBackend, "llguidance": backends.LLGuidanceBackend}
        with warnings.catch_warnings():  # its libraries call others by old names
            warnings.simplefilter("ignore")
            self._compiler: Any = kinds[masks](self._driven)
        self._generator: Any = outlines.Generator

    def decide(self, packet: DecisionPacket) -> tuple[str, float]:
        grammar = grammar_of(language(packet.envelope, packet.snapshot.id), "regex")
        sections = prompt_sections(self._words, *packet.sections)
        began = time.perf_counter()
        processor = self._compiler.get_regex_logits_processor(grammar.text)
        self._held[0] = [token for section in sections for token in section]
        options = {"past_key_values": self._kept(sections), "max_new_tokens": grammar.bytes_max + END_TOKENS}
        with self._torch.inference_mode():
            text = self._generator(self._driven, processor=processor)("-", **options)
        return text, (time.perf_counter() - began) * 1000

    def _kept(self, sections: Sequence[Sequence[int]]) -> Any:
        """Return a cache that holds the contract's part of the prompt and no more."""
        static = list(sections[0])
        if static != self._static:
            self._cache, self._static = self._new_cache(), static
            with self._torch.inference_mode():
                ids = self._torch.tensor([static], device=self._module.device)
                self._module(input_ids=ids, past_key_values=self._cache, logits_to_keep=1)
        elif (surplus := self._cache.get_seq_length() - len(static)) > 0:
            self._cache.crop(-surplus)
        return self._cache
