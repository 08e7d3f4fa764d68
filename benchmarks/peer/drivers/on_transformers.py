"""Peers that drive transformers: Outlines (outlines_core, llguidance), xgrammar, lm-format-enforcer.

The weights are those of the GGUF, de-quantised, in the data type that is quickest here. The contract's part of the
prompt stays in the cache from one decision to the next.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, DynamicCache, GenerationConfig

from sds.benchmarks.peer.drivers.outlines_llamacpp import compiler_of
from sds.benchmarks.peer.drivers.serving import Peer, Request, Said, serve, timed
from sds.models.transformers_.backend import HfBackend
from sds.models.transformers_.facts import TRANSFORMERS

TRIAL_PROMPT_TOKENS, TRIAL_STEPS = 64, 8
Processor = Callable[[str], dict[str, Any]]


class Model:
    """One model with the prefix of a prompt in its cache."""

    def __init__(self, path: Path, threads: int) -> None:
        self.module = HfBackend(path, threads=threads).module
        self.module.set_attn_implementation("sdpa")
        halved = deepcopy(self.module).to(torch.bfloat16)
        self.dtype = "fp32"
        if _trial_s(halved) < _trial_s(self.module):
            self.module, self.dtype = halved, "bf16"
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(**where, local_files_only=True)
        end = self.tokenizer.eos_token_id
        self.module.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, eos_token_id=end, pad_token_id=end
        )
        self._cache = DynamicCache(config=self.module.config)
        self._static: list[int] = []

    def options(self, request: Request) -> dict[str, Any]:
        """Return what `generate` is given besides the prompt; the cache then holds the static part and no more."""
        static = request["tokens"][: request["tokens_static"]]
        if static != self._static:
            self._cache, self._static = DynamicCache(config=self.module.config), static
            with torch.inference_mode():
                self.module(input_ids=torch.tensor([static]), past_key_values=self._cache, logits_to_keep=1)
        elif (surplus := self._cache.get_seq_length() - len(static)) > 0:
            self._cache.crop(-surplus)
        return {"past_key_values": self._cache, "max_new_tokens": request["tokens_max"]}

    def write(self, request: Request, **processor: Any) -> str:
        ids = torch.tensor([request["tokens"]])
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


def _trial_s(module: Any) -> float:
    """Return how long a short prompt and some single tokens take, after a warm-up."""
    for _ in range(2):
        began = time.perf_counter()
        cache = DynamicCache(config=module.config)
        with torch.inference_mode():
            for count in (TRIAL_PROMPT_TOKENS, *[1] * TRIAL_STEPS):
                module(input_ids=torch.ones((1, count), dtype=torch.long), past_key_values=cache, logits_to_keep=1)
        took = time.perf_counter() - began
    return took


def open_peer(path: Path, threads: int, options: list[str]) -> Peer:
    (name,) = options
    torch.compiler.set_stance("force_eager")  # compiling a mask's one line takes a minute and a C++ compiler
    kinds = {"xgrammar": _xgrammar, "lm-format-enforcer": _lm_format_enforcer}
    model = Model(path, threads)
    dists = (*(() if name in kinds else ("outlines",)), name, TRANSFORMERS.distribution, "torch")
    decide = kinds[name](model) if name in kinds else _outlines(model, name)
    return Peer(decide, dists, f"transformers in {model.dtype} (the quicker of fp32 and bf16), static prefix cached")


def _outlines(model: Model, backend: str) -> Callable[[Request], Said]:
    import outlines  # noqa: PLC0415  a peer may be missing
    from outlines.models.transformers import TransformerTokenizer  # noqa: PLC0415

    class TokenPrompt(TransformerTokenizer):  # type: ignore[misc,unused-ignore]  # untyped
        """Outlines gives text only: its tokenizer returns the tokens that all peers get."""

        held: list[int]

        def encode(self, _prompt: Any, **_options: Any) -> Any:  # type: ignore[override]
            ids = torch.tensor([self.held])
            return ids, torch.ones_like(ids)

        def decode(self, token_ids: Any) -> list[str]:
            return model.text(token_ids)

    driven: Any = outlines.from_transformers(model.module, model.tokenizer)
    driven.tokenizer = TokenPrompt(model.tokenizer)
    compiler = compiler_of(driven, backend)

    def decide(request: Request) -> Said:
        processor, compile_ms = timed(lambda: compiler.get_regex_logits_processor(request["regex"]))
        driven.tokenizer.held = request["tokens"]
        with torch.inference_mode():
            generate: Any = outlines.Generator(driven, processor=processor)
            text = generate("-", **model.options(request))
        return Said(text, compile_ms)

    return decide


def _xgrammar(model: Model) -> Callable[[Request], Said]:
    import xgrammar  # noqa: PLC0415  a peer may be missing
    from xgrammar.contrib.hf import LogitsProcessor  # noqa: PLC0415

    known = xgrammar.TokenizerInfo.from_huggingface(model.tokenizer, vocab_size=model.module.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(known)

    def decide(request: Request) -> Said:
        compiled, compile_ms = timed(lambda: compiler.compile_regex(request["regex"]))
        return Said(model.write(request, logits_processor=[LogitsProcessor(compiled)]), compile_ms)

    return decide


def _lm_format_enforcer(model: Model) -> Callable[[Request], Said]:
    # Its integration looks for one class where transformers 4 had it; nothing else of it has moved.
    import_module("transformers.tokenization_utils").PreTrainedTokenizerBase = transformers.PreTrainedTokenizerBase  # type: ignore[attr-defined]
    enforcer: Any = import_module("lmformatenforcer")
    enforcing: Any = import_module("lmformatenforcer.integrations.transformers")
    known = enforcing.build_token_enforcer_tokenizer_data(model.tokenizer)

    def decide(request: Request) -> Said:
        parser, compile_ms = timed(lambda: enforcer.RegexParser(request["regex"]))
        allowed = enforcing.build_transformers_prefix_allowed_tokens_fn(known, parser)
        return Said(model.write(request, prefix_allowed_tokens_fn=allowed), compile_ms)

    return decide


if __name__ == "__main__":
    with warnings.catch_warnings():  # what torch loads with its peers is deprecated by torch itself
        warnings.simplefilter("ignore", DeprecationWarning)
        serve(open_peer)
