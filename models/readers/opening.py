"""Opens a fitted reader of any kind."""

from __future__ import annotations

from pathlib import Path

from sds.models.readers.artifact import Artifact, read_artifact
from sds.models.readers.encoder import TextReader
from sds.models.readers.protocol import Reader
from sds.models.readers.tabular import TableReader


def open_reader(folder: Path, *, sha256: str = "") -> Reader:
    """Open the folder of one reader. `sha256`: of its reader.json; "": any. Raises ReaderError."""
    return reader_of(read_artifact(folder, sha256=sha256))


def reader_of(artifact: Artifact) -> Reader:
    """Return the reader of an artifact, read or fitted. Raises ReaderError where it cannot be run."""
    return TableReader(artifact) if artifact.manifest.kind == "tabular" else TextReader(artifact)
