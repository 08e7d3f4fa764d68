"""The result of a fit: a model that is first uncalibrated, then calibrated and ready to be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sds.models.fitting.calibration import fit_temperature
from sds.models.fitting.examples import check_enough, check_labels
from sds.models.fitting.familiarity import fit_familiarity
from sds.models.readers.artifact import MODEL, Artifact, make_artifact, write_artifact
from sds.models.readers.encoder import TextTokenizer
from sds.models.readers.opening import reader_of
from sds.models.readers.protocol import Reader, ReaderError
from sds.models.readers.session import Session

TEXTS_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Fitted:
    """`manifest`: the content of reader.json, without the files."""

    manifest: Mapping[str, object]
    files: Mapping[str, bytes]

    def artifact(self) -> Artifact:
        if "calibration" not in self.manifest:
            raise ReaderError(
                "the fitted reader is not calibrated", hint="call calibrated() with examples that were kept apart"
            )
        return make_artifact(self.manifest, self.files)

    def export(self, folder: Path) -> str:
        """Write the reader's folder, which must be missing or empty; return the hash of its reader.json."""
        return write_artifact(self.artifact(), folder)

    def reader(self) -> Reader:
        return reader_of(self.artifact())


@dataclass(frozen=True, slots=True)
class FittedText(Fitted):
    """`names`: the values, in their declared order. `letters`: those of the fitted texts. `tokens_max`: of a text."""

    names: tuple[str, ...]
    tokens_max: int
    letters: str

    def calibrated(self, texts: Sequence[str], values: Sequence[str]) -> FittedText:
        """Return this reader with a temperature and limits of familiarity from texts that the fit never saw."""
        check_labels(texts, values, self.names)
        check_enough(len(texts))
        seen = run_texts(self.files, texts, ["logits", "distance"], tokens_max=self.tokens_max)
        temperature = fit_temperature(seen["logits"], indices(values, self.names))
        familiarity = fit_familiarity(seen["distance"][:, 0], texts, self.letters)
        found = {
            "calibration": temperature.model_dump(),
            "familiarity": familiarity.model_dump(),
            "calibrated": len(texts),
        }
        return replace(self, manifest={**self.manifest, **found})


def indices(values: Sequence[str], names: Sequence[str]) -> NDArray[np.int64]:
    places = {name: place for place, name in enumerate(names)}
    return np.array([places[value] for value in values], np.int64)


def run_texts(
    files: Mapping[str, bytes], texts: Sequence[str], outputs: list[str], *, tokens_max: int
) -> dict[str, NDArray[np.float64]]:
    """Return for each output the model's numbers for every text, one text a run. [N, ...]."""
    tokenizer, session = TextTokenizer(files, tokens_max), Session(files[MODEL], threads=1)

    def run(text: str) -> list[NDArray[np.float32]]:
        return session.run(outputs, {"tokens": np.array(tokenizer.encode(text)[0], np.int64)})

    with ThreadPoolExecutor(TEXTS_AT_ONCE) as pool:
        runs = list(pool.map(run, texts))
    return {name: np.array([run[place] for run in runs], np.float64) for place, name in enumerate(outputs)}
