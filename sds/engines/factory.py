"""Opens a model and the engine that drives it: weights prepared for this machine where there are any, else the source.

A fault in prepared weights never fails the opening: the source is opened instead, with a notice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sds.decoding.decoder import Mode
from sds.engines.native import SLOTS_EXACT_MAX, NativeEngine, backend_errors, check_slots
from sds.engines.replicas import REPLICAS_MAX, Replicas
from sds.host.machine import machine_name, usable_cores
from sds.host.paths import model_cache
from sds.kernel.errors import UsageError
from sds.models.catalog.backends import BACKENDS, DEFAULT, library_for
from sds.models.facts import Opening
from sds.models.protocol import FOLDER_HINT, SLOTS_MAX, Backend, BackendError, Dtype, Library

THREADS_MAX = 256
SLOT_TOKENS = 2048  # context of each of several slots: enough for a decision, and a small cache
# takes a file, its library, a data type (None: the file's own), and its SHA-256 where known
Opener = Callable[[Path, Library, Dtype | None, str | None], Backend]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`library`, `dtype`: what runs the model, and its data type, None: the file's own. `notices`: why prepared weights
    are not used.

    `noise_logp_max`: batch variance of these weights in nats, with up to `noise_slots` rows; None: not known.
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
    """Open a GGUF file, or the weights prepared from it in `cache`, in their library and data type unless `library` or
    `dtype` names another.

    Raises BackendError where `source` itself does not open.
    """
    from sds.models.catalog.catalog import not_used, weights_for  # noqa: PLC0415

    found, notice = weights_for(source, cache)
    if found is not None:
        record = found.record
        runs = library or record.library
        try:
            computes = dtype or found.dtype_in(runs) or BACKENDS[runs].usual_dtype()
            backend = opener(found.path, runs, computes, record.sha256)
        except BackendError as error:
            notice = not_used(error)
        else:
            backend.name = found.name_through(runs, computes)
            measured = BACKENDS[runs].measures_variance
            variance = (record.shape_noise_logp_max, record.shape_noise_slots or 0) if measured else (None, 0)
            return LoadedModel(backend, runs, computes, (), *variance)
    return _open_source(source, opener, library or DEFAULT, dtype, notice)


def _open_source(source: Path, opener: Opener, library: Library, dtype: Dtype | None, notice: str = "") -> LoadedModel:
    dtype = dtype or BACKENDS[library].usual_dtype()
    return LoadedModel(opener(source, library, dtype, None), library, dtype, (notice,) if notice else ())


def threads_asked() -> int | None:
    """Return the number in `SDS_THREADS`; None: one thread for each core. More threads than free cores are much slower."""
    asked = os.environ.get("SDS_THREADS", "")
    if not asked:
        return None
    if not asked.isdecimal() or not 1 <= int(asked) <= THREADS_MAX:
        raise UsageError(f"SDS_THREADS is `{asked}`, not a number from 1 to {THREADS_MAX}")
    return int(asked)


def cores() -> int:
    """Return how many threads all engines together may keep busy."""
    return threads_asked() or usable_cores()


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
    skip_warmup: bool = False,
) -> Backend:
    """Load a model. Without `library`, transformers loads a folder and llama.cpp a file.

    `device`: `cpu`, `cuda` or `cuda:1`. `dtype`: the data type of the computation; None: the backend's own. Each backend's
    facts say which it takes. Each of several `slots` holds `SLOT_TOKENS`, or a whole context where a backend takes memory only
    as it is written. `threads`: by default the number in `SDS_THREADS`, or all cores. `fingerprint`: of a GGUF file, where
    known. `replicas`: how many engines share the weights, this one included, with so many threads each. `skip_warmup`: for a
    few decisions: the model may open sooner and each decision take a little longer, with the same bits. Raises BackendError.
    """
    library = library or library_for(folder=path.is_dir())
    _check_supported(path, library, device, dtype)
    return BACKENDS[library].open(
        Opening(
            path=path,
            device=device,
            dtype=dtype,
            slots=slots,
            slot_tokens=SLOT_TOKENS if slots > 1 else None,
            threads=threads or cores(),
            fingerprint=fingerprint,
            replicas=replicas,
            warm_up=() if skip_warmup else None,
        )
    )


def _check_supported(path: Path, library: Library, device: str, dtype: Dtype | None) -> None:
    """Raise BackendError for a folder, a device or a data type that the backend does not take."""
    backend = BACKENDS[library]
    if path.is_dir() and not backend.reads_folders:
        raise BackendError(f"`{path}` is a folder: {backend.title} runs GGUF files here", hint=FOLDER_HINT)
    if device != "cpu" and not backend.on_gpus:
        others = " or ".join(each.name for each in BACKENDS.values() if each.on_gpus)
        raise BackendError(f"{backend.title} runs on the processor only", hint=f"choose {others} for a device")
    if dtype is not None and not backend.dtypes:
        raise BackendError(
            f"{backend.title} always computes in the file's own types",
            hint="leave out the dtype, or choose another library",
        )


def library_of_record(facts: Mapping[str, Any]) -> Library | None:
    """Return the library that the facts of a decision name; None where this program does not have it."""
    name = str(facts.get("library", "")).partition(" ")[0]
    return next((backend.name for backend in BACKENDS.values() if backend.distribution == name), None)


def runtime_facts(
    library: Library, *, device: str = "cpu", dtype: Dtype | None = None, threads: int | None = None
) -> dict[str, object]:
    """Return the facts of the record that, besides the weights, a model's numbers depend on."""
    backend = BACKENDS[library]
    return {
        "library": f"{backend.distribution} {version(backend.distribution)}",
        "numpy": version("numpy"),
        "threads": threads or cores(),
        "machine": machine_name(),
        **backend.facts(device, dtype),
    }


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one backend. `threads` None: the number in `SDS_THREADS`, or all cores. `replicas`: how many
    backends over the same weights get as much.
    """

    slots: int = 1
    threads: int | None = None
    replicas: int = 1


def open_engine(
    model: Path | None, *, now_ms: Callable[[], int], slots: int = 1, threads: int | None = None, **options: Any
) -> NativeEngine:
    """Load a model, None for the embedded GGUF; unless `as_is`, the weights prepared from it for this machine.

    `options`: `library`, `device`, `dtype`, `mode`, `noise_logp_max`, `as_is`, `skip_warmup`. Raises ModelError, UsageError.
    """
    return _open(model, lambda _: Resources(slots, threads), now_ms=now_ms, **options)


def _open(
    model: Path | None,
    resources_of: Callable[[Library], Resources],
    *,
    now_ms: Callable[[], int],
    library: Library | None = None,
    device: str = "cpu",
    dtype: Dtype | None = None,
    mode: Mode = "greedy",
    noise_logp_max: float | None = None,
    as_is: bool = False,
    skip_warmup: bool = False,
) -> NativeEngine:
    """Open it with the resources for the library that turns out to run it."""
    from sds.models.catalog.catalog import embedded_model  # noqa: PLC0415

    def opener(path: Path, runs: Library, computes: Dtype | None, fingerprint: str | None) -> Backend:
        how = {"device": device, "skip_warmup": skip_warmup, "fingerprint": fingerprint, **asdict(resources_of(runs))}
        return open_backend(path, library=runs, dtype=computes, **how)

    with backend_errors():
        path = model or embedded_model()
        asked = library or library_for(folder=path.is_dir())
        check_slots(resources_of(asked).slots, mode)
        _check_supported(path, asked, device, dtype)
        if as_is or device != "cpu" or not BACKENDS[asked].measured_in:  # prepared weights are for the processor
            opened = _open_source(path, opener, asked, dtype)
        else:
            opened = open_weights(path, opener, cache=model_cache(), library=library, dtype=dtype)
    resources = resources_of(opened.library)
    if noise_logp_max is None and 1 < resources.slots <= opened.noise_slots:
        noise_logp_max = opened.noise_logp_max
    try:
        runtime = runtime_facts(opened.library, device=device, dtype=opened.dtype, threads=resources.threads)
        engine = NativeEngine(opened.backend, now_ms=now_ms, mode=mode, noise_logp_max=noise_logp_max, runtime=runtime)
    except BaseException:  # a chain opens it again and again: unused weights must not stay in memory
        opened.backend.close()
        raise
    engine.notices = opened.notices + engine.notices
    return engine


def open_replicas(
    model: Path | None, *, replicas: int, now_ms: Callable[[], int], slots: int = 1, **options: Any
) -> Replicas:
    """Open engines side by side over the same weights, each with `slots` and a share of the cores; else like `open_engine`."""
    if not 1 <= replicas <= REPLICAS_MAX:
        raise UsageError(f"the number of replicas must be 1 to {REPLICAS_MAX}, got {replicas}")
    if replicas > 1 and options.get("device", "cpu") != "cpu":
        raise UsageError("replicas run on the processor only", hint="use slots on a GPU: they share passes")
    threads = max(1, cores() // replicas)
    first = _open(model, lambda _: Resources(slots, threads, replicas), now_ms=now_ms, **options)
    return _add_replicas(first, replicas, threads, now_ms)


def open_parallel(
    model: Path | None, *, parallel: int, now_ms: Callable[[], int], mode: Mode = "greedy", **options: Any
) -> NativeEngine | Replicas:
    """Open for so many decisions at once, in the way that suits the library; else like `open_engine`.

    Each gets a slot where decisions share passes. Where shared passes would save nothing on the processor, each gets an
    engine of its own, up to the number of cores.
    """
    if not 1 <= parallel <= SLOTS_MAX:
        raise UsageError(f"the number of decisions at once must be 1 to {SLOTS_MAX}, got {parallel}")
    replicas = min(parallel, cores())
    threads = max(1, cores() // replicas)
    on_processor = options.get("device", "cpu") == "cpu"
    shared = Resources(min(parallel, SLOTS_MAX if mode == "greedy" else SLOTS_EXACT_MAX))

    def resources_of(library: Library) -> Resources:
        return Resources(threads=threads) if on_processor and not BACKENDS[library].shares_passes else shared

    engine = _open(model, resources_of, now_ms=now_ms, mode=mode, **options)
    return engine if engine.slots > 1 or replicas == 1 else _add_replicas(engine, replicas, threads, now_ms)


def _add_replicas(first: NativeEngine, replicas: int, threads: int, now_ms: Callable[[], int]) -> Replicas:
    with ExitStack() as opened:
        opened.callback(first.close)
        engines = [first]
        for _ in range(replicas - 1):
            engines.append(first.replica(threads=threads))
            opened.callback(engines[-1].close)
        opened.pop_all()
    return Replicas(engines, now_ms=now_ms)
