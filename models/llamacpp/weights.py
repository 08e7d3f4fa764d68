"""A GGUF file in llama.cpp: its tokenizer; its weights in memory, which several contexts can share; the GPUs for them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_size_t, c_void_p, create_string_buffer
from functools import partial
from pathlib import Path
from typing import Self

import llama_cpp as lib

from sds.models.files.fingerprint import gguf_fingerprint, identity
from sds.models.llamacpp.tokenizer import LlamaTokenizer
from sds.models.protocol import BackendError, check_device
from sds.models.tokenizer.tokenizer import readable

OWN_MEMORY, SHARED_MEMORY = 1, 2  # ggml's numbers for kinds of GPU; 0 is the processor

VALUE_BYTES_MAX = 256
NO_AMX = "-DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8"
NO_AMX_HINT = f"build llama.cpp again with CMAKE_ARGS='{NO_AMX}', as `make` does"
UNFIT_HINT = "use a model that writes text"


class GgufModel:
    """Weights in memory, shared by several contexts. `pointer`: llama.cpp's. The last holder frees them."""

    def __init__(self, path: Path, *, device: str = "cpu") -> None:
        self.pointer, tokenizer = load_gguf(path, device=device)
        self.on_gpu = device != "cpu"
        self._first: LlamaTokenizer | None = tokenizer
        self._holders, self._lock = 1, threading.Lock()

    def tokenizer(self) -> LlamaTokenizer:
        """Return a new tokenizer, one for each thread."""
        first, self._first = self._first, None
        return first or LlamaTokenizer(lib.llama_model_get_vocab(self.pointer))

    def hold(self) -> Self:
        with self._lock:
            if not self._holders:
                raise BackendError("the model is closed")
            self._holders += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                lib.llama_model_free(self.pointer)


def load_gguf(path: Path, *, vocab_only: bool = False, device: str = "cpu") -> tuple[lib.llama_model_p, LlamaTokenizer]:
    """Load a model, or only its tokenizer; the caller frees it. Raises BackendError.

    `device`: `cuda`: all layers lie on the GPUs that this llama.cpp sees, of any maker; `cuda:1`: only on that one;
    `cpu`: no GPU is even opened.
    """
    number, on_gpu = check_device(device), bool(gpu_names(device))
    # llama.cpp uses this logger's level and writes to standard error itself; failures are raised here instead.
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.vocab_only = vocab_only
    params.use_extra_bufts = params.use_extra_bufts and not multiplies_in_tiles()
    params.n_gpu_layers = -1 if on_gpu else 0  # negative: all
    if number is not None or not on_gpu:
        params.split_mode = lib.LLAMA_SPLIT_MODE_NONE
        params.main_gpu = -1 if number is None else number  # negative: none
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if model is None:
        why = f", or there is no room for it on `{device}`" if on_gpu else ""
        raise BackendError(f"`{path}` is damaged or of a kind that this llama.cpp does not know{why}")
    try:
        return model, LlamaTokenizer(lib.llama_model_get_vocab(model))
    except BaseException:
        lib.llama_model_free(model)
        raise


def multiplies_in_tiles() -> bool:
    """Return whether llama.cpp was compiled for AMX, which it uses through "extra" buffers for weights.

    Its AMX products end a process by SIGILL where a thread has not loaded the tiles' configuration (0.3.36, GCC 12), so
    they are switched off.
    """
    return b"AMX_INT8 = 1" in lib.llama_print_system_info()


def unfit(model: lib.llama_model_p) -> str:
    """Return why a model can write no decision, whatever its tokenizer; "" where it can. Its weights need not be loaded."""
    if lib.llama_model_is_diffusion(model):
        return "a diffusion model does not write from left to right"
    if lib.llama_model_has_encoder(model) or not lib.llama_model_has_decoder(model):
        return "a model with an encoder is not supported"
    if metadata(model, f"{metadata(model, 'general.architecture')}.attention.causal") == "false":
        return "an embedding model writes no text"
    return ""


def is_one_state(model: lib.llama_model_p) -> bool:
    """Return whether a model's memory is, at least in part, one state of all positions at once (Mamba, RWKV, hybrids)."""
    return bool(lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model))


def trained_context(model: lib.llama_model_p, context_tokens: int) -> int:
    """Return `context_tokens`, or fewer if the model was trained for fewer."""
    trained = int(lib.llama_model_n_ctx_train(model))
    return min(context_tokens, trained) if trained > 0 else context_tokens


def metadata(model: lib.llama_model_p, key: str) -> str:
    buffer = create_string_buffer(VALUE_BYTES_MAX)
    length = lib.llama_model_meta_val_str(model, key.encode(), buffer, VALUE_BYTES_MAX)
    return buffer.value.decode("utf-8", "replace") if length >= 0 else ""


def chat_template(model: lib.llama_model_p) -> str | None:
    template = lib.llama_model_chat_template(model, None)
    return readable(template, "the chat template") if template else None


def tokenizer_of(path: Path) -> tuple[LlamaTokenizer, str | None, Callable[[], object]]:
    """Return a file's tokenizer and chat template without its weights, and a function that frees them. Raises BackendError."""
    model, tokenizer = load_gguf(path, vocab_only=True)
    try:
        return tokenizer, chat_template(model), partial(lib.llama_model_free, model)
    except BaseException:
        tokenizer.release()
        lib.llama_model_free(model)
        raise


@contextmanager
def opening(
    path: Path, fingerprint: str | None
) -> Iterator[tuple[LlamaTokenizer, str | None, Callable[[], object], str]]:
    """Yield the results of `tokenizer_of` and the file's SHA-256 while the rest of it is opened; free the tokenizer
    where that fails. Raises BackendError, also where the file was changed meanwhile.
    """
    seen = identity(path)
    fingerprint = fingerprint or gguf_fingerprint(path)
    tokenizer, template, free = tokenizer_of(path)
    try:
        yield tokenizer, template, free, fingerprint
        if identity(path) != seen:
            raise BackendError(f"`{path}` was changed while it was opened", hint="open it again")
    except BaseException:
        free()
        raise


def gpus() -> tuple[str, ...]:
    """Return the name of each GPU that llama.cpp sees, in its order. GPUs that share the processor's memory count only
    where there is no other. A build for one may find none.
    """
    from llama_cpp._ggml import libggml  # noqa: PLC0415  no public name, so imported only for a GPU

    lib.llama_backend_init()
    count, get = libggml.ggml_backend_dev_count, libggml.ggml_backend_dev_get
    kind, description = libggml.ggml_backend_dev_type, libggml.ggml_backend_dev_description
    count.restype, get.restype, kind.restype, description.restype = c_size_t, c_void_p, c_int, c_char_p
    get.argtypes, kind.argtypes, description.argtypes = [c_size_t], [c_void_p], [c_void_p]
    devices = [get(number) for number in range(count())]
    for wanted in (OWN_MEMORY, SHARED_MEMORY):
        found = [device for device in devices if kind(device) == wanted]
        if found:
            return tuple((description(device) or b"").decode("utf-8", "replace") for device in found)
    return ()


def gpu_names(device: str) -> tuple[str, ...]:
    """Return the names of the GPUs for `cuda` or `cuda:NUMBER`; () for `cpu`. Raises BackendError."""
    number = check_device(device)
    if device == "cpu":
        return ()
    found = gpus()
    named = found if number is None else found[number : number + 1]
    if not named:
        raise BackendError(
            f"llama.cpp finds no GPU{'' if number is None else f' {number}'} here",
            hint="install a build with GPU support (for NVIDIA: CMAKE_ARGS=-DGGML_CUDA=on) and a driver; check CUDA_VISIBLE_DEVICES",
        )
    return named
