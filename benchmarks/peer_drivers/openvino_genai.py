"""OpenVINO GenAI with its own structured output (xgrammar behind `StructuredOutputConfig`): what runs ours, driven by others.

Its best mode, of what was tried. Paged attention with its prefix cache (`ContinuousBatchingPipeline`, or `LLMPipeline`
over it, which takes the same time) and attention over one whole cache (`LLMPipeline`, SDPA, which reads the whole prompt
anew) are both tried at each start, the first with its 8-bit keys and values and with 16-bit ones, and the quickest stays.
Inference in BF16 where the processor has it, which is also its default; FP32 and FP16 were slower. Its threads are as many
as everybody's and pinned to no core, so that two processes do not share one. Prompt look-up (`prompt_lookup`) was slower:
what is forced here stands in no prompt. It does not skip forced tokens: every token is a pass.

Its GGUF reader knows neither BF16 nor F32: such weights are written anew as F16, which holds every BF16 number from 2^-17
on and rounds what is smaller. Files of fewer bits (Q8_0, Q4_1) it reads as they are and multiplies in 8 bits: quicker, with
other decisions; `--model` measures that.
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

from sds.benchmarks.peer_drivers.serving import Peer, Request, Said, serve, timed

CACHE_GB = 1
TRIAL_COMMON_TOKENS, TRIAL_OWN_TOKENS, TRIAL_STEPS, TRIALS = 192, 96, 8, 3
Answer = tuple[list[int], float]  # tokens, and how long the grammar took, in milliseconds
Pipeline = Callable[[list[int], Any], Answer]


def open_peer(model: Path, threads: int, _options: list[str]) -> Peer:
    genai: Any = import_module("openvino_genai")
    with tempfile.TemporaryDirectory() as folder:
        readable, encoding = _readable(genai, model, Path(folder))
        quickest, how = _quickest(genai, readable, threads)
        words: Any = genai.Tokenizer(readable)

    def decide(request: Request) -> Said:
        asked = genai.GenerationConfig()
        asked.max_new_tokens = request["tokens_max"]
        asked.set_eos_token_id(words.get_eos_token_id())
        asked.structured_output_config = genai.StructuredOutputConfig(regex=request["regex"])
        tokens, compile_ms = quickest(request["tokens"], asked)
        return Said(words.decode(tokens), compile_ms)

    return Peer(decide, ("openvino_genai", "openvino"), f"{how}{encoding}")


def _readable(genai: Any, model: Path, folder: Path) -> tuple[Path, str]:
    """Return the file if its reader takes it, else the same weights as F16, and a note that says so."""
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


def _quickest(genai: Any, model: Path, threads: int) -> tuple[Pipeline, str]:
    settings = {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
    wide = settings | {"KV_CACHE_PRECISION": "f16"}
    pipelines = {
        "paged attention, prefix cached": _paged(genai, model, settings),
        "paged attention, prefix cached, 16-bit keys and values": _paged(genai, model, wide),
        "SDPA": _whole(genai, model, settings),
    }
    took = {how: min(_trial_ms(genai, pipeline, turn) for turn in range(TRIALS)) for how, pipeline in pipelines.items()}
    how = min(took, key=took.__getitem__)
    return pipelines[how], f"{how} (the quickest)"


def _paged(genai: Any, model: Path, settings: dict[str, Any]) -> Pipeline:
    schedule = genai.SchedulerConfig()
    schedule.enable_prefix_caching, schedule.cache_size = True, CACHE_GB
    pipeline = genai.ContinuousBatchingPipeline(model, schedule, "CPU", settings)

    def write(tokens: list[int], asked: Any) -> Answer:
        (found,) = pipeline.generate([_tensor(tokens)], [asked])
        return found.m_generation_ids[0], found.perf_metrics.get_grammar_compile_time().mean

    return write


def _whole(genai: Any, model: Path, settings: dict[str, Any]) -> Pipeline:
    pipeline = genai.LLMPipeline(model, "CPU", ATTENTION_BACKEND="SDPA", **settings)

    def write(tokens: list[int], asked: Any) -> Answer:
        found = pipeline.generate(_tensor(tokens), asked)
        return found.tokens[0], found.perf_metrics.get_grammar_compile_time().mean

    return write


def _tensor(tokens: list[int]) -> Any:
    return import_module("openvino").Tensor(np.array([tokens], np.int64))


def _trial_ms(genai: Any, pipeline: Pipeline, turn: int) -> float:
    """Return how long some tokens take after a prompt whose end is new."""
    asked = genai.GenerationConfig(max_new_tokens=TRIAL_STEPS, ignore_eos=True)
    prompt = [1] * TRIAL_COMMON_TOKENS + [2 + turn] * TRIAL_OWN_TOKENS
    _, ms = timed(lambda: pipeline(prompt, asked))
    return ms


if __name__ == "__main__":
    serve(open_peer)
