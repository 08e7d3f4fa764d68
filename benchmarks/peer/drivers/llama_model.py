"""llama-cpp-python's model for the peers that drive it, with or without flash attention: whichever is quicker here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from llama_cpp import Llama

from sds.benchmarks.peer.drivers.serving import timed

CONTEXT_TOKENS = 2048
TRIAL_PROMPT_TOKENS, TRIAL_STEPS, TRIALS = 64, 8, 3


def quickest_llama(model: Path, threads: int, *, kind: type[Llama] = Llama, **options: Any) -> tuple[Any, str]:
    """Load the model and return it with a note on how. Its cache keeps the longest prefix common to two prompts."""
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)
    tried: list[tuple[float, bool, Any]] = []
    for flash in (False, True):
        llama: Any = kind(
            str(model),
            n_ctx=CONTEXT_TOKENS,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            flash_attn=flash,
            verbose=False,
            **options,
        )
        tried.append((min(_trial_ms(llama) for _ in range(TRIALS)), flash, llama))
    (_, flash, quickest), (_, _, other) = sorted(tried, key=lambda found: found[0])
    other.close()
    quickest.reset()
    return quickest, f"flash attention {'on' if flash else 'off'} (the quicker), longest common prefix reused"


def _trial_ms(llama: Any) -> float:
    def once() -> None:
        llama.reset()
        for count in (TRIAL_PROMPT_TOKENS, *[1] * TRIAL_STEPS):
            llama.eval([1] * count)

    _, ms = timed(once)
    return ms
