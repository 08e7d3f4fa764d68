"""The list of all backends. A new one is a folder with its own facts, and an entry here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sds.models.facts import BackendFacts
from sds.models.int8.facts import INT8
from sds.models.llamacpp.facts import LLAMACPP
from sds.models.openvino_.facts import OPENVINO
from sds.models.protocol import Library
from sds.models.transformers_.facts import TRANSFORMERS

_ALL = (LLAMACPP, TRANSFORMERS, OPENVINO, INT8)  # by default, the first that runs a model
BACKENDS: dict[Library, BackendFacts] = {each.name: each for each in _ALL}
DEFAULT = LLAMACPP.name
MEASURED = tuple(each.name for each in _ALL if each.measured_in)  # by `sds models prepare`; these run GGUF files

if TYPE_CHECKING:
    LibraryChoice = str
    MeasuredChoice = str
else:  # the values of an option or a file
    LibraryChoice = Literal[tuple(BACKENDS)]
    MeasuredChoice = Literal[MEASURED]


def library_for(*, folder: bool) -> Library:
    """Return the default library for a checkpoint folder, or for a GGUF file."""
    return next(each.name for each in _ALL if each.reads_folders or not folder)
