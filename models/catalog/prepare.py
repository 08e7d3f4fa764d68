"""Finds the weights, and the library, with which this machine is fastest on a decision's passes: it measures and keeps
the best.

llama.cpp itself re-encodes them; the other backends run the very file that llama.cpp runs as BF16, each in its data
types. Where a backend is known to be faster than llama.cpp on this processor, no other weight type is encoded. Every
candidate is measured in turn, one model in memory at a time, in rounds, so that other load on the machine affects all
alike. The fastest is kept; of those within `TIE` of it the closest to the exact weights, which are the source's in F32.
Nothing here knows what is decided.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite
from pathlib import Path
from statistics import median

import llama_cpp as lib

from sds.models.catalog.backends import BACKENDS, DEFAULT, MEASURED
from sds.models.catalog.catalog import (
    FILE_NAME,
    PREPARED_MAX,
    Measured,
    Prepared,
    Record,
    Source,
    prepared,
    record_path,
    records,
    this_machine,
    through,
)
from sds.models.catalog.inspect import NOT_SAID, ModelCard, inspect_model
from sds.models.catalog.timing import (
    VARIANCE_SLOTS,
    Distributions,
    decision_times_ms,
    distributions,
    divergence,
    variance_logp,
)
from sds.models.files.fingerprint import gguf_fingerprint
from sds.models.llamacpp.weights import load_gguf
from sds.models.protocol import BackendError, Dtype, Library, cause_of

TYPES = {"BF16": lib.LLAMA_FTYPE_MOSTLY_BF16, "F16": lib.LLAMA_FTYPE_MOSTLY_F16, "Q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0}
BITS = {"F32": 32.0, "BF16": 16.0, "F16": 16.0, "Q8_0": 8.5}
ROUNDS = 3
TIE = 1.03
KL_MAX = 0.02  # mean KL from the exact weights: a type further away decides differently
HEADER_BYTES = 1 << 25
WAIT_S, WAIT_STEP_S = 1800.0, 0.2
_UNFINISHED = ".prepare-"
Log = Callable[[str], None]


@dataclass(slots=True)
class Candidate:
    """Weights of one type, the library that runs them, and its data type, None: the library's own."""

    type: str
    path: Path
    library: Library = DEFAULT
    dtype: Dtype | None = None
    kl_mean: float = 0.0
    times_ms: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return through(self.type, self.library, self.dtype)

    @property
    def ms_min(self) -> float:
        """The time to compare by: other load on the machine only adds to it."""
        return min(self.times_ms)

    def measured(self) -> Measured:
        return Measured(
            type=self.type,
            library=self.library,
            dtype=self.dtype,
            ms_min=round(self.ms_min, 3),
            ms_p50=round(median(self.times_ms), 3),
            ms_max=round(max(self.times_ms), 3),
            decisions=len(self.times_ms),
            bytes=self.path.stat().st_size,
            kl_mean=self.kl_mean,
        )


@dataclass(frozen=True, slots=True)
class Preparation:
    """Prepares one model. `clock_s` and `sleep` are the machine's; `log` gets a line for each step.

    `libraries`: those to measure, where this machine has them. `kl_max`: nothing further from the exact weights is
    kept, except the source's own type.
    """

    cache: Path
    threads: int
    today: str
    clock_s: Callable[[], float]
    sleep: Callable[[float], None]
    log: Log
    libraries: Sequence[Library] = MEASURED
    kl_max: float = KL_MAX

    def run(self, source: Path, *, layers: int | None = None, again: bool = False) -> tuple[Prepared, bool]:
        """Return the weights to run for `source`, and whether they were measured now. Raises BackendError, one line."""
        card = _card(source, layers)
        try:
            self.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._alone():
                if not again and (found := self._found(source, layers)):
                    return found, False
                _tidy(self.cache)
                with tempfile.TemporaryDirectory(dir=self.cache, prefix=_UNFINISHED) as folder:
                    return self._prepare(source, card, layers, Path(folder)), True
        except OSError as error:
            raise BackendError(
                f"`{self.cache}` cannot be used: {cause_of(error)}", hint="set SDS_CACHE to a folder"
            ) from error

    def _found(self, source: Path, layers: int | None) -> Prepared | None:
        try:
            found = prepared(source, self.cache, layers=layers)
        except BackendError as error:
            self.log(f"{error}: measuring again")
            return None
        return found if found and self._is_near(found.record) else None

    def _is_near(self, record: Record) -> bool:
        """Return whether prepared weights are close enough to be kept."""
        kept = (record.type, record.library, record.dtype)
        far = {(each.type, each.library, each.dtype) for each in record.measured if each.kl_mean > self.kl_max}
        return kept not in far or kept == (record.source.type, DEFAULT, None)

    def _prepare(self, source: Path, card: ModelCard, layers: int | None, folder: Path) -> Prepared:
        types = [name for name in TYPES if name != card.weights]
        self._check_room(card, layers, types)
        exact = self._exact(source, card, layers, folder / "F32.gguf")
        own = self._own(source, card, layers, folder)
        candidates = self._candidates(own, self._encodings(source, card, layers, folder, types), exact)
        self._measure(candidates)
        best, why = chosen(candidates)
        return self._keep(source, card, layers, candidates, best, why)

    def _check_room(self, card: ModelCard, layers: int | None, types: Sequence[str]) -> None:
        """Raise BackendError for lack of room: at one time either the exact weights or all candidates lie in the cache."""
        kept = set(self.cache.glob("*.json")) - {record_path(self.cache, card.sha256, layers)}
        if len(kept) >= PREPARED_MAX:
            hint = "delete the models that are no longer needed"
            raise BackendError(f"`{self.cache}` holds {PREPARED_MAX} prepared models", hint=hint)
        header = min(HEADER_BYTES, card.file_bytes)
        sizes = {name: int(card.parameters * BITS[name] / 8) + header for name in ("F32", *types)}
        together = sum(sizes[name] for name in types) + (card.file_bytes if layers else 0)
        needed, free = max(sizes["F32"], together), shutil.disk_usage(self.cache).free
        if needed > free:
            raise BackendError(
                f"preparing needs {_mb(needed)} in `{self.cache}`, which has {_mb(free)}",
                hint="free disk space, or set SDS_CACHE to another folder",
            )

    def _exact(self, source: Path, card: ModelCard, layers: int | None, path: Path) -> Distributions:
        self.log("re-encoding as F32, the exact weights that the others are compared with")
        _encoded(source, path, lib.LLAMA_FTYPE_ALL_F32, card, layers)
        try:
            return distributions(path, DEFAULT, None, self.threads)
        finally:
            path.unlink()

    def _own(self, source: Path, card: ModelCard, layers: int | None, folder: Path) -> Candidate:
        if layers is None:
            return Candidate(_own_type(card), source)
        return Candidate(_own_type(card), _encoded(source, folder / "own.gguf", None, card, layers))

    def _encodings(
        self, source: Path, card: ModelCard, layers: int | None, folder: Path, types: Sequence[str]
    ) -> Iterator[Candidate]:
        for name in types:
            self.log(f"re-encoding as {name}")
            yield Candidate(name, _encoded(source, folder / f"{name}.gguf", TYPES[name], card, layers))

    def _of_other_backends(self, each: Candidate) -> list[Candidate]:
        """Return the candidates of other backends: the BF16 weights, which are there anyway, in each data type."""
        others = [BACKENDS[name] for name in self.libraries if name != DEFAULT and each.type == "BF16"]
        here = [backend for backend in others if not backend.extra or backend.version()]  # an extra may be missing
        return [
            Candidate(each.type, each.path, backend.name, dtype) for backend in here for dtype in backend.measured_in
        ]

    def _candidates(self, own: Candidate, encodings: Iterator[Candidate], exact: Distributions) -> list[Candidate]:
        """Return the source's own type, and the others that are close to the exact weights.

        No further type is encoded once there is a backend that is faster than anything llama.cpp could make of it.
        """
        own.kl_mean = divergence(exact, self._distributions(own))
        if own.kl_mean == float("inf"):
            raise BackendError(f"`{own.path}` gives no probabilities: some of its weights are not numbers")
        close, said = [own], set[str]()
        for each in chain([own], encodings):
            others = [*([] if each is own else [each]), *self._of_other_backends(each)]
            close += [other for other in others if self._is_close(other, exact, said)]
            if any(BACKENDS[other.library].outruns() for other in close):
                break
        return sorted(close, key=lambda each: each.library != DEFAULT)

    def _distributions(self, each: Candidate) -> Distributions:
        return distributions(each.path, each.library, each.dtype, self.threads)

    def _is_close(self, each: Candidate, exact: Distributions, said: set[str]) -> bool:
        """Return whether a candidate is close to the exact weights. `said`: reasons that were logged before."""
        try:
            each.kl_mean = divergence(exact, self._distributions(each))
        except BackendError as error:
            if each.library == DEFAULT:
                raise
            if str(error) not in said:
                self.log(f"{each.name} is not measured: {error}{f' ({error.hint})' if error.hint else ''}")
            said.add(str(error))
            return False
        if each.kl_mean > self.kl_max:
            self.log(f"{each.name} is left out: too far from the exact weights (KL {each.kl_mean:.2g})")
        return each.kl_mean <= self.kl_max and isfinite(each.kl_mean)

    def _measure(self, candidates: Sequence[Candidate]) -> None:
        for turn in range(ROUNDS):
            self.log(f"measuring {len(candidates)} candidates, round {turn + 1} of {ROUNDS}")
            for each in candidates:
                each.times_ms += decision_times_ms(each.path, each.library, each.dtype, self.threads, self.clock_s)

    def _keep(
        self,
        source: Path,
        card: ModelCard,
        layers: int | None,
        candidates: Sequence[Candidate],
        best: Candidate,
        why: str,
    ) -> Prepared:
        """Put the chosen weights in place, then their record, so that a reader sees both whole or neither."""
        place = record_path(self.cache, card.sha256, layers)
        variance = variance_logp(best.path, self.threads)
        cut = f"-{layers}layers" if layers else ""
        file = None if best.path == source else f"{card.sha256[:12]}-{_plain(best.type)}{cut}.gguf"
        record = Record(
            form=5,
            source=Source(name=card.name, sha256=card.sha256, type=_own_type(card), bytes=card.file_bytes),
            layers=layers,
            file=file,
            sha256=card.sha256 if file is None else gguf_fingerprint(best.path),
            bytes=best.path.stat().st_size,
            type=best.type,
            library=best.library,
            dtype=best.dtype,
            machine=this_machine(),
            threads=self.threads,
            measured=tuple(each.measured() for each in candidates),
            why=why,
            shape_noise_logp_max=variance,
            shape_noise_slots=None if variance is None else VARIANCE_SLOTS,
            date=self.today,
        )
        if file is not None:
            _place(best.path, self.cache / file)
        _write(place, record.model_dump_json(indent=1).encode())
        _tidy(self.cache)
        return Prepared(source if file is None else self.cache / file, record)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the cache for a block: two preparations at once would measure each other. Raises BackendError."""
        with (self.cache / ".lock").open("w") as lock:
            for _ in range(int(WAIT_S / WAIT_STEP_S)):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system frees it when this process ends
                    break
                except BlockingIOError:
                    self.sleep(WAIT_STEP_S)
            else:
                raise BackendError(f"another process has been preparing in `{self.cache}` for {WAIT_S:.0f} s")
            yield


def chosen(candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    """Return the fastest, of a tie the closest to the exact weights, then the smallest; and why, in one line."""
    own, *others = candidates
    near = [each for each in candidates if each.ms_min <= min(each.ms_min for each in candidates) * TIE]
    best = min(near, key=lambda each: (each.kl_mean, each.path.stat().st_size))
    if best is own:
        slower = ", ".join(f"{each.name} {each.ms_min:.1f}" for each in others)
        return own, f"{own.name} as it is: {own.ms_min:.1f} ms for a decision's passes; {slower}"
    ratio = own.ms_min / best.ms_min
    closeness = "closer to" if best.kl_mean < own.kl_mean else "no closer to"
    return best, (
        f"{best.name} takes {best.ms_min:.1f} ms for a decision's passes, {own.name} {own.ms_min:.1f} "
        f"({ratio:.1f}x), and is {closeness} the exact weights (KL {best.kl_mean:.2g}, {own.kl_mean:.2g})"
    )


def _card(source: Path, layers: int | None) -> ModelCard:
    """Return the card of the model to prepare. Raises BackendError where it cannot be prepared."""
    if source.is_dir():
        hint = "name a GGUF file, or run the folder with --dtype bf16"
        raise BackendError(f"`{source}` is a folder: weight types and layers are for GGUF files", hint=hint)
    with inspect_model(source) as model:
        card = model.card
    if layers is not None and not 1 <= layers < card.layers:
        raise BackendError(f"`{source}` has {card.layers} layers: 1 to {card.layers - 1} can be kept, not {layers}")
    return card


def _encoded(source: Path, path: Path, file_type: int | None, card: ModelCard, layers: int | None) -> Path:
    """Write `source` in another weight type (None: its own), or without its upper layers, or both."""
    model, words = load_gguf(source, vocab_only=True)  # checks the file, and makes llama.cpp silent
    words.release()
    lib.llama_model_free(model)
    params = lib.llama_model_quantize_default_params()
    params.nthread, params.allow_requantize = 1, True
    params.only_copy = file_type is None
    params.ftype = file_type or 0
    cut = (ctypes.c_int32 * (card.layers + 1))(*range(layers or card.layers, card.layers), -1)
    params.prune_layers = cut if layers else None
    code = lib.llama_model_quantize(os.fsencode(source), os.fsencode(path), ctypes.byref(params))
    if code != 0:
        free = shutil.disk_usage(path.parent).free
        raise BackendError(
            f"`{source.name}` could not be re-encoded as {path.stem} (llama.cpp code {code}, {_mb(free)} free)",
            hint="free disk space, or run the model unprepared",
        )
    path.chmod(0o600)
    return path


def _place(made: Path, path: Path) -> None:
    with made.open("rb") as file:
        os.fsync(file.fileno())
    made.rename(path)
    _sync_folder(path.parent)


def _write(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_UNFINISHED, delete=False) as file:  # mode 0600
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).rename(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tidy(cache: Path) -> None:
    """Delete what a killed preparation left, and weights that no record names. These stay while there is a record that
    cannot be read, which may be another version's.
    """
    found = records(cache)
    named = {record.file for record in found}
    whole = len(found) == len(list(cache.glob("*.json")))
    for path in cache.iterdir():
        if path.name.startswith(_UNFINISHED) and path.is_dir():
            shutil.rmtree(path)
        elif path.name.startswith(_UNFINISHED) or (
            whole and re.fullmatch(FILE_NAME, path.name) and path.name not in named
        ):
            path.unlink()


def _own_type(card: ModelCard) -> str:
    return "own type" if card.weights == NOT_SAID else card.weights


def _plain(name: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in name)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
