"""OpenVINO GenAI with its own structured output (xgrammar, by `StructuredOutputConfig`).

Its best mode is found at each start, by decisions like ours: paged attention with its prefix cache, with 8-bit keys and
values or 16-bit ones (`ContinuousBatchingPipeline`; `LLMPipeline` over it takes the same time); the same with prompt
look-up, which guesses tokens from what was read; and attention over one whole cache (SDPA), which reads every prompt
anew. It infers in BF16 where the processor has it, by its own choice: FP32 is slower, FP16 no quicker. It has as many
threads as the others, pinned to no core, so that processes do not share one. It does not skip forced tokens: each is a
pass. In batches it makes more decisions a second than one at a time, but fewer than guidance makes alone, so `throughput`
does not ask it.

Its GGUF reader supports neither BF16 nor F32: such weights are rewritten as F16, which holds every BF16 number from 2^-17
on and rounds smaller ones. It reads files of fewer bits (Q8_0, Q4_1) as they are and multiplies them in 8 bits: quicker,
with other decisions; `--model` measures that.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from sds.benchmarks.peer.drivers.serving import Peer, Request, Said, timed
from sds.models.openvino_.facts import OPENVINO

CACHE_GB = 1
TRIAL_COMMON_TOKENS, TRIAL_OWN_TOKENS, TRIAL_TOKENS_MAX, TRIALS = 192, 96, 160, 3
LOOK_UP = {"num_assistant_tokens": 5, "max_ngram_size": 3}
Answer = tuple[list[int], float | None]  # tokens, and the grammar's compile time in milliseconds, where it is known
Pipeline = Callable[[list[int], Any], Answer]


def open_peer(model: Path, threads: int, _options: list[str]) -> Peer:
    genai: Any = import_module("openvino_genai")
    with tempfile.TemporaryDirectory() as folder:
        readable, encoding = _readable(genai, model, Path(folder))
        words: Any = genai.Tokenizer(readable)
        quickest, how = _quickest(genai, readable, words, threads)

    def decide(request: Request) -> Said:
        asked = _greedy(genai, words, request["regex"], request["tokens_max"])
        tokens, compile_ms = quickest(request["tokens"], asked)
        return Said(words.decode(tokens), compile_ms)

    return Peer(decide, ("openvino_genai", OPENVINO.distribution), f"{how}{encoding}")


def _readable(genai: Any, model: Path, folder: Path) -> tuple[Path, str]:
    """Return the file and no note where its reader takes it, else the same weights as F16 and a note about that."""
    try:
        genai.LLMPipeline(model, "CPU")
    except RuntimeError:
        path = folder / "F16.gguf"
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_F16, True
        if llama_cpp.llama_model_quantize(os.fsencode(model), os.fsencode(path), ctypes.byref(params)):
            raise
        return path, "; the same weights written as F16, for its reader knows no BF16"
    return model, ""


def _greedy(genai: Any, words: Any, regex: str, tokens_max: int) -> Any:
    asked = genai.GenerationConfig(max_new_tokens=tokens_max)
    asked.set_eos_token_id(words.get_eos_token_id())
    asked.structured_output_config = genai.StructuredOutputConfig(regex=regex)
    return asked


def _quickest(genai: Any, model: Path, words: Any, threads: int) -> tuple[Pipeline, str]:
    settings = {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
    wide = settings | {"KV_CACHE_PRECISION": "f16"}
    pipelines = {
        "paged attention, prefix cached": _paged(genai, model, settings),
        "paged attention, prefix cached, 16-bit keys and values": _paged(genai, model, wide),
        "paged attention, prefix cached, prompt look-up": _looking_up(genai, model, settings),
        "SDPA": _one(genai.LLMPipeline(model, "CPU", ATTENTION_BACKEND="SDPA", **settings)),
    }
    took = {
        how: min(_trial_ms(genai, pipeline, words, turn) for turn in range(TRIALS))
        for how, pipeline in pipelines.items()
    }
    how = min(took, key=took.__getitem__)
    return pipelines[how], f"{how} (the quickest)"


def _schedule(genai: Any) -> Any:
    schedule = genai.SchedulerConfig()
    schedule.enable_prefix_caching, schedule.cache_size = True, CACHE_GB
    return schedule


def _paged(genai: Any, model: Path, settings: dict[str, Any]) -> Pipeline:
    pipeline = genai.ContinuousBatchingPipeline(model, _schedule(genai), "CPU", settings)

    def write(tokens: list[int], asked: Any) -> Answer:
        (found,) = pipeline.generate([_tensor(tokens)], [asked])
        return found.m_generation_ids[0], _compile_ms(found)

    return write


def _looking_up(genai: Any, model: Path, settings: dict[str, Any]) -> Pipeline:
    pipeline = _one(genai.LLMPipeline(model, "CPU", prompt_lookup=True, scheduler_config=_schedule(genai), **settings))

    def write(tokens: list[int], asked: Any) -> Answer:
        asked.update_generation_config(**LOOK_UP)
        return pipeline(tokens, asked)

    return write


def _one(pipeline: Any) -> Pipeline:
    def write(tokens: list[int], asked: Any) -> Answer:
        found = pipeline.generate(_tensor(tokens), asked)
        return found.tokens[0], _compile_ms(found)

    return write


def _compile_ms(found: Any) -> float | None:
    took = float(found.perf_metrics.get_grammar_compile_time().mean)
    return took if took >= 0 else None  # with prompt look-up it is not measured


def _tensor(tokens: list[int]) -> Any:
    return import_module(OPENVINO.distribution).Tensor(np.array([tokens], np.int64))


def _trial_ms(genai: Any, pipeline: Pipeline, words: Any, turn: int) -> float:
    """Return the milliseconds of a decision-like request: a prompt with a new end, one choice, a forced reference."""
    common, own = (np.random.default_rng(seed) for seed in (0, 1 + turn))
    tokens = len(words.get_vocab())
    prompt = [*common.integers(tokens, size=TRIAL_COMMON_TOKENS), *own.integers(tokens, size=TRIAL_OWN_TOKENS)]
    decision = r'\{"action":"(DENY|ESCALATE)","context_ref":"' + own.bytes(32).hex() + r'"\}'
    asked = _greedy(genai, words, decision, TRIAL_TOKENS_MAX)
    _, ms = timed(lambda: pipeline([int(token) for token in prompt], asked))
    return ms
