"""Which weights a benchmark runs, and how large they are."""

from __future__ import annotations

from pathlib import Path

import llama_cpp

from sds.home import model_cache
from sds.models.catalog import embedded_model, weights_for
from sds.models.gguf import load_gguf


def weights_path(model: Path | None) -> Path:
    """Return a user's own file, or what was prepared of the embedded model (`sds models prepare`), or that itself."""
    if model is not None:
        return model
    found, _ = weights_for(embedded_model(), model_cache())
    return found.path if found else embedded_model()


def size_of(path: Path) -> tuple[int, int]:
    """Return a GGUF's weights: bytes, and how many there are."""
    model, _ = load_gguf(path)
    try:
        return int(llama_cpp.llama_model_size(model)), int(llama_cpp.llama_model_n_params(model))
    finally:
        llama_cpp.llama_model_free(model)
