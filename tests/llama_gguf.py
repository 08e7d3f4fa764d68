"""Write random models of a few kilobytes: `llama` and other architectures, of any sizes, settings and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray

CONTEXT = 512
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
PIECES = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *((f"<0x{byte:02X}>", BYTE) for byte in range(256))]
PIECES += [(chr(byte), NORMAL) for byte in range(33, 127)] + [("\u2581", NORMAL)]
F32 = gguf.GGMLQuantizationType.F32

Tensors = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int = 2
    heads: int = 2
    key_heads: int = 1
    head: int = 16
    width: int = 32
    inner: int = 64


def random_tensors(sizes: Sizes = Sizes()) -> Tensors:
    rng = np.random.default_rng(1)
    queries, keys, width, inner = sizes.heads * sizes.head, sizes.key_heads * sizes.head, sizes.width, sizes.inner
    shapes = {"attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (keys, width)}
    shapes |= {"attn_output": (width, queries), "ffn_gate": (inner, width)}
    shapes |= {"ffn_up": (inner, width), "ffn_down": (width, inner)}

    def matrix(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)

    found = {"token_embd.weight": matrix(len(PIECES), width), "output_norm.weight": rng.random(width, np.float32) + 1}
    for n in range(sizes.layers):
        found |= {f"blk.{n}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        found |= {f"blk.{n}.{name}.weight": rng.random(width, np.float32) + 1 for name in ("attn_norm", "ffn_norm")}
    return found


def mamba_tensors(sizes: Sizes = Sizes(), *, state: int = 4, kernel: int = 4) -> Tensors:
    """Return random tensors of the architecture `mamba`: what it has read is one state."""
    rng = np.random.default_rng(2)
    width, inner, rank = sizes.width, 2 * sizes.width, 2
    shapes = {
        "ssm_in.weight": (2 * inner, width),
        "ssm_conv1d.weight": (inner, kernel),
        "ssm_out.weight": (width, inner),
    }
    shapes |= {"ssm_x.weight": (rank + 2 * state, inner), "ssm_dt.weight": (inner, rank)}

    def matrix(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)

    found = {"token_embd.weight": matrix(len(PIECES), width), "output_norm.weight": rng.random(width, np.float32) + 1}
    for n in range(sizes.layers):
        found |= {f"blk.{n}.{name}": matrix(*shape) for name, shape in shapes.items()}
        found |= {
            f"blk.{n}.{name}": rng.random(inner, np.float32) for name in ("ssm_conv1d.bias", "ssm_dt.bias", "ssm_d")
        }
        found |= {f"blk.{n}.ssm_a": -rng.random((inner, state), np.float32) - np.float32(0.1)}
        found |= {f"blk.{n}.attn_norm.weight": rng.random(width, np.float32) + 1}
    return found


def mamba_settings(sizes: Sizes = Sizes(), *, state: int = 4, kernel: int = 4) -> dict[str, float | str | list[int]]:
    ssm = {
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": 2 * sizes.width,
        "ssm.state_size": state,
        "ssm.time_step_rank": 2,
    }
    return {**ssm, "feed_forward_length": 0, "attention.head_count": 0, "context_length": 4096}


def hybrid_tensors(sizes: Sizes = Sizes(), *, state: int = 4) -> Tensors:
    """Return random tensors of the architecture `jamba`: its first layer has a recurrent state, the second a KV cache."""
    rng, attention, ssm = np.random.default_rng(3), random_tensors(sizes), mamba_tensors(sizes, state=state)
    found = {name: values for name, values in attention.items() if not name.startswith("blk.0.attn_")}
    found |= {name: values for name, values in ssm.items() if name.startswith("blk.0.")}
    norms = {"ssm_dt_norm": 2, "ssm_b_norm": state, "ssm_c_norm": state}
    return found | {f"blk.0.{name}.weight": rng.random(size, np.float32) + 1 for name, size in norms.items()}


def hybrid_settings(sizes: Sizes = Sizes()) -> dict[str, float | str | list[int]]:
    return {
        **mamba_settings(sizes),
        "feed_forward_length": sizes.inner,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": [0, sizes.key_heads],
    }


def windowed_tensors(sizes: Sizes) -> Tensors:
    """Return random tensors of the architecture `cohere2`, most of whose layers attend within a sliding window."""
    return {name: values for name, values in random_tensors(sizes).items() if "ffn_norm" not in name}


def windowed_settings(window: int) -> dict[str, float | str | list[int]]:
    return {
        "attention.sliding_window": window,
        "logit_scale": 0.5,
        "attention.layer_norm_epsilon": 1e-5,
        "context_length": 4096,
    }


def llama_gguf(
    path: Path,
    sizes: Sizes = Sizes(),
    *,
    tensors: Tensors | None = None,
    kind: gguf.GGMLQuantizationType = F32,
    settings: Mapping[str, float | str | list[int]] | None = None,
    without: str = "",
    architecture: str = "llama",
) -> Path:
    """Write a model. `settings` add to the architecture's or replace them; `without`: one left out; `kind`: of matrices."""
    writer = gguf.GGUFWriter(path, architecture)
    said = _settings(sizes) | dict(settings or {})
    said.pop(without, None)
    for name, value in said.items():
        _add(writer, f"{architecture}.{name}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in PIECES])
    writer.add_token_scores([-float(rank) for rank in range(len(PIECES))])
    writer.add_token_types([kind for _, kind in PIECES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in (random_tensors(sizes) if tensors is None else tensors).items():
        stored = kind if values.ndim > 1 else F32
        writer.add_tensor(name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _settings(sizes: Sizes) -> dict[str, float | str | list[int]]:
    return {
        "block_count": sizes.layers,
        "context_length": CONTEXT,
        "embedding_length": sizes.width,
        "feed_forward_length": sizes.inner,
        "vocab_size": len(PIECES),
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": sizes.key_heads,
        "attention.key_length": sizes.head,
        "attention.value_length": sizes.head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": sizes.head,
    }


def _add(writer: gguf.GGUFWriter, name: str, value: float | str | list[int]) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        (writer.add_uint32 if value < 1 << 32 else writer.add_uint64)(name, value)
