"""The folder that `sds fit` makes of labels for one gate: fitted readers, thresholds, and their provenance.

`judgement.json` has the SHA-256 of each reader's `reader.json`, which has those of its other files. Its own SHA-256
stands in `judgement.json.sha256`, in the form of `sha256sum`. One changed byte, and the folder is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sds.kernel.canonical import digest, sha256_hex
from sds.kernel.contract.schema import Contract
from sds.kernel.errors import UsageError, cause_of
from sds.models.protocol import BackendError
from sds.models.readers.protocol import Reader

FILE, CHECKSUM = "judgement.json", "judgement.json.sha256"
# Part of the rules' hash of a contract with scores. Its thresholds apply to `distribution.confidence`; older ones, chosen when
# a score counted as certain, must not match.
CONFIDENCE_OF_SCORES = "certain as the score"
FILE_BYTES_MAX = 1 << 20

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Part(BaseModel):
    """A section of `judgement.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Threshold(Part):
    """The least confidence at which a kind is decided; None: it is not, and `missing` more labels are needed."""

    max_error: str
    least: Number | None
    accepted: int = Field(ge=0)
    wrong: int = Field(ge=0)
    missing: int = Field(ge=0)


class ModelCalibration(Part):
    """The language model as a reader: its name, and the temperature that its corrected logits are divided by."""

    model: str
    temperature: float = Field(gt=0, allow_inf_nan=False)


class Manifest(Part):
    """`judgement.json`. `readings`, `rules`: SHA-256 of the parts of the contract that readers and thresholds were made
    for. `readers`: hashes of those in the folder. `models`: calibrations of readings that the language model reads.
    """

    schema_: Literal[1] = Field(alias="schema")
    gate: str
    readings: Sha256
    rules: Sha256
    readers: dict[str, Sha256]
    models: dict[str, ModelCalibration] = Field(default_factory=dict)
    thresholds: dict[str, Threshold] = Field(default_factory=dict)
    shares: dict[str, dict[str, Number]] = Field(default_factory=dict)
    provenance: dict[str, Any] = Field(default_factory=dict)
    scores: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """A fitted folder, opened. `thresholds`: by kind; None where they were chosen for another policy."""

    folder: Path
    sha256: str
    manifest: Manifest
    readers: Mapping[str, Reader]
    thresholds: Mapping[str, Threshold] | None
    notices: tuple[str, ...] = ()
    closing: ExitStack = field(default_factory=ExitStack, compare=False)

    def calibration(self, name: str, model: str) -> ModelCalibration | None:
        """Return the calibration of a language model's answers to a reading; None without one for this very model."""
        known = self.manifest.models.get(name)
        return known if known is not None and known.model == model else None

    def close(self) -> None:
        self.closing.close()


def refuse_unread_scores(contract: Contract, judgement: Judgement | None, *, gate: str = "GATE") -> None:
    """Raise UsageError where a score has no fitted reader: a language model cannot give a score."""
    for name, spec in contract.readings.items():
        if spec.score and (judgement is None or name not in judgement.readers):
            raise UsageError(f"the score `{name}` has no fitted reader", hint=f"sds fit {gate}")


def readings_hash(contract: Contract) -> str:
    """Return the digest of the part of a contract that a fitted reader depends on: its readings."""
    return digest({name: spec.model_dump(mode="json") for name, spec in contract.readings.items()})


def rules_hash(contract: Contract) -> str:
    """Return the digest of the parts that thresholds depend on: readings, policy, and bounds on the error."""
    bounds = contract.max_error.model_dump(mode="json") if contract.max_error else None
    known = [readings_hash(contract), [line.model_dump(mode="json") for line in contract.policy], bounds]
    scores = any(spec.score for spec in contract.readings.values())
    return digest([*known, CONFIDENCE_OF_SCORES] if scores else known)


def open_reader(folder: Path, *, sha256: str) -> Reader:
    """Open the reader with this hash; its libraries load with the first reader. Raises BackendError."""
    from sds.models.readers import opening  # noqa: PLC0415

    return opening.open_reader(folder, sha256=sha256)


def checksum_line(raw: bytes) -> bytes:
    """Return the content of `judgement.json.sha256` for these bytes."""
    return f"{sha256_hex(raw)}  {FILE}\n".encode()


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Return the content of `judgement.json`, and its SHA-256. Raises UsageError."""
    path = folder / FILE
    try:
        if path.is_symlink() or path.stat().st_size > FILE_BYTES_MAX:
            raise _refused(folder, f"{FILE} is a link, or is larger than {FILE_BYTES_MAX} bytes")
        raw = path.read_bytes()
        expected = checksum_line(raw)
        with (folder / CHECKSUM).open("rb") as checksum:
            said = checksum.read(len(expected) + 1)
        if said != expected:
            raise _refused(folder, f"{FILE} was changed: its hash differs from {CHECKSUM}")
        return Manifest.model_validate(json.loads(raw)), sha256_hex(raw)
    except OSError as error:
        name = Path(str(error.filename or path)).name
        raise _refused(folder, f"{name} cannot be read: {cause_of(error)}") from error
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise _refused(folder, f"{FILE} is malformed at `{place}`") from error
    except (ValueError, RecursionError) as error:
        raise _refused(folder, f"{FILE} is not JSON") from error


def open_judgement(folder: Path, contract: Contract, *, gate: str = "GATE") -> Judgement:
    """Open a fitted folder for a contract. Raises UsageError where it belongs to another contract, or was changed.

    `gate`: the argument that names the gate to a command, for the notice.
    """
    manifest, sha256 = read_manifest(folder)
    if manifest.gate != contract.gate:
        raise _refused(folder, f"it was fitted for gate `{manifest.gate}`, not `{contract.gate}`")
    if manifest.readings != readings_hash(contract) or {*manifest.readers, *manifest.models} - set(contract.readings):
        raise _refused(folder, "it was fitted for other readings than the contract's")
    same_rules = manifest.rules == rules_hash(contract)
    notices = () if same_rules or not contract.max_error else (OTHER_RULES.format(gate),)
    with ExitStack() as opened:
        readers = dict[str, Reader]()
        for name, expected in manifest.readers.items():
            try:
                readers[name] = open_reader(folder / name, sha256=expected)
            except BackendError as error:
                raise _refused(folder, f"{name}: {error}") from error
            opened.callback(readers[name].close)
            _check_values(folder, name, contract, readers[name])
        thresholds = manifest.thresholds if same_rules else None
        return Judgement(folder, sha256, manifest, readers, thresholds, notices, opened.pop_all())


OTHER_RULES = "the thresholds were fitted for another policy: kinds that `max_error` limits go to a human until you run `sds fit {}`"


def _check_values(folder: Path, name: str, contract: Contract, reader: Reader) -> None:
    wanted = tuple(contract.readings[name].values) or ("score",)
    if set(reader.values) != set(wanted):
        raise _refused(folder, f"{name}: its values differ from those of the contract")


def _refused(folder: Path, why: str) -> UsageError:
    return UsageError(
        f"the fitted readers in `{folder}` are refused: {why}",
        reason_code="READERS_REFUSED",
        hint="run sds fit GATE to make new ones",
    )
