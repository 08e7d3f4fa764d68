"""The GPUs that llama.cpp sees, as its library ggml lists them. A build for one may find none."""

from __future__ import annotations

from ctypes import c_char_p, c_int, c_size_t, c_void_p

import llama_cpp

from sds.models.protocol import BackendError, check_device

OWN_MEMORY, SHARED_MEMORY = 1, 2  # ggml's numbers for kinds of device; 0 is the processor


def gpus() -> tuple[str, ...]:
    """Return the name of each, in llama.cpp's order: those that share the processor's memory only where no other is."""
    from llama_cpp._ggml import libggml  # noqa: PLC0415  no public name: whoever asks for no GPU is to need none

    llama_cpp.llama_backend_init()
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
    """Return the names of the GPUs that `cuda` or `cuda:NUMBER` stands for; none for `cpu`. Raises BackendError."""
    number = check_device(device)
    if device == "cpu":
        return ()
    found = gpus()
    named = found if number is None else found[number : number + 1]
    if not named:
        raise BackendError(
            f"llama.cpp sees no card{'' if number is None else f' {number}'} here",
            hint="it takes a build for one (CMAKE_ARGS=-DGGML_CUDA=on for NVIDIA's), a driver, and CUDA_VISIBLE_DEVICES",
        )
    return named
