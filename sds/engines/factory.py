"""Opens a model and what drives it: its weights as they were prepared for this machine, or they themselves.

Whatever is wrong with what was prepared is a notice, never a failure: the source is opened instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sds.decoding.decoder import Mode
from sds.engines.native import SLOTS_EXACT_MAX, NativeEngine, check_slots, telling
from sds.engines.replicas import REPLICAS_MAX, Replicas
from sds.host.machine import machine_name, usable_cores
from sds.host.paths import model_cache
from sds.kernel.errors import UsageError
from sds.models.protocol import FOLDER_HINT, IN_8_BITS, INT8_REST, SLOTS_MAX, Backend, BackendError, Dtype, Library

THREADS_MAX = 256
SLOT_TOKENS = 2048  # of each of several slots: what a decision may cost, and a cache that stays small
# a file, what runs it, in which data type (None: its own, or what was asked for), its SHA-256 where just looked at
Opener = Callable[[Path, Library | None, Dtype | None, str | None], Backend]
_DISTRIBUTIONS: dict[Library, str] = {
    "llamacpp": "llama-cpp-python",
    "transformers": "transformers",
    "openvino": "openvino",
    "integer": "sovereign-decision-stream",
}
_OF_GGUF: dict[Library, str] = {"openvino": "OpenVINO runs", "integer": "integer passes run"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`library`, `dtype`: what runs it, and in what, None: in its own. `notices`: why what was prepared is not run, a line each.

    `noise_logp_max`: what company does to log-probabilities with these weights, `noise_slots` at once; None: not known.
    """

    backend: Backend
    library: Library
    dtype: Dtype | None = None
    notices: tuple[str, ...] = ()
    noise_logp_max: float | None = None
    noise_slots: int = 0


def open_weights(
    source: Path, opener: Opener, *, cache: Path, library: Library | None = None, dtype: Dtype | None = None
) -> LoadedModel:
    """Open a GGUF, or what was prepared of it in `cache`, in the library and data type it was prepared for unless
    `library` or `dtype` names another.

    Raises BackendError where `source` itself does not open.
    """
    from sds.models.catalog.catalog import not_used, weights_for  # noqa: PLC0415

    found, notice = weights_for(source, cache)
    if found is not None:
        record = found.record
        runs = library or record.library
        try:
            computes = _computed_in(runs, dtype or found.dtype_in(runs))
            backend = opener(found.path, runs, computes, record.sha256)
        except BackendError as error:
            notice = not_used(error)
        else:
            backend.name = found.name_through(runs, computes)
            measured = runs == "llamacpp"  # the noise was
            noise = (record.shape_noise_logp_max, record.shape_noise_slots or 0) if measured else (None, 0)
            return LoadedModel(backend, runs, computes, (), *noise)
    runs = library or "llamacpp"
    computes = _computed_in(runs, dtype)
    return LoadedModel(opener(source, library, computes, None), runs, computes, (notice,) if notice else ())


def _computed_in(library: Library, dtype: Dtype | None) -> Dtype | None:
    return dtype or usual_dtype(library)


def usual_dtype(library: Library) -> Dtype | None:
    """Return in what OpenVINO and integer passes compute where nobody says it, of another library None. Raises BackendError."""
    if library == "integer":
        from sds.models.int8.backend import IntegerBackend  # noqa: PLC0415  what was compiled is loaded when it is asked for

        return IntegerBackend.usual_dtype()
    if library == "openvino":
        from sds.models.openvino_.backend import OpenvinoBackend  # noqa: PLC0415  only with the extra `openvino`

        return OpenvinoBackend.usual_dtype()
    return None


def _threads() -> int | None:
    """Return what `SDS_THREADS` asks for; None: one for each core. Threads beyond the free cores cost dearly."""
    asked = os.environ.get("SDS_THREADS", "")
    if not asked:
        return None
    if not asked.isdecimal() or not 1 <= int(asked) <= THREADS_MAX:
        raise UsageError(f"SDS_THREADS is `{asked}`, not a number from 1 to {THREADS_MAX}")
    return int(asked)


def cores() -> int:
    """Return how many threads all engines together may keep busy."""
    return _threads() or usable_cores()


def open_backend(
    path: Path,
    *,
    library: Library | None = None,
    device: str = "cpu",
    dtype: Dtype | None = None,
    slots: int = 1,
    threads: int | None = None,
    fingerprint: str | None = None,
    replicas: int = 1,
    brief: bool = False,
) -> Backend:
    """Load a model: unless `library` says otherwise a folder through transformers, a file through llama.cpp.

    `device` is for transformers and llama.cpp, `dtype` for transformers (fp32), OpenVINO (bf16, where the processor
    computes in it, else fp32) and integer passes (int8); llama.cpp runs
    in the file's own types. With several `slots` each holds `SLOT_TOKENS`; in OpenVINO and integer passes, which take
    memory as it is written, as many as one alone.
    `threads`: without it what `SDS_THREADS` says, or all cores. `fingerprint`: of a GGUF, where it was just looked at.
    `replicas`: how many engines over the weights, this one among them, are going to have so many threads each.
    `brief`: for a few decisions; OpenVINO then opens sooner, and each takes a little longer, with the same bits.
    Raises BackendError.
    """
    room: dict[str, Any] = {"n_ctx": SLOT_TOKENS} if slots > 1 else {}
    threads = threads or cores()
    library = _library_of(path, library)
    numbers: dict[str, Any] = {"dtype": dtype} if dtype else {}
    if library == "transformers":
        from sds.models.transformers_.backend import HfBackend  # noqa: PLC0415  torch is loaded when it is asked for

        return HfBackend(path, device=device, threads=threads, slots=slots, **numbers, **room)
    _check_processor(path, library, device, dtype)
    if library == "openvino":
        from sds.models.openvino_.backend import OpenvinoBackend  # noqa: PLC0415  only with the extra `openvino`

        copies: dict[str, Any] = {"lengths": ()} if brief else {}
        return OpenvinoBackend(
            path, threads=threads, slots=slots, engines=replicas, fingerprint=fingerprint, **numbers, **copies
        )
    if library == "integer":
        from sds.models.int8.backend import IntegerBackend  # noqa: PLC0415  what was compiled is loaded when it is asked for

        return IntegerBackend(path, threads=threads, slots=slots, fingerprint=fingerprint, **numbers)
    from sds.models.llamacpp.backend import LlamaBackend  # noqa: PLC0415  the library is loaded when a model is

    return LlamaBackend(path, device=device, threads=threads, slots=slots, fingerprint=fingerprint, **room)


def _library_of(path: Path, library: Library | None) -> Library:
    return library or ("transformers" if path.is_dir() else "llamacpp")


def _check_processor(path: Path, library: Library, device: str, dtype: Dtype | None) -> None:
    """Refuse what a library does not take. Raises BackendError."""
    if library in _OF_GGUF and path.is_dir():
        raise BackendError(f"`{path}` is a folder: {_OF_GGUF[library]} GGUF files here", hint=FOLDER_HINT)
    if library in _OF_GGUF and device != "cpu":
        raise BackendError(
            f"{_OF_GGUF[library]} on the processor alone", hint="choose llamacpp or transformers for a device"
        )
    if library == "llamacpp" and dtype is not None:
        raise BackendError("llama.cpp runs in the file's own types", hint="choose another library for a dtype")


def library_of_record(facts: Mapping[str, Any]) -> Library | None:
    """Return which library the facts of a decision name; None: none that this program has."""
    name = str(facts.get("library", "")).partition(" ")[0]
    return next((library for library, distribution in _DISTRIBUTIONS.items() if distribution == name), None)


def runtime_facts(
    library: Library, *, device: str = "cpu", dtype: Dtype | None = None, threads: int | None = None
) -> dict[str, object]:
    """Return what runs a model, as the record keeps it: beside the weights, all that its numbers depend on."""
    distribution = _DISTRIBUTIONS[library]
    facts: dict[str, object] = {
        "library": f"{distribution} {version(distribution)}",
        "numpy": version("numpy"),
        "threads": threads or cores(),
        "machine": machine_name(),
    }
    if library == "transformers":
        facts |= {"torch": version("torch"), "device": device, "dtype": dtype or "fp32"}
        return facts if device == "cpu" else facts | {"card": _card_of_torch(device)}
    if library == "llamacpp":
        return facts if device == "cpu" else facts | {"device": device, "card": _cards_of_llama(device)}
    facts["dtype"] = dtype = _computed_in(library, dtype)
    if library == "integer":
        from sds.models.int8.sources import passes_sources  # noqa: PLC0415

        return facts | {"passes": passes_sources()}
    return facts | ({"in_8_bits": IN_8_BITS, "rest": INT8_REST[dtype]} if dtype in INT8_REST else {})


def _card_of_torch(device: str) -> str:
    import torch  # noqa: PLC0415  it is loaded when it is asked for

    return torch.cuda.get_device_name(device)


def _cards_of_llama(device: str) -> str:
    from sds.models.llamacpp.gpus import gpu_names  # noqa: PLC0415  the library is loaded when a model is

    return ", ".join(gpu_names(device))


@dataclass(frozen=True, slots=True)
class Resources:
    """What one backend gets: how many slots, and how many threads, None: what `SDS_THREADS` says, or all cores; `replicas`:
    how many get as much over the same weights.
    """

    slots: int = 1
    threads: int | None = None
    replicas: int = 1


def open_engine(
    model: Path | None, *, now_ms: Callable[[], int], slots: int = 1, threads: int | None = None, **options: Any
) -> NativeEngine:
    """Load a model, the embedded GGUF when `model` is None; unless `as_is`, as it was prepared for this machine.

    `options`: `library`, `device`, `dtype`, `mode`, `noise_logp_max`, `as_is`, `brief`. Raises ModelError, UsageError.
    """
    return _open(model, lambda _: Resources(slots, threads), now_ms=now_ms, **options)


def _open(
    model: Path | None,
    share_of: Callable[[Library], Resources],
    *,
    now_ms: Callable[[], int],
    library: Library | None = None,
    device: str = "cpu",
    dtype: Dtype | None = None,
    mode: Mode = "greedy",
    noise_logp_max: float | None = None,
    as_is: bool = False,
    brief: bool = False,
) -> NativeEngine:
    """Open it with the share that the library gets which turns out to run it."""
    from sds.models.catalog.catalog import embedded_model  # noqa: PLC0415

    def opener(path: Path, runs: Library | None, computes: Dtype | None, fingerprint: str | None) -> Backend:
        runs = _library_of(path, runs)
        share = share_of(runs)
        return open_backend(
            path,
            library=runs,
            device=device,
            dtype=computes,
            slots=share.slots,
            threads=share.threads,
            replicas=share.replicas,
            fingerprint=fingerprint,
            brief=brief,
        )

    with telling():
        path = model or embedded_model()
        asked = _library_of(path, library)
        check_slots(share_of(asked).slots, mode)
        if as_is or asked == "transformers" or device != "cpu":  # what was prepared is for the processor
            dtype = _computed_in(asked, dtype)
            opened = LoadedModel(opener(path, asked, dtype, None), asked, dtype)
        else:
            _check_processor(path, asked, device, dtype)
            opened = open_weights(path, opener, cache=model_cache(), library=library, dtype=dtype)
    share = share_of(opened.library)
    if noise_logp_max is None and 1 < share.slots <= opened.noise_slots:
        noise_logp_max = opened.noise_logp_max
    try:
        runtime = runtime_facts(opened.library, device=device, dtype=opened.dtype, threads=share.threads)
        engine = NativeEngine(opened.backend, now_ms=now_ms, mode=mode, noise_logp_max=noise_logp_max, runtime=runtime)
    except BaseException:  # a chain opens it again and again: weights nobody drives may not stay in memory
        opened.backend.close()
        raise
    engine.notices = opened.notices + engine.notices
    return engine


def open_replicas(
    model: Path | None, *, replicas: int, now_ms: Callable[[], int], slots: int = 1, **options: Any
) -> Replicas:
    """Open engines side by side over the same weights, each with `slots` and its share of the cores; else as `open_engine`."""
    if not 1 <= replicas <= REPLICAS_MAX:
        raise UsageError(f"{replicas} replicas are not between 1 and {REPLICAS_MAX}")
    if replicas > 1 and options.get("device", "cpu") != "cpu":
        raise UsageError("replicas share cores, not a card", hint="use slots: they share passes")
    threads = max(1, cores() // replicas)
    first = _open(model, lambda _: Resources(slots, threads, replicas), now_ms=now_ms, **options)
    return _beside(first, replicas, threads, now_ms)


def open_parallel(
    model: Path | None, *, parallel: int, now_ms: Callable[[], int], mode: Mode = "greedy", **options: Any
) -> NativeEngine | Replicas:
    """Open for so many decisions at once, in the way that suits the library which runs it; else as `open_engine`.

    A slot for each where they share passes: on a card, in transformers, OpenVINO and integer passes; in llama.cpp on the processor,
    where passes have nothing to share but the cores, engines side by side, no more than cores.
    """
    if not 1 <= parallel <= SLOTS_MAX:
        raise UsageError(f"{parallel} decisions at once are not between 1 and {SLOTS_MAX}")
    replicas = min(parallel, cores())
    threads = max(1, cores() // replicas)
    on_processor = options.get("device", "cpu") == "cpu"
    together = Resources(min(parallel, SLOTS_MAX if mode == "greedy" else SLOTS_EXACT_MAX))

    def share_of(library: Library) -> Resources:
        return Resources(threads=threads) if library == "llamacpp" and on_processor else together

    engine = _open(model, share_of, now_ms=now_ms, mode=mode, **options)
    return engine if engine.slots > 1 or replicas == 1 else _beside(engine, replicas, threads, now_ms)


def _beside(first: NativeEngine, replicas: int, threads: int, now_ms: Callable[[], int]) -> Replicas:
    with ExitStack() as opened:
        opened.callback(first.close)
        engines = [first]
        for _ in range(replicas - 1):
            engines.append(first.replica(threads=threads))
            opened.callback(engines[-1].close)
        opened.pop_all()
    return Replicas(engines, now_ms=now_ms)
