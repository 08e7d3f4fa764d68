"""The chain of engines as a YAML file. It is read strictly: every fault is reported with file and line.

engines:
- {name: gpu-box, kind: vllm, url: "http://10.0.0.5:8000/v1", model: my-model, timeout_ms: 8000, api_key_env: VLLM_KEY}
- {name: here, kind: native, model: /models/mine.gguf, replicas: 2, mode: exact}
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sds.decoding.decoder import Mode
from sds.engines.factory import open_engine, open_parallel, open_replicas, threads_asked
from sds.engines.fallback import LINKS_MAX, FallbackEngine, Link
from sds.engines.native import SLOTS_EXACT_MAX
from sds.engines.protocol import Engine
from sds.engines.replicas import REPLICAS_MAX
from sds.engines.text import TextEngine
from sds.host.input_files import read_text
from sds.kernel.contract.types import ContradictionError, say_first, text_of
from sds.kernel.contract.yaml_lines import FILE_BYTES_MAX, Lines, load_with_lines
from sds.kernel.errors import LanguageError, ModelError, UsageError
from sds.models.catalog.backends import BACKENDS, LibraryChoice, library_for
from sds.models.facts import BackendFacts
from sds.models.protocol import SLOTS_MAX, BackendError, Dtype
from sds.models.text import outlines
from sds.models.text.http import Address
from sds.models.text.protocol import Processing, Server

Kind = Literal["native", "outlines", "llama-server", "vllm", "sglang", "tgi", "ollama", "lmstudio", "openai"]
TIMEOUT_MS, COOL_DOWN_MS = 10_000, 5_000
_REMOTE = frozenset(get_args(Server))

Millis = Annotated[int, Field(ge=1, le=3_600_000)]
Line = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]+$")]


class EngineSpec(BaseModel):
    """One engine. A key that its kind has no use for is refused, and so is a missing key that it needs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, text_of(r"[a-z][a-z0-9_-]{0,31}", "a name in lower-case")]
    kind: Kind
    model: Line | None = None
    url: Line | None = None
    form: Literal["json_schema", "gbnf"] | None = None
    api_key_env: Annotated[str, text_of("[A-Z_][A-Z0-9_]{0,63}", "the name of an environment VARIABLE")] | None = None
    library: LibraryChoice | None = None
    backend: Processing | None = None
    device: Annotated[str, text_of("cpu|cuda(:[0-9]{1,2})?", "cpu, cuda or cuda:1")] | None = None
    dtype: Dtype | None = None
    slots: Annotated[int, Field(ge=1, le=SLOTS_MAX)] | None = None
    replicas: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] | None = None
    parallel: Annotated[int, Field(ge=1, le=SLOTS_MAX)] | None = None
    mode: Mode | None = None
    as_is: bool | None = None
    timeout_ms: Millis = TIMEOUT_MS
    cool_down_ms: Millis = COOL_DOWN_MS

    @model_validator(mode="after")
    def _whole(self) -> Self:
        uses = {"url", "model", "api_key_env"} if self.kind in _REMOTE else {"model", "library", "device", "dtype"}
        uses |= {"form"} if self.kind == "openai" else set()
        uses |= {"backend"} if self.kind == "outlines" else set()
        uses |= {"slots", "replicas", "parallel", "mode", "as_is"} if self.kind == "native" else set()
        needs = {"url", "model"} if self.kind in _REMOTE else set()
        choices = set(type(self).model_fields) - {"name", "kind", "timeout_ms", "cool_down_ms"}
        given = {name for name in choices if getattr(self, name) is not None}
        if missing := needs - given:
            raise ContradictionError(("kind",), f"`{self.kind}` needs `{min(missing)}`")
        if useless := given - uses:
            raise ContradictionError((min(useless),), f"`{self.kind}` has no use for `{min(useless)}`")
        if self.kind in _REMOTE:
            _check_url(self.url or "")
        else:
            _check_local(self)
        return self


def _check_url(url: str) -> None:
    try:
        Address(url)
    except BackendError as error:
        raise ContradictionError(("url",), f"{error}; for example {error.hint}") from error


def _check_local(spec: EngineSpec) -> None:
    backend = _backend_of(spec)
    if spec.kind == "outlines":
        _check_outlines(spec, backend)
    if _is_folder(spec) and not backend.reads_folders:
        raise ContradictionError(("library",), f"{backend.title} runs GGUF files, not folders")
    _check_dtype(spec, backend)
    if spec.device and not backend.on_gpus:
        others = " and ".join(each.name for each in BACKENDS.values() if each.on_gpus)
        raise ContradictionError(("device",), f"`device` is for the libraries {others}")
    _check_many(spec, backend)


def _check_outlines(spec: EngineSpec, backend: BackendFacts) -> None:
    if backend.name not in outlines.PROCESSINGS:
        drives = " and ".join(BACKENDS[name].title for name in outlines.PROCESSINGS)
        raise ContradictionError(("library",), f"Outlines drives {drives}, not {backend.title}")
    if spec.device and backend.name not in outlines.ON_GPUS:
        raise ContradictionError(("device",), f"under Outlines `device` is for the library {outlines.ON_GPUS[0]}")
    if spec.backend and spec.backend not in outlines.PROCESSINGS[backend.name]:
        others = (name for name, processings in outlines.PROCESSINGS.items() if spec.backend in processings)
        raise ContradictionError(("backend",), f"{spec.backend} runs only with {', '.join(others)}")


def _check_dtype(spec: EngineSpec, backend: BackendFacts) -> None:
    if spec.dtype is None or spec.dtype in backend.dtypes:
        return
    if backend.dtypes:
        *some, last = backend.dtypes
        raise ContradictionError(("dtype",), f"{backend.title} computes in {', '.join(some)} or {last} here")
    driven = outlines.PROCESSINGS if spec.kind == "outlines" else BACKENDS
    *names, name = (each.name for each in BACKENDS.values() if each.dtypes and each.name in driven)
    also = "" if spec.library else ": name one of them, too" if names else ": name it, too"
    which = f"libraries {', '.join(names)} and {name}" if names else f"library {name}"
    raise ContradictionError(("dtype",), f"`dtype` is for the {which}{also}")


def _check_many(spec: EngineSpec, backend: BackendFacts) -> None:
    if (spec.replicas or 1) > 1 and (spec.device or "cpu") != "cpu":
        raise ContradictionError(("replicas",), "`replicas` run on the processor only: use `slots` on a GPU")
    if (spec.replicas or 1) > 1 and not backend.replicable:
        raise ContradictionError(("replicas",), f"`replicas` cannot be used with the library {backend.name}")
    if (spec.parallel or 1) > 1 and max(spec.slots or 1, spec.replicas or 1) > 1:
        raise ContradictionError(("parallel",), "`parallel` chooses slots or replicas by itself")
    if (spec.mode or "greedy") != "greedy" and (spec.slots or 1) > SLOTS_EXACT_MAX:
        raise ContradictionError(("slots",), f"mode `{spec.mode}` allows at most {SLOTS_EXACT_MAX} slots")


def _backend_of(spec: EngineSpec) -> BackendFacts:
    return BACKENDS[spec.library or library_for(folder=_is_folder(spec))]


def _is_folder(spec: EngineSpec) -> bool:
    try:
        return spec.kind not in _REMOTE and spec.model is not None and Path(spec.model).is_dir()
    except OSError:  # no possible file name; the opening reports it
        return False


class EnginesFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    engines: Annotated[list[EngineSpec], Field(min_length=1, max_length=LINKS_MAX)]

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        names = [spec.name for spec in self.engines]
        if len(set(names)) < len(names):
            raise ContradictionError(("engines",), "two engines have the same name")
        return self


def load_engines(path: Path) -> tuple[EngineSpec, ...]:
    """Read a file of engines. The model of the last one must exist. Raises UsageError with file and line."""
    specs, lines = parse_engines(read_text(path, FILE_BYTES_MAX), name=str(path))
    last = specs[-1]  # any other may be down at the start
    if last.kind not in _REMOTE and last.model and not os.path.exists(last.model):  # noqa: PTH110  of any text
        at = ("engines", len(specs) - 1, "model")
        raise UsageError(
            f"{path}:{lines[at]}: {'.'.join(map(str, at))}: `{last.model}` cannot be read: no such file or directory",
            hint="name a GGUF file or a checkpoint folder; `sds models list` lists the known ones",
        )
    return specs


def parse_engines(text: str, *, name: str) -> tuple[tuple[EngineSpec, ...], Lines]:
    """Return the engines of a file called `name`, and the line of each of its values. Raises UsageError."""
    data, lines = load_with_lines(text, name)
    try:
        return tuple(EnginesFile.model_validate(data).engines), lines
    except ValidationError as error:
        line, message = say_first(error.errors(), lines, EnginesFile)
        raise UsageError(
            f"{name}:{line}: {message}", hint="engines.md of the documentation says what each key means"
        ) from error


def open_chain(
    specs: tuple[EngineSpec, ...],
    *,
    now_ms: Callable[[], int],
    environ: Mapping[str, str] = os.environ,
    skip_warmup: bool = False,
) -> FallbackEngine:
    """Open a chain: the last engine must open, any other may be down. `skip_warmup`: as in `open_backend`.

    Raises ModelError, UsageError.
    """
    keys = {spec.name: _api_key(spec, environ) for spec in specs}

    def opener(spec: EngineSpec) -> Callable[[], Engine]:
        return lambda: open_engine_of(spec, now_ms=now_ms, api_key=keys[spec.name], skip_warmup=skip_warmup)

    links = [Link(spec.name, opener(spec), spec.timeout_ms, spec.cool_down_ms) for spec in specs]
    return FallbackEngine(links, now_ms=now_ms)


def _api_key(spec: EngineSpec, environ: Mapping[str, str]) -> str:
    if spec.api_key_env is None:
        return ""
    key = environ.get(spec.api_key_env, "")
    if not key:
        raise UsageError(
            f"engine `{spec.name}`: the environment variable `{spec.api_key_env}` is not set",
            hint="set it to the server's key, or remove `api_key_env` from the file if the server needs no key",
        )
    if not key.isascii() or not key.isprintable():
        raise UsageError(f"engine `{spec.name}`: `{spec.api_key_env}` has characters other than printable ASCII")
    return key


def open_engine_of(
    spec: EngineSpec, *, now_ms: Callable[[], int], api_key: str = "", skip_warmup: bool = False
) -> Engine:
    """Open one engine and prove that its model is constrained. `skip_warmup`: as in `open_backend`. Raises ModelError."""
    try:
        if spec.kind == "native":
            return _native(spec, now_ms, skip_warmup=skip_warmup)
        limit: dict[str, Any] = {} if spec.kind == "outlines" else {"proof_timeout_ms": spec.timeout_ms}
        writer = _outlines(spec) if spec.kind == "outlines" else _remote(spec, api_key)
        try:
            return TextEngine(spec.name, writer, nonce=lambda: secrets.token_hex(32), now_ms=now_ms, **limit)
        except BaseException:
            writer.close()
            raise
    except BackendError as error:
        raise ModelError(f"{spec.name}: {error}", hint=error.hint) from error
    except LanguageError as error:
        raise ModelError(f"{spec.name}: {error}", reason_code=error.reason_code, hint=error.hint) from error


def _native(spec: EngineSpec, now_ms: Callable[[], int], *, skip_warmup: bool) -> Engine:
    options: dict[str, Any] = {
        "library": spec.library,
        "device": spec.device or "cpu",
        "dtype": spec.dtype,
        "mode": spec.mode or "greedy",
        "as_is": spec.as_is or False,
        "skip_warmup": skip_warmup,
    }
    model = Path(spec.model) if spec.model else None
    if (spec.parallel or 1) > 1:
        return open_parallel(model, parallel=spec.parallel or 1, now_ms=now_ms, **options)
    if (spec.replicas or 1) > 1:
        return open_replicas(model, replicas=spec.replicas or 1, slots=spec.slots or 1, now_ms=now_ms, **options)
    return open_engine(model, now_ms=now_ms, slots=spec.slots or 1, **options)


def _remote(spec: EngineSpec, api_key: str) -> Any:
    from sds.models.text.servers import RemoteWriter  # noqa: PLC0415

    return RemoteWriter(spec.kind, url=spec.url or "", model=spec.model or "", form=spec.form, api_key=api_key)  # type: ignore[arg-type]  # a remote kind, by `_REMOTE`


def _outlines(spec: EngineSpec) -> Any:
    from sds.models.catalog.catalog import embedded_model  # noqa: PLC0415

    model = Path(spec.model) if spec.model else embedded_model()
    driven = outlines.drive(
        model, _backend_of(spec).name, device=spec.device or "cpu", dtype=spec.dtype, threads=threads_asked()
    )
    return outlines.OutlinesWriter(driven, spec.backend or "outlines_core")
