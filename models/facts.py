"""The facts about a backend that are known before it is loaded. Each backend's folder has them in `facts.py`.

`models.catalog.backends` lists them: a new backend is a folder and an entry there. Nothing here imports a library that
runs models.
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

    slot_tokens: context of each slot; None: the backend's own.
    threads: None: one for each core.
    fingerprint: SHA-256 of a GGUF file, where known.
    replicas: how many backends will run over these weights side by side, each on `threads` of its own.
    warm_up: lengths, in tokens, of the passes that are prepared while it opens; None: the usual ones, empty: none.
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
        """The argument `n_ctx` of a backend that allocates its memory when it is opened."""
        return {"n_ctx": self.slot_tokens} if self.slot_tokens else {}

    def of(self, *names: str) -> dict[str, Any]:
        """Return these fields as arguments for a backend that has the same names for them."""
        return {name: getattr(self, name) for name in names}


def _no_dtype() -> Dtype | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """One backend.

    name: as in options, engine files and records.
    title: as in sentences.
    distribution: the Python distribution whose version records hold.
    extra, install_hint: the extra of this package that brings it, and how to install that; "": it is always there.
    dtypes: the data types that it can be asked to compute in; empty: only the file's own.
    usual_dtype: returns the default data type; None: the file's own. Raises BackendError.
    reads_folders: whether it runs checkpoint folders besides GGUF files.
    on_gpus: whether it runs on a GPU.
    replicable: whether several may share weights, each on cores of its own.
    shares_passes: whether several slots, on the processor, cost less than as many replicas.
    bits_need_slots: whether a decision has the same bits only with as many slots as it was made with.
    open: opens a model. Raises BackendError.
    version: returns its version for `sds models prepare`; None: it is not installed.
    facts: returns a record's facts for (device, dtype), besides the version.
    measured_in: the data types in which `sds models prepare` measures GGUF files; None: `unsaid_dtype`; empty: it does not.
    outruns: returns whether it is known to be faster, on this processor, than llama.cpp with weights of any type.
    machine_key: the name under which a prepared model stores `version`.
    measures_variance: whether `prepare` also measures how far batch composition moves its log-probabilities.
    runs_as, unsaid_dtype: the backend in a model's name, "" for none; the data type that is left out there.
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
    """Return the version of a distribution; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
