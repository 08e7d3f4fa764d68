"""Models of one's own, made from the embedded one: `python -m tests.own_models FOLDER`.

`FOLDER/checkpoint` is a Hugging Face checkpoint folder, `FOLDER/model-f16.gguf` another GGUF: the same weights in
half precision in both, so that engines can be compared on them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from ctypes import byref
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from sds.models.catalog import embedded_model

CHECKPOINT, SECOND_GGUF = "checkpoint", "model-f16.gguf"
CONTROL = 3
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

Weights = dict[str, NDArray[np.float16]]


def checkpoint_folder(path: Path) -> Path:
    """Write the embedded model as a checkpoint folder: config, float16 safetensors, tokenizer, chat template."""
    reader = gguf.GGUFReader(embedded_model())
    config = llama_config(reader)
    write_checkpoint(path, config, _weights(reader, config), _tokenizer_lists(reader))
    return path


def second_gguf(path: Path) -> Path:
    """Write the embedded model again as a GGUF of float16."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_F16, True, 1
    if llama_cpp.llama_model_quantize(os.fsencode(embedded_model()), os.fsencode(path), byref(params)):
        raise RuntimeError(f"`{path}` could not be written")
    return path


def write_checkpoint(
    path: Path, config: Mapping[str, object], weights: Weights, lists: Mapping[str, list[str] | list[int] | str]
) -> None:
    """Write a checkpoint folder of these weights. `lists`: tokens, merges, token_type and chat_template of a GGUF."""
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    tokens, types = list(lists["tokens"]), list(lists["token_type"])
    special = [{"id": i, "content": tokens[i], "special": True} for i, kind in enumerate(types) if kind == CONTROL]
    for name, content in {
        "config.json": config,
        "tokenizer.json": _tokenizer_json(tokens, list(lists["merges"]), special),
        "tokenizer_config.json": {
            "bos_token": tokens[1],
            "eos_token": tokens[2],
            "unk_token": tokens[0],
            "chat_template": lists["chat_template"],
            "tokenizer_class": "GPT2Tokenizer",
        },
    }.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")


def llama_config(reader: gguf.GGUFReader) -> dict[str, object]:
    def number(name: str) -> int | float:
        return reader.fields[f"llama.{name}"].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "max_position_embeddings": number("context_length"),
        "num_attention_heads": number("attention.head_count"),
        "num_hidden_layers": number("block_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base"),
        "tie_word_embeddings": True,
        "vocab_size": number("vocab_size"),
    }


def _weights(reader: gguf.GGUFReader, config: Mapping[str, object]) -> Weights:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return dict(_named(tensor, heads) for tensor in reader.tensors)


def _named(tensor: gguf.ReaderTensor, heads: Mapping[str, object]) -> tuple[str, NDArray[np.float16]]:
    kind = tensor.name.removesuffix(".weight")
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    if kind in _OTHER_NAMES:
        return f"{_OTHER_NAMES[kind]}.weight", values.astype(np.float16)
    _, layer, kind = kind.split(".")
    if kind in heads:
        values = _rotated_by_halves(values, int(str(heads[kind])))
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight", values.astype(np.float16)


def _rotated_by_halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp rotates neighbouring rows of a head together, transformers a head's first half with its second."""
    rows, width = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, width))


def _tokenizer_lists(reader: gguf.GGUFReader) -> dict[str, list[str] | list[int] | str]:
    lists = {name: reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type")}
    return {**lists, "chat_template": reader.fields["tokenizer.chat_template"].contents()}


def _tokenizer_json(
    tokens: list[object], merges: list[object], special: list[dict[str, object]]
) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**token, **flags} for token in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def made_in(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    yield checkpoint_folder(folder / CHECKPOINT)
    yield second_gguf(folder / SECOND_GGUF)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.own_models", description="make two models of one's own")
    parser.add_argument("folder", type=Path)
    for path in made_in(parser.parse_args().folder):
        print(path)
