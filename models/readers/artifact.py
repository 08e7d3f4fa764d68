"""A fitted reader on disk: `reader.json`, which has the hash of every other file, and `model.onnx`; for a reader of
texts also `tokenizer.json` and `spelling.json` (older readers lack the latter and read a text as it is typed).

The hashed bytes are the ones that run: each file is read once, compared, and opened from memory. Links are not followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sds.models.protocol import cause_of
from sds.models.readers.onnx_form import check_onnx
from sds.models.readers.protocol import SCORE, VALUES_MAX, ReaderError

SCHEMA = "sds.reader/1"
MANIFEST, MODEL, TOKENIZER, SPELLING = "reader.json", "model.onnx", "tokenizer.json", "spelling.json"
MANIFEST_BYTES_MAX = 1 << 20
FILE_BYTES_MAX = 1 << 28
TOKENS_MAX = 512
INPUTS_MAX = 256
POINTS_MAX = 4096  # of an isotonic calibration
_HINT = "fit the reader again, or restore its files from a copy"

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=0)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class File(_Kept):
    sha256: Sha256
    bytes: Count


class Temperature(_Kept):
    """Logits are divided by it before they become probabilities."""

    method: Literal["temperature"] = "temperature"
    temperature: Positive


class Sigmoid(_Kept):
    """p = 1 / (1 + exp(-(slope * score + offset))); Platt 1999."""

    method: Literal["sigmoid"] = "sigmoid"
    slope: Positive
    offset: Real


class Isotonic(_Kept):
    """The share at a score, interpolated between neighbours. Both lists are in ascending order."""

    method: Literal["isotonic"] = "isotonic"
    scores: tuple[Real, ...] = Field(min_length=1, max_length=POINTS_MAX)
    shares: tuple[Share, ...] = Field(min_length=1, max_length=POINTS_MAX)

    @model_validator(mode="after")
    def _rises(self) -> Isotonic:
        if len(self.scores) != len(self.shares):
            raise ValueError("scores and shares differ in number")
        if list(self.scores) != sorted(self.scores) or list(self.shares) != sorted(self.shares):
            raise ValueError("scores or shares fall")
        return self


Calibration = Temperature | Sigmoid | Isotonic


class Familiarity(_Kept):
    """`distance_max`: a text whose features are farther from the fitted ones is unfamiliar. `letters`: those of fitted
    texts; a text with a larger share of other letters than `strange_max` is unfamiliar, too.
    """

    distance_max: Positive
    letters: Annotated[str, Field(max_length=4096)]
    strange_max: Share


class Input(_Kept):
    """One field, or one reading, that a table reader gets. `values`: of a category or a reading. `low` and `high`: of a
    whole number, in the rows of the fit.
    """

    name: Name
    type: Literal["int", "bool", "category", "reading"]
    values: tuple[str, ...] = ()
    low: int = 0
    high: int = 0


class Base(_Kept):
    name: Name
    sha256: Sha256


class Manifest(_Kept):
    """The content of `reader.json`. `fitted` and `calibrated`: numbers of examples."""

    schema_: Literal["sds.reader/1"] = Field(alias="schema")
    kind: Literal["encoder", "head", "tabular"]
    values: tuple[Name, ...] = Field(min_length=1, max_length=VALUES_MAX)
    files: dict[Literal["model.onnx", "tokenizer.json", "spelling.json"], File]
    tokens_max: Annotated[int, Field(ge=0, le=TOKENS_MAX)] = 0
    inputs: tuple[Input, ...] = Field(default=(), max_length=INPUTS_MAX)
    calibration: Calibration = Field(discriminator="method")
    familiarity: Familiarity | None = None
    base: Base | None = None
    seed: int
    fitted: Count
    calibrated: Count

    @model_validator(mode="after")
    def _whole(self) -> Manifest:
        """Check that the parts suit a reader of texts, or of tables."""
        if len(set(self.values)) != len(self.values):
            raise ValueError("a value stands twice")
        reads_text = self.kind != "tabular"
        if {*self.files} - {SPELLING} != ({MODEL, TOKENIZER} if reads_text else {MODEL}):
            raise ValueError("files are missing")
        if SPELLING in self.files and not reads_text:
            raise ValueError("a table has no spelling")
        if reads_text != (self.familiarity is not None and self.tokens_max > 0 and not self.inputs):
            raise ValueError("the parts are those of another kind")
        if reads_text != isinstance(self.calibration, Temperature):
            raise ValueError("the calibration is that of another kind")
        if not reads_text and (self.values != (SCORE,) or not self.inputs):
            raise ValueError("a table gives one score of its inputs")
        return self


@dataclass(frozen=True, slots=True)
class Artifact:
    """`sha256`: of the manifest. `files`: their bytes, which match the manifest's hashes."""

    manifest: Manifest
    sha256: str
    files: Mapping[str, bytes]


def read_artifact(folder: Path, *, sha256: str = "") -> Artifact:
    """Read a folder from `write_artifact`. `sha256`: of its manifest; "": any. Raises ReaderError."""
    content = _read(folder / MANIFEST, MANIFEST_BYTES_MAX)
    found = hashlib.sha256(content).hexdigest()
    if sha256 and found != sha256:
        raise ReaderError(f"`{folder / MANIFEST}` has changed since it was fitted: its hash differs", hint=_HINT)
    manifest = _manifest(folder / MANIFEST, content)
    files: dict[str, bytes] = {}
    for name, expected in manifest.files.items():
        files[name] = _read(folder / name, FILE_BYTES_MAX)
        if (len(files[name]), hashlib.sha256(files[name]).hexdigest()) != (expected.bytes, expected.sha256):
            raise ReaderError(f"`{folder / name}` has changed since it was fitted: its hash differs", hint=_HINT)
    check_onnx(files[MODEL])
    return Artifact(manifest, found, files)


def make_artifact(manifest: Mapping[str, object], files: Mapping[str, bytes]) -> Artifact:
    """Combine the parts of a fit; `manifest` lacks `schema` and `files`. Raises ReaderError where parts do not fit together."""
    named = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    check_onnx(files[MODEL])
    content = json.dumps({"schema": SCHEMA, "files": named, **manifest})
    whole = _manifest(Path(MANIFEST), content.encode())
    return Artifact(whole, hashlib.sha256(_written(whole)).hexdigest(), files)


def write_artifact(artifact: Artifact, folder: Path) -> str:
    """Write a folder that is missing or empty; return the hash of its manifest. Raises ReaderError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if next(folder.iterdir(), None) is not None:
            raise ReaderError(f"`{folder}` is not empty", hint="name a new or an empty folder")
        for name, data in artifact.files.items():
            (folder / name).write_bytes(data)
        (folder / MANIFEST).write_bytes(_written(artifact.manifest))
    except OSError as error:
        raise ReaderError(f"`{folder}` cannot be written: {cause_of(error)}") from error
    return artifact.sha256


def _written(manifest: Manifest) -> bytes:
    stated = manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    return (json.dumps(stated, indent=1, sort_keys=True) + "\n").encode()


def _manifest(file: Path, content: bytes) -> Manifest:
    try:
        stated = json.loads(content)
        schema = stated.get("schema") if isinstance(stated, dict) else None
        if schema != SCHEMA:
            raise ReaderError(f"`{file}` is of schema `{str(schema)[:40]}`, not `{SCHEMA}`", hint=_HINT)
        return Manifest.model_validate(stated)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ReaderError(f"`{file}` is not as it was written: {where[:80]}", hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise ReaderError(f"`{file}` is not JSON", hint=_HINT) from error


def _read(file: Path, bytes_max: int) -> bytes:
    """Read a regular file, no link, of at most `bytes_max` bytes. Raises ReaderError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ReaderError(f"`{file}` is not a regular file", hint=_HINT)
            if status.st_size > bytes_max:
                raise ReaderError(f"`{file}` is larger than {bytes_max} bytes", hint=_HINT)
            return stream.read(bytes_max)
    except OSError as error:
        link = file.is_symlink()
        cause = "it is a link" if link else cause_of(error)
        raise ReaderError(f"`{file}` cannot be read: {cause}", hint=_HINT) from error
