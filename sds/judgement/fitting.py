"""The fitters of a contract's readers: those that this installation has, and the base encoder they begin with.

All of it is an extra (`fit`; for the tuned encoder also `hf`), and is imported on its first use.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sds.kernel.envelope.state import Fields
from sds.kernel.errors import UsageError
from sds.models.protocol import BackendError, extra_hint
from sds.models.readers.protocol import Reader

SEED = 261
NO_TORCH = "torch is not installed (extra `hf`): a head is fitted on the unchanged encoder, which is not tuned"
LIBRARIES = ("numpy", "scikit-learn", "onnx", "onnxruntime", "tokenizers", "torch")

Progress = Callable[[int, int, str], None]  # done, total, what
Row = tuple[Fields, Mapping[str, Mapping[str, float]]]


class Input(NamedTuple):
    """One input of a score. `type`: int, bool, category, or reading (its probabilities). `values`: of the last two."""

    name: str
    type: str
    values: tuple[str, ...] = ()


class FittedText(Protocol):
    """A fitted reader of an enumeration. It can also be exported, as a table can, unless it only asks a model."""

    def calibrated(self, texts: Sequence[str], values: Sequence[str]) -> FittedText: ...
    def reader(self) -> Reader: ...


class FittedTable(Protocol):
    def calibrated(self, rows: Sequence[Row], truth: Sequence[bool]) -> FittedTable: ...
    def export(self, folder: Path) -> str: ...
    def reader(self) -> Reader: ...


class FitsText(Protocol):
    def __call__(
        self,
        texts: Sequence[str],
        values: Sequence[str],
        *,
        names: Sequence[str],
        seed: int,
        distractions: Sequence[str] = (),
        on_progress: Progress | None,
    ) -> FittedText: ...


class FitsTable(Protocol):
    def __call__(
        self,
        rows: Sequence[Row],
        truth: Sequence[bool],
        *,
        inputs: Sequence[Input],
        seed: int,
        on_progress: Progress | None,
    ) -> FittedTable: ...


class OpensReader(Protocol):
    def __call__(self, folder: Path, *, sha256: str) -> Reader: ...


@dataclass(frozen=True, slots=True)
class Fitters:
    """`text` fits an enumeration, `table` a score, `open` opens an exported reader. `base`: what `text` begins with.

    `asked`: by reading, calibrates the language model instead of `text`; it learns nothing.
    """

    kind: str
    text: FitsText
    table: FitsTable
    open: OpensReader
    base: Mapping[str, str]
    asked: Mapping[str, FitsText] = field(default_factory=dict)


def open_fitters(
    *, head: bool = False, texts: bool = True, base: Path | None = None
) -> tuple[Fitters, tuple[str, ...]]:
    """Return the fitters of this installation, and notices, a line each. Raises UsageError without the extra.

    `head`: use the quick one although the other is there. `texts`: whether an enumeration is among the readings, which
    needs a base: that of the package, unless `base` names a folder.
    """
    for name in ("sklearn", "onnx"):
        if find_spec(name) is None:
            raise UsageError(f"fitting needs `{name}`", hint=extra_hint("fit"))
    try:
        tuned = not head and find_spec("torch") is not None
        notices = (NO_TORCH,) if not tuned and not head and texts else ()
        return _fitters(tuned=tuned, texts=texts, base=base), notices
    except BackendError as error:
        raise UsageError(str(error), hint=error.hint) from error


def _fitters(*, tuned: bool, texts: bool, base: Path | None) -> Fitters:
    from sds.models.fitting import base as bases  # noqa: PLC0415
    from sds.models.fitting import tabular  # noqa: PLC0415
    from sds.models.readers.artifact import Input as TableInput  # noqa: PLC0415
    from sds.models.readers.opening import open_reader  # noqa: PLC0415

    fit: Any
    if tuned:
        from sds.models.fitting.encoder_tuning import fit_encoder as fit  # noqa: PLC0415
    else:
        from sds.models.fitting.encoder_head import fit_head as fit  # noqa: PLC0415
    place = (base or bases.find_base()) if texts else None
    encoder = bases.open_base(place) if place is not None else None

    def text(
        texts: Sequence[str], values: Sequence[str], *, distractions: Sequence[str] = (), **how: Any
    ) -> FittedText:
        found: FittedText = fit(texts, values, base=place, **({"distractions": distractions} if tuned else {}), **how)
        return found

    def table(rows: Sequence[Row], truth: Sequence[bool], *, inputs: Sequence[Input], **how: Any) -> FittedTable:
        taken = [TableInput.model_validate(each._asdict()) for each in inputs]
        found: FittedTable = tabular.fit_tabular(rows, truth, inputs=taken, **how)
        return found

    said = {"name": encoder.name, "sha256": encoder.sha256} if encoder is not None else {}
    return Fitters("encoder" if tuned else "head", text, table, open_reader, said)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that fit."""
    found = {"python": platform.python_version()}
    for name in ("sovereign-decision-stream", *LIBRARIES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
