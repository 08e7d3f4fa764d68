"""Fused attention and norms for a GPU: there a small model's pass takes as long as starting its kernels, so fewer are started.

Attention is torch's own (`sdpa`). Whether a norm has a fused equal is tested on random numbers, not looked up by name.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.nn import functional

ROUNDINGS = 4  # permitted, of the norm's own type: it rounds twice where the fused one rounds once
SEED = 1


def fuse(model: Any) -> None:
    """Let a model on its device use fused attention and fused root-mean-square norms where it can."""
    with suppress(ValueError, ImportError):  # a model without `sdpa` keeps its attention
        model.set_attn_implementation("sdpa")
    for module in model.modules():
        if (fused := fused_norm(module)) is not None:
            module.forward = fused


def fused_norm(module: Any) -> Any:
    """Return a one-kernel equal of this module, or None where it is no such norm."""
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    fused = partial(functional.rms_norm, normalized_shape=(len(weight),), weight=weight, eps=epsilon)
    generator = torch.Generator().manual_seed(SEED)
    tried = torch.randn((2, len(weight)), generator=generator).to(weight)
    with torch.inference_mode(), suppress(RuntimeError, TypeError):
        expected, found = module(tried).float(), fused(tried).float()
        margin = ROUNDINGS * torch.finfo(weight.dtype).eps * expected.abs().max()
        return fused if bool((expected - found).abs().max() <= margin) else None
    return None
