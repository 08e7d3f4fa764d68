"""Peers that drive transformers: Outlines (outlines_core, llguidance), xgrammar, lm-format-enforcer.

The weights are those of the GGUF, de-quantised, in the quicker of fp32 and bf16. The contract's part of the prompt stays
in the cache from one decision to the next.
"""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, DynamicCache, GenerationConfig

from sds.benchmarks.peer.drivers.on_outlines import by_outlines
from sds.benchmarks.peer.drivers.serving import Decide, Peer, Request, Said, timed
from sds.models.transformers_.backend import HfBackend
from sds.models.transformers_.facts import TRANSFORMERS

TRIAL_PROMPT_TOKENS, TRIAL_STEPS = 64, 8


class CachedModel:
    """One model with the prefix of a prompt in its cache."""

    def __init__(self, module: Any, tokenizer: Any) -> None:
        self.module, self.tokenizer = module, tokenizer
        end = tokenizer.eos_token_id
        module.generation_config = GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=end)  # type: ignore[no-untyped-call]
        self._cache = DynamicCache(config=module.config)
        self._static: list[int] = []

    def options(self, request: Request) -> dict[str, Any]:
        """Return the options of `generate`, with a cache that holds exactly the prompt's static part."""
        static = request["tokens"][: request["tokens_static"]]
        if static != self._static:
            self._cache, self._static = DynamicCache(config=self.module.config), static
            with torch.inference_mode():
                ids = torch.tensor([static], device=self.module.device)
                self.module(input_ids=ids, past_key_values=self._cache, logits_to_keep=1)
        elif (surplus := self._cache.get_seq_length() - len(static)) > 0:
            self._cache.crop(-surplus)
        return {"past_key_values": self._cache, "max_new_tokens": request["tokens_max"]}

    def write(self, request: Request, **processor: Any) -> str:
        ids = torch.tensor([request["tokens"]], device=self.module.device)
        with torch.inference_mode():
            found = self.module.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), **self.options(request), **processor
            )
        return str(self.text(found[:, ids.shape[1] :])[0])

    def text(self, ids: Any) -> list[str]:
        found: list[str] = self.tokenizer.batch_decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return found


def tokenizer_of(path: Path) -> Any:
    """Return the tokenizer of a GGUF file or a checkpoint folder."""
    folder, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, **file)


def _quickest(path: Path, threads: int) -> tuple[Any, str]:
    """Return the model, with the library's quickest attention, in the quicker of fp32 and bf16, and that type's name."""
    module: Any = HfBackend(path, threads=threads).module
    module.set_attn_implementation("sdpa")
    halved = deepcopy(module).to(torch.bfloat16)
    return (halved, "bf16") if _trial_ms(halved) < _trial_ms(module) else (module, "fp32")


def _trial_ms(module: Any) -> float:
    """Return the time of a short prompt and some single tokens, after a warm-up, in milliseconds."""

    def once() -> None:
        cache = DynamicCache(config=module.config)
        with torch.inference_mode():
            for count in (TRIAL_PROMPT_TOKENS, *[1] * TRIAL_STEPS):
                module(input_ids=torch.ones((1, count), dtype=torch.long), past_key_values=cache, logits_to_keep=1)

    once()
    return timed(once)[1]


def open_peer(path: Path, threads: int, options: list[str]) -> Peer:
    (name,) = options
    torch.compiler.set_stance("force_eager")  # compiling a mask's one line takes a minute and a C++ compiler
    kinds = {"xgrammar": _xgrammar, "lm-format-enforcer": _lm_format_enforcer}
    module, dtype = _quickest(path, threads)
    model = CachedModel(module, tokenizer_of(path))
    dists = (*(() if name in kinds else ("outlines",)), name, TRANSFORMERS.distribution, "torch")
    decide = kinds[name](model) if name in kinds else by_outlines_on(model, name)
    return Peer(decide, dists, f"transformers in {dtype} (the quicker of fp32 and bf16), static prefix cached")


def by_outlines_on(model: CachedModel, backend: str) -> Decide:
    """Return a function that decides with Outlines. Raises ImportError where it or its backend is not installed."""
    import outlines  # noqa: PLC0415  a peer may be missing
    from outlines.models.transformers import TransformerTokenizer  # noqa: PLC0415

    class TokenPrompt(TransformerTokenizer):  # type: ignore[misc,unused-ignore]  # untyped
        """A tokenizer that returns the tokens that all peers get, since Outlines passes texts alone."""

        held: list[int]

        def encode(self, _prompt: Any, **_options: Any) -> Any:  # type: ignore[override]
            ids = torch.tensor([self.held])
            return ids, torch.ones_like(ids)

        def decode(self, token_ids: Any) -> list[str]:
            return model.text(token_ids)

    driven: Any = outlines.from_transformers(model.module, model.tokenizer)
    driven.tokenizer = TokenPrompt(model.tokenizer)

    def options(request: Request) -> dict[str, Any]:
        driven.tokenizer.held = request["tokens"]
        return model.options(request)

    decide = by_outlines(driven, backend, options)

    def without_gradients(request: Request) -> Said:
        with torch.inference_mode():
            return decide(request)

    return without_gradients


def _xgrammar(model: CachedModel) -> Decide:
    import xgrammar  # noqa: PLC0415  a peer may be missing
    from xgrammar.contrib.hf import LogitsProcessor  # noqa: PLC0415

    known = xgrammar.TokenizerInfo.from_huggingface(model.tokenizer, vocab_size=model.module.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(known)

    def decide(request: Request) -> Said:
        compiled, compile_ms = timed(lambda: compiler.compile_regex(request["regex"]))
        return Said(model.write(request, logits_processor=[LogitsProcessor(compiled)]), compile_ms)

    return decide


def _lm_format_enforcer(model: CachedModel) -> Decide:
    # Its integration imports one class from where transformers 4 had it.
    import_module("transformers.tokenization_utils").PreTrainedTokenizerBase = transformers.PreTrainedTokenizerBase  # type: ignore[attr-defined]
    enforcer: Any = import_module("lmformatenforcer")
    enforcing: Any = import_module("lmformatenforcer.integrations.transformers")
    known = enforcing.build_token_enforcer_tokenizer_data(model.tokenizer)

    def decide(request: Request) -> Said:
        parser, compile_ms = timed(lambda: enforcer.RegexParser(request["regex"]))
        allowed = enforcing.build_transformers_prefix_allowed_tokens_fn(known, parser)
        return Said(model.write(request, prefix_allowed_tokens_fn=allowed), compile_ms)

    return decide
