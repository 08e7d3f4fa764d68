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
from sds.engines.native import SLOTS_EXACT_MAX, NativeEngine, backend_errors, check_slots
from sds.engines.replicas import REPLICAS_MAX, Replicas
from sds.host.machine import machine_name, usable_cores
from sds.host.paths import model_cache
from sds.kernel.errors import UsageError
from sds.models.catalog.backends import BACKENDS, DEFAULT, library_for
from sds.models.facts import Opening
from sds.models.protocol import FOLDER_HINT, SLOTS_MAX, Backend, BackendError, Dtype, Library

THREADS_MAX = 256
SLOT_TOKENS = 2048  # of each of several slots: what a decision may cost, and a cache that stays small
# a file, what runs it, in which data type (None: its own, or what was asked for), its SHA-256 where just looked at
Opener = Callable[[Path, Library | None, Dtype | None, str | None], Backend]


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
            computes = dtype or found.dtype_in(runs) or BACKENDS[runs].usual_dtype()
            backend = opener(found.path, runs, computes, record.sha256)
        except BackendError as error:
            notice = not_used(error)
        else:
            backend.name = found.name_through(runs, computes)
            measured = BACKENDS[runs].measures_variance
            noise = (record.shape_noise_logp_max, record.shape_noise_slots or 0) if measured else (None, 0)
            return LoadedModel(backend, runs, computes, (), *noise)
    runs = library or DEFAULT
    computes = dtype or BACKENDS[runs].usual_dtype()
    return LoadedModel(opener(source, library, computes, None), runs, computes, (notice,) if notice else ())


def threads_asked() -> int | None:
    """Return what `SDS_THREADS` asks for; None: one for each core. Threads beyond the free cores cost dearly."""
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
    """Load a model: unless `library` says otherwise a folder through transformers, a file through llama.cpp.

    `device`: `cpu`, `cuda` or `cuda:1`; `dtype`: in which type it computes, left out: as the backend does. Which backend
    takes which, its facts say. With several `slots` each holds `SLOT_TOKENS`, or as many as one alone where a backend takes
    memory as it is written.
    `threads`: without it what `SDS_THREADS` says, or all cores. `fingerprint`: of a GGUF, where it was just looked at.
    `replicas`: how many engines over the weights, this one among them, are going to have so many threads each.
    `skip_warmup`: for a few decisions; it may open sooner, and each takes a little longer, with the same bits.
    Raises BackendError.
    """
    library = library or library_for(folder=path.is_dir())
    _check_taken(path, library, device, dtype)
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


def _check_taken(path: Path, library: Library, device: str, dtype: Dtype | None) -> None:
    """Refuse what a backend does not take. Raises BackendError."""
    backend = BACKENDS[library]
    if path.is_dir() and not backend.reads_folders:
        raise BackendError(f"`{path}` is a folder: {backend.title} runs GGUF files here", hint=FOLDER_HINT)
    if device != "cpu" and not backend.on_gpus:
        others = " or ".join(each.name for each in BACKENDS.values() if each.on_gpus)
        raise BackendError(f"{backend.title} runs on the processor alone", hint=f"choose {others} for a device")
    if dtype is not None and not backend.dtypes:
        raise BackendError(f"{backend.title} runs in the file's own types", hint="choose another library for a dtype")


def library_of_record(facts: Mapping[str, Any]) -> Library | None:
    """Return which library the facts of a decision name; None: none that this program has."""
    name = str(facts.get("library", "")).partition(" ")[0]
    return next((backend.name for backend in BACKENDS.values() if backend.distribution == name), None)


def runtime_facts(
    library: Library, *, device: str = "cpu", dtype: Dtype | None = None, threads: int | None = None
) -> dict[str, object]:
    """Return what runs a model, as the record keeps it: beside the weights, all that its numbers depend on."""
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

    `options`: `library`, `device`, `dtype`, `mode`, `noise_logp_max`, `as_is`, `skip_warmup`. Raises ModelError, UsageError.
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
    skip_warmup: bool = False,
) -> NativeEngine:
    """Open it with the share that the library gets which turns out to run it."""
    from sds.models.catalog.catalog import embedded_model  # noqa: PLC0415

    def opener(path: Path, runs: Library | None, computes: Dtype | None, fingerprint: str | None) -> Backend:
        runs = runs or library_for(folder=path.is_dir())
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
            skip_warmup=skip_warmup,
        )

    with backend_errors():
        path = model or embedded_model()
        asked = library or library_for(folder=path.is_dir())
        check_slots(share_of(asked).slots, mode)
        if as_is or not BACKENDS[asked].measured_in or device != "cpu":  # what was prepared is for the processor
            dtype = dtype or BACKENDS[asked].usual_dtype()
            opened = LoadedModel(opener(path, asked, dtype, None), asked, dtype)
        else:
            _check_taken(path, asked, device, dtype)
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

    A slot for each where they share passes; in a backend whose passes have nothing to share on the processor but the cores,
    engines side by side, no more than cores.
    """
    if not 1 <= parallel <= SLOTS_MAX:
        raise UsageError(f"{parallel} decisions at once are not between 1 and {SLOTS_MAX}")
    replicas = min(parallel, cores())
    threads = max(1, cores() // replicas)
    on_processor = options.get("device", "cpu") == "cpu"
    together = Resources(min(parallel, SLOTS_MAX if mode == "greedy" else SLOTS_EXACT_MAX))

    def share_of(library: Library) -> Resources:
        return Resources(threads=threads) if on_processor and not BACKENDS[library].shares_passes else together

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
