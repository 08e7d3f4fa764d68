"""What can be said of a backend before it is loaded. Each backend's folder says it of itself, in `facts.py`.

`models.catalog.backends` lists them: a new backend is a folder and a line there. Nothing here imports a library that runs
models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sds.models.protocol import Backend, Dtype, Library


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a model is opened.

    slot_tokens: context of each slot; None: as the backend has it.
    threads: None: one for each core.
    fingerprint: SHA-256 of a GGUF file, where it was just looked at.
    replicas: how many backends will run over these weights side by side, each on `threads` of its own.
    warm_up: lengths, in tokens, of the passes that are made quick while it opens; None: the usual ones, empty: none.
    """

    path: Path
    device: str = "cpu"
    dtype: Dtype | None = None
    slots: int = 1
    slot_tokens: int | None = None
    threads: int | None = None
    fingerprint: str | None = None
    replicas: int = 1
    warm_up: Sequence[int] | None = None

    @property
    def context(self) -> dict[str, Any]:
        """The argument `n_ctx` of a backend that takes its memory when it is opened."""
        return {"n_ctx": self.slot_tokens} if self.slot_tokens else {}

    def of(self, *names: str) -> dict[str, Any]:
        """Return these of its fields, as arguments of a backend that has the same names for them."""
        return {name: getattr(self, name) for name in names}


def _no_dtype() -> Dtype | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """One backend.

    name: as options, engine files and records spell it.
    title: as sentences do.
    distribution: the Python distribution whose version records keep.
    extra, install_hint: the extra of this package that brings it, and how to get that; empty: it is always there.
    dtypes: in which data types it can be asked to compute; empty: in the file's own alone.
    usual_dtype: returns in which it computes where nobody says it; None: in its own. Raises BackendError.
    reads_folders: whether it runs checkpoint folders besides GGUF files.
    on_gpus: whether it runs on a GPU.
    replicable: whether several may share weights, each on cores of its own.
    shares_passes: whether several slots, on the processor, cost less than as many replicas.
    bits_need_slots: whether a decision is the same bits only with as many slots as it was made with.
    open: opens a model. Raises BackendError.
    version: returns what it is, as `sds models prepare` compares it; None: it is not installed.
    facts: returns what a record keeps of (device, dtype), beside the version.
    measured_in: in which data types `sds models prepare` measures GGUF files; None: in `unsaid_dtype`; empty: it does not.
    outruns: returns whether it is known to be quicker, on this processor, than llama.cpp with weights of any type.
    machine_key: under which name a prepared model keeps `version`.
    measures_variance: whether `prepare` measures, too, how far batch composition moves its log-probabilities.
    runs_as, unsaid_dtype: what a model's name says runs it, and the data type left unsaid; empty: nothing.
    """

    name: Library
    title: str
    distribution: str
    extra: str = ""
    install_hint: str = ""
    dtypes: tuple[Dtype, ...] = ()
    usual_dtype: Callable[[], Dtype | None] = _no_dtype
    reads_folders: bool = False
    on_gpus: bool = False
    replicable: bool = True
    shares_passes: bool = True
    bits_need_slots: bool = False
    open: Callable[[Opening], Backend]
    version: Callable[[], str | None]
    facts: Callable[[str, Dtype | None], dict[str, object]]
    measured_in: tuple[Dtype | None, ...] = ()
    outruns: Callable[[], bool] = bool
    machine_key: str = ""
    measures_variance: bool = False
    runs_as: str = ""
    unsaid_dtype: Dtype | None = None


def installed(distribution: str) -> str | None:
    """Return the version of a distribution; None: it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
