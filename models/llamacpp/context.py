"""A context of llama.cpp: the settings that make its passes the same each time, and what cannot have one."""

from __future__ import annotations

import llama_cpp as lib

from sds.models.llamacpp.kv_cache import SPARE_SEQUENCES
from sds.models.llamacpp.weights import UNFIT_HINT, GgufModel, is_one_state, unfit
from sds.models.protocol import FORKS_MAX, BackendError, check_slots

CACHE_TOKENS_MAX = 1 << 17  # of all slots together: every one can be full at once


def check_cache(slots: int, n_ctx: int) -> None:
    check_slots(slots)
    if slots * n_ctx > CACHE_TOKENS_MAX:
        raise BackendError(
            f"{slots} slots of {n_ctx} tokens are more than a cache of {CACHE_TOKENS_MAX}",
            hint="ask for fewer slots or a smaller context",
        )


def check_fit(model: GgufModel, slots: int) -> None:
    """Refuse a model that writes no decision, or none beside others."""
    if why := unfit(model.pointer):
        raise BackendError(why, hint=UNFIT_HINT)
    if slots > 1 and is_one_state(model.pointer):
        raise BackendError(
            "a model whose memory is one state decides one case at a time",
            hint="`replicas` for several at once on the processor",
        )


def new_context(model: GgufModel, cells: int, n_batch: int, slots: int, threads: int) -> lib.llama_context_p:
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = cells, n_batch, n_batch
    params.n_threads = params.n_threads_batch = threads
    params.n_seq_max = slots + FORKS_MAX + SPARE_SEQUENCES
    params.n_outputs_max = max(n_batch, params.n_seq_max)  # llama.cpp ends the process over fewer than one a sequence
    params.kv_unified = True
    params.offload_kqv = params.op_offload = model.on_gpu  # else a build for a GPU would use it for some passes
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if slots > 1 else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context: lib.llama_context_p | None = lib.llama_init_from_model(model.pointer, params)
    if context is None:
        raise BackendError(f"no memory for a cache of {cells} tokens", hint="load the model with a smaller context")
    return context
