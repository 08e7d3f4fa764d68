"""Make models like a user's own from the embedded one: `python -m tests.own_models FOLDER`.

`FOLDER/checkpoint` is a Hugging Face checkpoint folder, `FOLDER/model-f16.gguf` a GGUF. Both have the same weights in half
precision, so that engines can be compared on them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Mapping
from ctypes import byref
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray

from sds.benchmarks.card.checkpoint import GgufReader, config_of, tokenizer_files
from sds.models.catalog.catalog import embedded_model

try:
    from safetensors.numpy import save_file
except ImportError:  # the README shows this command to users, too
    raise SystemExit("error: safetensors is not installed\nmend:  make install") from None

CHECKPOINT, SECOND_GGUF = "checkpoint", "model-f16.gguf"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

Values = NDArray[np.float16] | NDArray[np.float32]
Weights = dict[str, Values]


def checkpoint_folder(path: Path, source: Path | None = None) -> Path:
    """Write `source`, or the embedded model, as a checkpoint folder of float16: config, safetensors, tokenizer."""
    reader = GgufReader(source or embedded_model())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = config_of(fields)
    path.mkdir(parents=True)
    save_file(_weights(reader, config), path / "model.safetensors", metadata={"format": "pt"})
    for name, content in {"config.json": config, **tokenizer_files(fields)}.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    return path


def second_gguf(path: Path) -> Path:
    """Write the embedded model again as a GGUF of float16."""
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_F16, True, 1
    if llama_cpp.llama_model_quantize(os.fsencode(embedded_model()), os.fsencode(path), byref(params)):
        raise RuntimeError(f"`{path}` could not be written")
    return path


def _weights(reader: GgufReader, config: Mapping[str, int]) -> Weights:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return dict(_named(tensor, heads) for tensor in reader.tensors)


def _named(tensor: gguf.ReaderTensor, heads: Mapping[str, int]) -> tuple[str, Values]:
    kind = tensor.name.removesuffix(".weight")
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    if kind in _OTHER_NAMES:
        return f"{_OTHER_NAMES[kind]}.weight", _halved(values)
    _, layer, kind = kind.split(".")
    if kind in heads:
        values = _rotated_by_halves(values, heads[kind])
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight", _halved(values)


def _halved(values: NDArray[np.float32]) -> Values:
    """Return matrices as float16, and the vectors of norms as they are, as llama.cpp does."""
    return values.astype(np.float16) if values.ndim > 1 else values


def _rotated_by_halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return the rows of q or k in transformers' order: it rotates a head's halves together, llama.cpp neighbouring rows."""
    rows, width = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, width))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.own_models", description="make two models of one's own")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if folder.exists():
        parser.error(f"`{folder}` exists already")
    folder.mkdir(parents=True)
    for path in (checkpoint_folder(folder / CHECKPOINT), second_gguf(folder / SECOND_GGUF)):
        print(path)


if __name__ == "__main__":
    main()
