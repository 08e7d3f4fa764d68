"""Loads weights, tokenizer, fingerprint and device for transformers, without a network, foreign code or pickles."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from logging import CRITICAL
from pathlib import Path
from typing import Any, cast

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map, load_gguf_checkpoint
from transformers.utils.logging import set_verbosity

from sds.models.files.fingerprint import gguf_fingerprint
from sds.models.files.gguf_header import GgufFile
from sds.models.files.safetensors import read_safetensors
from sds.models.llamacpp.tokenizer import LlamaTokenizer
from sds.models.llamacpp.weights import tokenizer_of
from sds.models.protocol import BackendError, check_device
from sds.models.tokenizer.tokenizer_json import JsonTokenizer

HINT_CHARACTERS_MAX = 200
_COMPUTED = "rotary_emb.inv_freq"  # stored in old checkpoints, although it is computed from the config
_EXPERTS = "_exp"  # in names of tensors of which a GGUF file joins several of transformers'


def device_of(name: str) -> torch.device:
    number = check_device(name)
    if name != "cpu" and (number or 0) >= (count := torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise BackendError(f"no CUDA device{f' {number}' if count else ''}: torch sees {count or 'none'}")
    return torch.device(name)


def fingerprint_of(path: Path) -> str:
    """Return the SHA-256 of the weights: of a GGUF file, or of a folder's safetensors files end to end, by name."""
    if not path.is_dir():
        return gguf_fingerprint(path)
    if (path / "adapter_config.json").exists():
        raise BackendError(f"`{path}` is an adapter, not a model", hint="merge it into its model first")
    return read_safetensors(path).sha256


def unfit_folder(folder: Path) -> str:
    """Return why transformers cannot run a checkpoint folder, as far as its config.json tells; "" where nothing does."""
    read: Any = AutoConfig.from_pretrained
    try:
        with _quiet():
            config = read(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # noqa: BLE001  what it raises, it raises when the model is loaded, too
        return "transformers does not know this architecture, or cannot read its config.json"
    return (
        "" if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else "transformers has no model of this kind that writes text"
    )


def loaded(
    path: Path, dtype: torch.dtype
) -> tuple[Any, LlamaTokenizer | JsonTokenizer, str | None, Callable[[], object]]:
    """Return a folder's or GGUF file's model, tokenizer and chat template, and a function that frees the tokenizer."""
    with failing(f"`{path}` is damaged or of a kind that transformers does not know"), _quiet():
        model = (_from_folder if path.is_dir() else _from_gguf)(path, dtype)
        return model, *_tokenizer(path, int(model.get_output_embeddings().weight.shape[0]))


def _tokenizer(path: Path, size: int) -> tuple[LlamaTokenizer | JsonTokenizer, str | None, Callable[[], object]]:
    if path.is_dir():
        own = JsonTokenizer(path, size)
        return own, own.chat_template, lambda: None
    tokenizer, template, free = tokenizer_of(path)
    if tokenizer.size != size:
        tokenizer.release()
        free()
        raise BackendError(f"the model has {size} logits, but its tokenizer has {tokenizer.size} tokens")
    return tokenizer, template, free


def _from_folder(path: Path, dtype: torch.dtype) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    return _whole(load(path, local_files_only=True, trust_remote_code=False, use_safetensors=True, **_options(dtype)))


def _from_gguf(path: Path, dtype: torch.dtype) -> Any:
    """De-quantise by transformers' tables; its own `gguf_file=` would need one more library for the same."""
    where = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(path.parent, **where)
    build: Any = AutoModelForCausalLM.from_config
    read: Any = load_gguf_checkpoint
    with torch.device("meta"):
        shapes = build(config)
    names: Any = get_gguf_hf_weights_map
    places = set(names(shapes, cast("Any", TensorProcessor)()))
    _refuse_surplus(name for name in GgufFile(path).tensors if name not in places and _EXPERTS not in name)
    weights = read(path, return_tensors=True, model_to_load=shapes, torch_dtype=dtype)["tensors"]
    return _whole(type(shapes).from_pretrained(None, config=config, state_dict=weights, **_options(dtype)))


def _options(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}


def _whole(loaded: tuple[Any, dict[str, Any]]) -> Any:
    """Return the model. Raises BackendError where weights were not loaded, and so would be random numbers, or are left over.

    Weights that transformers knows to be unused are not among the unexpected ones.
    """
    model, found = loaded
    lacking = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
    if lacking:
        raise BackendError(f"the checkpoint lacks {len(lacking)} weights, first `{lacking[0]}`")
    _refuse_surplus(key for key in map(str, found["unexpected_keys"]) if not key.endswith(_COMPUTED))
    for name, weights in model.state_dict().items():
        if weights.is_floating_point() and not bool(torch.isfinite(weights).all()):
            raise BackendError(f"the weights `{name}` contain non-finite numbers in {weights.dtype}")
    return model


def _refuse_surplus(names: Iterable[str]) -> None:
    """Raise BackendError for weights without a place in the model: it would differ from the one of the fingerprint."""
    surplus = sorted(names)
    if surplus:
        raise BackendError(
            f"the checkpoint has {len(surplus)} weights that its config does not name, first `{surplus[0]}`",
            hint="correct the folder's config.json (layers, biases), or run the GGUF with llamacpp",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off standard error; failures are raised instead."""
    set_verbosity(CRITICAL)
    with redirect_stderr(io.StringIO()):
        yield


@contextmanager
def failing(what: str) -> Iterator[None]:
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
            raise BackendError(f"{what}: no memory", hint="use a smaller model, prompt or dtype") from error
        raise BackendError(what, hint=(str(error).strip().splitlines() or [""])[0][:HINT_CHARACTERS_MAX]) from error
